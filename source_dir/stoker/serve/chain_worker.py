"""CPU host: the preprocessing process. Ray Data runs one per CPU; it works as long as it holds a lease."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from stoker.errors import OverError, root_cause
from stoker.messages import BlockReport, Claim, Made, Process, Reply, Work
from stoker.read.sources import Source
from stoker.serve.blocks.folder import here
from stoker.serve.recovery import failure_of
from stoker.serve.shards import Loaded, blocks_of, load, refuse_flaky
from stoker.serve.witness import Guard, Witness

ANSWER_S = 120.0
MOST_LOADED = 8
"""Maximum number of open splits; a script may read through any number of loaders."""


class ChainWorker:
    """See the module. Keeps the source, chain and cache of each split open for the whole run.

    Args:
        service: the actor that hands out work, and the Setup of each split.
        run: names the folder of its blocks.
    """

    def __init__(self, service: Any, run: str) -> None:
        import ray

        context = ray.get_runtime_context()
        self._service, self._folder = service, here(run)
        self._loaded: dict[str, Loaded] = {}
        self._streams: dict[tuple[str, int], tuple[int, int, Iterator[Any]]] = {}
        """Open streams, by split and number: pass, next block, and the rest."""
        self._me = Process(context.get_actor_id(), context.get_node_id(), secrets.token_hex(8))
        self._sums: defaultdict[str, Any] = defaultdict(lambda: np.zeros(4))
        """By split: blocks, records, bytes and seconds."""

    def __call__(self, lease: Any) -> Any:
        """Work until the lease is over; what was made, a row for each split."""
        import ray

        number, began = lease["lease"][0].as_py(), time.process_time()
        try:
            self._ask("begin_lease", self._me, ray.get_runtime_context().current_actor)
            while (reply := self._next()).go_on:
                if reply.claim is not None:
                    self._work(reply.claim)
                elif reply.wait_s:
                    time.sleep(reply.wait_s)
        except (OverError, ray.exceptions.RayActorError):
            pass  # the run is over
        return self._rows(number, time.process_time() - began)

    def _rows(self, lease: int, cpu_s: float) -> Any:
        import pyarrow as pa

        sums = dict(self._sums) or {"": np.zeros(4)}
        self._sums.clear()
        counts, seconds = zip(*((each[:3].astype(int), each[3]) for each in sums.values()), strict=True)
        table = {"lease": [lease] * len(sums), "split": list(sums), "seconds": list(seconds)}
        table |= {name: [int(c[n]) for c in counts] for n, name in enumerate(("blocks", "records", "bytes"))}
        return pa.table(table | {"cpu_s": [cpu_s / len(sums)] * len(sums)})

    def _next(self) -> Reply:
        reply: Reply = self._ask("claim", self._me)
        self._folder.remove(reply.unused)
        return reply

    def _work(self, claim: Claim) -> None:
        import ray

        try:
            time.sleep(claim.wait_s)
            self._make(claim)
        except (OverError, ray.exceptions.RayActorError):
            raise
        except Exception as error:
            if isinstance(root_cause(error), ray.exceptions.RayActorError):
                raise root_cause(error) from error
            self._ask("item_failed", self._me, claim.number, failure_of(error))

    def _make(self, claim: Claim) -> None:
        split, care = claim.plan.split, claim.care
        loaded = self._loaded.pop(split, None) or self._load(split)
        self._loaded[split] = loaded
        for oldest in list(self._loaded)[:-MOST_LOADED]:
            del self._loaded[oldest]
        witness = Witness(self._service, care, split) if care.names else None
        guard = Guard(care.known, witness) if care.known or witness else None
        far = getattr(loaded.source, "far", False) and not (loaded.cache or guard)
        for number, work in enumerate(claim.work, 1):
            blocks = self._blocks(loaded, claim, work, guard)
            for nth, (columns, report) in enumerate(blocks):
                if far and nth == 0:
                    self._prepare(loaded.source, claim.work[number:])
                if not care.last_try:
                    refuse_flaky(report)
                if not self._report(claim, columns, report, loaded):
                    if getattr(loaded.source, "stays", False):
                        self._streams[split, work.number] = claim.plan.seed, report.nth + 1, blocks
                    return

    def _blocks(self, loaded: Loaded, claim: Claim, work: Work, guard: Guard | None) -> Iterator[Any]:
        place = (claim.plan.split, work.number)
        stream = self._streams.get(place)
        if stream is not None and stream[:2] == (claim.plan.seed, work.skip) and work.stop is None:
            return self._streams.pop(place)[2]
        return blocks_of(loaded, claim.plan, work, guard)

    def _report(self, claim: Claim, columns: dict[str, Any], report: BlockReport, loaded: Loaded) -> bool:
        """Store a block and report it; whether to continue."""
        file = self._folder.write(columns) if columns else ""
        made = Made(report, file, loaded.cache.usage if loaded.cache else None)
        reply: Reply = self._ask("block_made", self._me, claim.number, made)
        self._folder.remove(reply.unused)
        self._sums[claim.plan.split] += [1, report.records, report.bytes_out, report.seconds]
        return reply.go_on

    def _prepare(self, source: Source, left: list[Work]) -> None:
        """Start fetching the next shard while this one is preprocessed."""
        shard = left[0].shard if left else self._ask("upcoming", self._me)
        if shard is not None:
            with contextlib.suppress(OSError):  # reading it will raise the same again
                source.prepare(shard)

    def _load(self, split: str) -> Loaded:
        known = {*self._loaded, *(of for of, _ in self._streams)}
        references, over = self._ask("setup", split, sorted(known))
        for each in over:
            self._loaded.pop(each, None)
        self._streams = {place: rest for place, rest in self._streams.items() if place[0] not in over}
        return load(*references)

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._service, method).remote(*arguments), timeout=ANSWER_S)
