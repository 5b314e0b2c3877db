"""Chain workers: preprocessing processes, one per CPU, and the leases by which Ray Data runs them.

    leases  →  map_batches(ChainWorker), an actor per lease  →  rows of statistics

A chain worker works as long as it holds a lease. Ray Data starts, places and restarts the workers, and ends
those whose lease is over. The workers that are missing at a moment start together: all of them at the
beginning, and later those of hosts that join.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from stoker.errors import Failure, FlakyReadError
from stoker.protocol import BlockReport, Claim, Made, Process, Reply, SplitSetup, Work
from stoker.ray_compat import look_at_tasks_every
from stoker.read.sources import IndexedSource, Source
from stoker.serve.blocks.folder import digest_of, here
from stoker.serve.shards import Guard, LoadedSplit, blocks_of, let_wait, open_split, retries

if TYPE_CHECKING:
    from stoker.serve.pool import Pool

LastBlock = tuple[int, Made] | None
"""The last block of a claim, with the claim's number, until it is reported."""
ANSWER_S = 120.0
MADE = ("rows", "bytes", "wall_s")
MOST_LOADED = 8
"""Maximum number of open splits, as a script may read through any number of loaders. Copies of an iterable
dataset may serve later passes and are not counted: they stay until the service says that they are over."""


class ChainWorker:
    """See the module. Keeps the source, chain and cache of each split open for the whole run."""

    def __init__(self, service: Any, run: str) -> None:
        import ray

        context = ray.get_runtime_context()
        self._service, self._folder = service, here(run)
        self._loaded: dict[str, LoadedSplit] = {}
        self._streams: dict[tuple[str, int], tuple[int, int, Iterator[Any]]] = {}
        """Open streams, by split and number: pass, next block, and the rest."""
        self._me = Process(context.get_actor_id(), context.get_node_id(), secrets.token_hex(8))
        self._made = dict.fromkeys(MADE, 0.0)

    def __call__(self, lease: Any) -> Any:
        """Work until the lease is over; a row of statistics."""
        import pyarrow as pa
        import ray

        began, tasks, last = time.process_time(), int(lease["lease"][0].as_py() >= 0), None
        try:
            if tasks:
                self._ask("begin_lease", self._me, ray.get_runtime_context().current_actor)
            while tasks and (reply := self._next(last)).go_on:
                last = self._work(reply, reply.claim) if reply.claim is not None else None
                time.sleep(reply.wait_s)
        except ray.exceptions.RayActorError:
            pass  # the run is over
        made, self._made = self._made, dict.fromkeys(MADE, 0.0)
        return pa.Table.from_pylist(
            [{"tasks": tasks, "cpu_s": time.process_time() - began, **made}]
        )

    def _next(self, last: LastBlock) -> Reply:
        reply: Reply = self._ask("claim", self._me, list(self._loaded), last)
        self._folder.recycle(reply.unused)
        return reply

    def _work(self, reply: Reply, claim: Claim) -> LastBlock:
        import ray

        try:
            time.sleep(claim.wait_s)
            return self._make(reply, claim)
        except ray.exceptions.RayActorError:
            raise
        except Exception as error:
            self._ask("item_failed", self._me, claim.number, Failure.of(error), retries(error))
        return None

    def _make(self, reply: Reply, claim: Claim) -> LastBlock:
        """Report all blocks but the last one, which is reported with the next claim."""
        split, care, last = claim.plan.split, claim.care, None
        loaded = self._loaded.pop(split, None) or self._load(cast(SplitSetup, reply.setup))
        self._loaded[split] = loaded
        counted = [
            each for each, of in self._loaded.items() if not getattr(of.source, "stays", False)
        ]
        for oldest in counted[:-MOST_LOADED]:
            del self._loaded[oldest]
        tell = partial(self._tell, split, care.task) if care.names else None
        guard = Guard(care.known, tell) if care.known or tell else None
        reads = not guard and (loaded.cache is None or loaded.chain.share < 1)
        far = getattr(loaded.source, "far", False) and reads
        for number, work in enumerate(claim.work, 1):
            blocks = self._blocks(loaded, claim, work, guard)
            short = far and isinstance(loaded.source, IndexedSource)
            if short:  # as a shard may be one block, the next one is fetched behind it
                loaded.source.prepare(work.shard)
                self._prepare(loaded.source, claim.work[number:])
            for nth, (columns, report) in enumerate(blocks):
                if far and nth == 0 and not short:
                    self._prepare(loaded.source, claim.work[number:])
                if not care.last_try and (passing := [bad for bad in report.bad if bad.passing]):
                    raise FlakyReadError(passing[0].reason, record=passing[0].key)
                if claim.plan.exact:
                    report.digest = digest_of(columns)
                made = self._written(columns, report, loaded)
                if report.last and number == len(claim.work):
                    last = claim.number, made  # what follows it may still fail
                elif not self._report(claim, made):
                    if getattr(loaded.source, "stays", False):
                        self._streams[split, work.number] = claim.plan.seed, report.nth + 1, blocks
                    return None
        return last

    def _blocks(
        self, loaded: LoadedSplit, claim: Claim, work: Work, guard: Guard | None
    ) -> Iterator[Any]:
        if work.stop is None:
            # The stream of a pass that was given up ends before another one begins.
            stream = self._streams.pop((claim.plan.split, work.number), None)
            if stream is not None and stream[:2] == (claim.plan.seed, work.skip):
                return stream[2]
            del stream
        elif getattr(loaded.source, "stays", False):
            loaded = loaded._replace(source=loaded.source.apart())
        return blocks_of(loaded, claim.plan, work, guard)

    def _written(self, columns: dict[str, Any], report: BlockReport, loaded: LoadedSplit) -> Made:
        file = self._folder.write(columns) if columns else ""
        own = report.records, report.bytes_out, report.seconds
        for name, more in zip(MADE, own, strict=True):
            self._made[name] += more
        return Made(report, file, loaded.cache.usage if loaded.cache else None)

    def _report(self, claim: Claim, made: Made) -> bool:
        reply: Reply = self._ask("block_made", self._me, claim.number, made)
        self._folder.recycle(reply.unused)
        return reply.go_on

    def _prepare(self, source: Source, left: list[Work]) -> None:
        shard = left[0].shard if left else self._ask("upcoming", self._me)
        if shard is not None:
            with contextlib.suppress(OSError):  # reading it will raise the same again
                source.prepare(shard)

    def _load(self, setup: SplitSetup) -> LoadedSplit:
        for over in {*self._loaded, *(of for of, _ in self._streams)} - setup.needed:
            self._loaded.pop(over, None)
        self._streams = {
            place: rest for place, rest in self._streams.items() if place[0] in setup.needed
        }
        loaded = open_split(setup.reference)
        if begin := getattr(loaded.source, "begin", None):
            begin(self._folder, setup.where)
        return loaded

    def _tell(self, split: str, task: str, method: str, what: str) -> Any:
        return self._ask(method, split, task, what)

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._service, method).remote(*arguments), timeout=ANSWER_S)


CPUS = 0.5
"""CPUs that a chain worker requests from Ray. Less than 1, so that a host can also take the workers of a lost
host until their leases are ended; `Pool` decides how many run."""
STARTING_LOOK_S, WORKING_LOOK_S = 0.1, 1.0
"""How often Ray Data looks at the leases while workers start, which it gives them one by one, and later."""
SHORT = 2
"""Leases that end at once: the first row of an execution, which one has to wait for, and the next, which Ray
Data reads ahead. Whoever waits for rows looks for them a hundred times a second."""
UNWATCHED_S = 60.0
"""How long workers may be missing, or silent, before the executions are watched for an error."""
START_S = 180.0
"""Workers that have not reported after this time are started again."""
TEXTS = 20


class Leases:
    """Part of the service; `failed` takes the error that ends an execution."""

    def __init__(
        self, service: Any, run: str, pool: Pool, failed: Callable[[BaseException], None]
    ) -> None:
        self._service, self._run, self._pool, self._failed = service, run, pool, failed
        self._lock = threading.Lock()
        self._starting: list[tuple[float, Counter[str]]] = []
        """For each execution: since when, and how many workers it has still to start, by node."""
        self._whole_at = time.monotonic()
        """When all workers were last there, and none of them silent."""
        self._watched = threading.Event()
        """From the first end of a lease on: Ray Data ends its workers only for somebody who waits."""
        self._threads: list[threading.Thread] = []
        self._datasets: list[Any] = []
        self._sums: Counter[str] = Counter()

    def entered(self, node: str) -> None:
        with self._lock:
            for _, starting in self._starting:
                if starting[node] > 0:
                    starting[node] -= 1
                    return

    def look(self, alone: bool, silent: bool) -> None:
        """Start the workers that are missing.

        Args:
            alone: no other dataset is executed in this process.
            silent: a worker has not called for long; it may work on something, or have ended.
        """
        now = time.monotonic()
        with self._lock:
            self._starting = [
                each for each in self._starting if now - each[0] < START_S and each[1].total() > 0
            ]
            starting = sum((nodes for _, nodes in self._starting), Counter[str]())
            begun = now, Counter(places := self._pool.missing(starting))
            if places:
                self._starting.append(begun)
        whole = not (starting or places)
        look_at_tasks_every(WORKING_LOOK_S if alone and whole else STARTING_LOOK_S)
        self._whole_at = now if whole and not silent else self._whole_at
        if now - self._whole_at > UNWATCHED_S:
            self.watch()
        if not places:
            return
        thread = threading.Thread(
            target=self._execute, args=(begun, places), name="leases", daemon=True
        )
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def watch(self) -> None:
        self._watched.set()

    def join(self, seconds: float) -> None:
        self.watch()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def statistics(self) -> tuple[str, list[dict[str, Any]]]:
        """Ray Data's own text about the latest executions, and the sums of all leases that are over."""
        text = "\n".join(dataset.stats() for dataset in self._datasets[-TEXTS:])
        with self._lock:
            sums = Counter(self._sums)
        if not sums["tasks"]:
            return text, []
        whole = {name: int(sums[name]) for name in ("tasks", "rows", "bytes")}
        times = {name: round(float(sums[name]), 3) for name in ("cpu_s", "wall_s")}
        return text, [{"name": "MapBatches(ChainWorker)", **whole, **times}]

    def _execute(self, begun: tuple[float, Counter[str]], places: list[str]) -> None:
        try:
            dataset = self._dataset(places)
            self._datasets = [*self._datasets, dataset][-TEXTS:]
            for rows in dataset.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            ):
                with self._lock:
                    for row in rows.to_pylist():
                        self._sums.update(row)
                self._watched.wait()
        except Exception as error:
            self._failed(error)
        finally:
            with self._lock:
                self._starting = [each for each in self._starting if each is not begun]

    def _dataset(self, places: list[str]) -> Any:
        import ray
        from ray.data import ActorPoolStrategy

        nodes = iter(places)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            leases = ray.data.from_items(
                [{"lease": n} for n in range(-SHORT, len(places))],
                override_num_blocks=len(places) + SHORT,
            )
            let_wait(leases)
            leases.context.max_errored_blocks = -1
            return leases.map_batches(
                ChainWorker,
                fn_constructor_args=(self._service, self._run),
                batch_size=None,
                batch_format="pyarrow",
                compute=ActorPoolStrategy(size=len(places), max_tasks_in_flight_per_actor=1),
                num_cpus=CPUS,
                ray_remote_args_fn=lambda: _at(nodes),
                max_restarts=-1,
                max_task_retries=-1,
            )


def _at(nodes: Iterator[str]) -> dict[str, Any]:
    """Options that place the next worker: on its node, or anywhere once that is lost."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = next(nodes, "")
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)} if node else {}
