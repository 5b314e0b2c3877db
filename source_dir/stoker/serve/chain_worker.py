"""CPU host: the preprocessing process. Ray Data runs one per CPU and feeds it tickets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from stoker.errors import OverError, root_cause
from stoker.messages import Claim, Told, Work
from stoker.read.sources import Source
from stoker.serve import ray_internals
from stoker.serve.recovery import failure_of
from stoker.serve.shards import Loaded, load, refuse_flaky, tables_of
from stoker.serve.witness import Guard, Witness

ANSWER_S = 120.0
MOST_LOADED = 8
"""Maximum number of open splits; a script may read through any number of loaders."""
IDLE_S = 0.2
"""A ticket without work ends after this delay, so that workers do not poll the head continuously."""


class ChainWorker:
    """CPU host: see the module. Keeps the source, chain and cache of each split open for the whole run.

    Args:
        coordinator: the actor that hands out work, and the Setup of each split.
    """

    def __init__(self, coordinator: Any) -> None:
        import ray

        ray_internals.keep_blocks_whole()
        context = ray.get_runtime_context()
        self._coordinator = coordinator
        self._loaded: dict[str, Loaded] = {}
        self._aside: dict[tuple[str, int], tuple[int, int, Iterator[Any]]] = {}
        """Streams to be continued, by split and number: pass, next block, and the rest."""
        self._ended: int | None = None
        """The last ticket whose work is complete."""
        self._node, self._process = context.get_node_id(), context.get_actor_id()

    def __call__(self, row: Any) -> Iterator[Any]:
        """CPU host: turns a ticket into the blocks of its work.

        It reports each block before yielding it to Ray Data, so the head can match the block when it arrives.
        """
        import ray

        ticket, task = int(row["ticket"][0].as_py()), ray.get_runtime_context().get_task_id() or ""
        claim: Claim | None = None
        made, wait_s = 0, 0.0
        while True:
            try:
                if claim is None:
                    claim = self._ask("claim", ticket, self._node, self._process, self._ended)
                if claim is None:
                    time.sleep(IDLE_S)
                    return
                time.sleep(wait_s or claim.wait_s)
                for block in self._blocks(ticket, claim, task, made):
                    yield block
                    made += 1
                # Not waited for: the next ticket is ready, and its claim says it again.
                self._ended = ticket
                self._coordinator.item_ended.remote(ticket)
                return
            except OverError:
                return
            except Exception as error:
                if isinstance(root_cause(error), ray.exceptions.RayActorError):
                    return  # the run is over
                wait_s = self._ask("item_failed", ticket, failure_of(error), made)
                if not wait_s:
                    return

    def _blocks(self, ticket: int, claim: Claim, task: str, skip: int) -> Iterator[Any]:
        """The blocks of a ticket after the first `skip`, which this call has yielded before it failed."""
        split, care = claim.plan.split, claim.care
        loaded = self._loaded.pop(split, None) or self._load(split)
        self._loaded[split] = loaded
        for oldest in list(self._loaded)[:-MOST_LOADED]:
            del self._loaded[oldest]
        witness = Witness(self._coordinator, care, split) if care.names else None
        guard = Guard(care.known, witness) if care.known or witness else None
        made = 0
        far = getattr(loaded.source, "far", False) and not (loaded.cache or loaded.share or guard)
        for number, item in enumerate(claim.work, 1):
            place = (split, item.number)
            aside = self._aside.get(place)
            if aside is not None and aside[:2] == (claim.plan.seed, item.skip):
                blocks = self._aside.pop(place)[2]
            elif loaded.share and not guard:
                blocks = loaded.share.blocks(loaded, claim.plan, item, task)
            else:
                blocks = tables_of(loaded, claim.plan, item, guard)
            for nth, (table, report) in enumerate(blocks):
                if far and nth == 0:
                    self._prepare(loaded.source, ticket, claim.work[number:])
                if claim.blocks is not None and made >= claim.blocks:
                    return
                if not care.last_try:
                    refuse_flaky(report)
                told = Told(self._node, loaded.cache.usage if loaded.cache else None)
                go_on = self._ask("block_made", ticket, report, (task, made), told)
                if table is not None:
                    if made >= skip:
                        yield table
                    made += 1
                if not go_on:
                    if getattr(loaded.source, "stays", False):
                        self._aside[place] = claim.plan.seed, report.nth + 1, blocks
                    return

    def _prepare(self, source: Source, ticket: int, left: list[Work]) -> None:
        """Start fetching the next shard while this one is preprocessed."""
        shard = left[0].shard if left else self._ask("upcoming", ticket, self._process)
        if shard is not None:
            with contextlib.suppress(OSError):  # reading it will raise the same again
                source.prepare(shard)

    def _load(self, split: str) -> Loaded:
        known = {*self._loaded, *(of for of, _ in self._aside)}
        references, over = self._ask("setup", split, sorted(known))
        for each in over:
            self._loaded.pop(each, None)
        self._aside = {place: aside for place, aside in self._aside.items() if place[0] not in over}
        return load(*references)

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=ANSWER_S)
