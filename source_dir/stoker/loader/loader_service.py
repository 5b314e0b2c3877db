"""Head: the actor that connects scripts with a `stoker.DataLoader` to chain workers.

One actor serves all loaders and ranks of a job. It uses the same execution, planner and transport as recipes:
a shard is the indices of some batches, a block is these batches.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, cast

import ray

from stoker import ray_compat
from stoker.config.places import CpuHostsConfig
from stoker.config.schema import ClusterConfig, Config
from stoker.errors import Failure
from stoker.events.kinds import Event, HostCpu, Note
from stoker.loader.loader_pass import LoaderPass
from stoker.loader.pass_timer import PassProgress
from stoker.loader.shared import Part, PassShare, SharedBatches, SharedGroup, slice_of
from stoker.loader.shared_streams import RankOfStreams, SharedPass, SharedStreams, WantedPart
from stoker.protocol import (
    BlockPlace,
    Made,
    PassPlan,
    Process,
    Reply,
    Shard,
    SplitSetup,
    Work,
)
from stoker.serve.accounting import ChainCosts
from stoker.serve.chain_worker import MOST_LOADED, LastBlock
from stoker.serve.items import ReadyBlock
from stoker.serve.passes import Pass, ServiceState
from stoker.serve.planner import PlannedAttempt, Planner
from stoker.serve.service import DataService, start_service
from stoker.serve.suspects import Suspects
from stoker.session import CPU_HOSTS_VARIABLE, append

ANSWER_S = 5.0
"""A call returns nothing after this time, so that the script can check its own deadline."""
IDLE_S = 15.0
"""Without a pass for this long, chain workers stop and free their CPUs."""
JOBS_EVERY_S, ENDS_WITHIN_S, ENTER_S = 5.0, 30.0, 120.0
RECENT_S = 10.0
"""A pass of which no batch was taken for so long does not count as training."""
SPENT_SHARE = 0.25
"""Budget for blocks that stay for ranks that have not asked yet, as a share of that for ready blocks."""


class LoaderAttempt(PlannedAttempt):
    """Ends when work fails for good; the next pass starts another attempt.

    `copies`, with `persistent_workers`: by split, the chain worker with each stream's copy of the dataset.
    """

    in_order = False
    idle = False
    """Whether no pass has been open for a while; a script may open further ones."""

    def __init__(
        self, number: int, shared: ServiceState, copies: dict[str, dict[int, str]]
    ) -> None:
        super().__init__(number, shared)
        self.suspects, self.copies = Suspects(), copies
        self.passes: dict[str, LoaderPass] = {}
        self._opened = count(1)
        self.planner: Planner = Planner(self)
        self.sharing = SharedBatches(int(SPENT_SHARE * shared.budget_bytes), self._ready)
        self.streams = SharedStreams(self)

    @property
    def all_produced(self) -> bool:
        return self.idle

    def fail(self, failure: Failure) -> None:
        super().fail(replace(failure, text=self._named(failure.text)))

    def note(self, text: str) -> None:
        super().note(self._named(text))

    def stalled(self, pass_: Pass, reason: str) -> None:
        """As the base's, but this pass alone fails: others may have longer deadlines."""
        mine = cast(LoaderPass, pass_)
        with self.shared.changed:
            for each in mine.takers:
                each.failed[each.next] = self._named(reason)
            self.shared.ready.notify_all()

    def _named(self, reason: str) -> str:
        for each in self.passes.values():
            reason = reason.replace(f"{each.plan.split} shard", "DataLoader")
        return reason

    def open_passes(self) -> list[LoaderPass]:
        """As the base's: the one least ahead first, because scripts may wait for any of them."""
        return sorted(self.passes.values(), key=lambda each: each.rows_ahead)

    def begun(self) -> list[Pass]:
        self.streams.look(time.monotonic())
        return []

    def bound(self) -> set[str]:
        readers = [*self.copies.values(), *(each.readers for each in self.passes.values())]
        return {worker for each in readers for worker in each.values()}

    def open(
        self,
        key: str,
        split: str,
        streams: int,
        stall_s: float,
        ranks: int = 1,
        of: type[LoaderPass] = LoaderPass,
        **more: Any,
    ) -> LoaderPass:
        number = next(self._opened)
        plan = PassPlan(seed=number, epoch=0, split=split, shuffle=False, block_records=1)
        readers = self.copies.get(split, {})
        self.passes[key] = pass_ = of(
            plan=plan,
            number=number,
            streams=streams,
            readers=readers,
            stall_s=stall_s,
            share=PassShare(ranks, numbers=count(number << 32)),
            **more,
        )
        self.idle = False
        self.planner.passes.append(pass_)
        return pass_

    def submit(self, key: str, shards: list[tuple[int, Shard, int]], total: int | None) -> None:
        if (pass_ := self.passes.get(key)) is None:
            return
        if pass_.streams:
            home = pass_.readers.get
            pass_.work += [
                Work(n, replace(each, home=home(n, "")), skip) for n, each, skip in shards
            ]
        else:
            for place, shard, _ in shards:
                self.sharing.order(pass_, (place, 0), shard)
        pass_.known += len(shards)
        pass_.total = pass_.total if total is None else total
        pass_.listing = pass_.total is None or pass_.known < pass_.total
        self.shared.has_work.notify(max(len(shards), 1))

    def close(self, key: str) -> None:
        if (pass_ := self.passes.pop(key, None)) is None:
            return
        self.planner.abandon(pass_)
        self.sharing.close(pass_)
        self.streams.close(key)
        for other in self.passes.values():
            if other.work and other not in self.planner.passes:  # with work of the closed pass
                self.planner.passes.append(other)
        lost = [block for (of, *_), block in self.planner.lost.items() if of is pass_]
        for block in lost:  # was being made again for that pass
            block.lost = False
        self.planner.lose(lost)
        self.shared.has_work.notify_all()
        self.shared.changed.notify_all()

    def _ready(self, pass_: LoaderPass, place: BlockPlace, parts: list[Part]) -> None:
        pass_.ready[place] = parts
        if place == pass_.next:
            self.shared.ready.notify_all()

    def deliver(self, pass_: Pass, block: ReadyBlock) -> None:
        report, mine = block.report, cast(LoaderPass, pass_)
        place = report.shard, report.nth
        if isinstance(mine, SharedPass):
            mine.give_out(block)
            self.shared.ready.notify_all()
        elif mine.streams and report.bad:
            mine.failed[place] = report.bad[0].reason
        elif mine.streams and report.rows:
            mine.ready[place] = [Part(SharedGroup(mine.share, block=block))]
        elif not mine.streams and report.bad:
            self.sharing.failed(mine, report.shard, report.bad[0].reason)
        elif not mine.streams:
            self.sharing.made(mine, block)
        self.shared.changed.notify_all()
        if place == mine.next or report.bad:
            self.shared.ready.notify_all()

    def produced(self, pass_: Pass) -> None:
        self.shared.ready.notify_all()


class LoaderService(DataService):
    """See the module and DataService. Zero CPUs, called from many threads on the Ray node `node`."""

    attempt: LoaderAttempt | None

    def __init__(self, **service: Any) -> None:
        self.notes: list[str] = []
        self._events = ""
        """The file through which a script on this host sends events to the run; empty: outside a job."""
        super().__init__(chain={"": ChainCosts()}, **service)
        self._progress: dict[str, tuple[float, PassProgress]] = {}
        """By pass: when a script last took batches of it, and how many."""
        self._busy = time.monotonic()
        self._over = False
        self._jobs: set[str] = set()
        self._job_of: dict[str, str] = {}
        self._latest: dict[str, str] = {}
        self._superseded: set[str] = set()
        self._closed = deque[str](maxlen=64)
        """Passes that were closed before they were opened: a script was interrupted."""
        self._copies: dict[str, dict[int, str]] = {}
        """With `persistent_workers` and an iterable dataset: by split, the chain worker that has the copy of
        the dataset that serves a stream."""

    def is_idle(self, now: float) -> bool:
        if self.attempt is None:
            return False
        if (
            self.attempt.passes or self._copies
        ):  # torch's persistent workers do not end between passes either
            self._busy = now
        idle, known = now - self._busy > IDLE_S, self.attempt.idle
        self.attempt.idle = idle
        # Requested hosts are let go first.
        return idle and known and not self.hosts.elastic.closing & self.shared.pool.staffed

    def event(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)
        elif self._events and not isinstance(event, HostCpu):
            with suppress(OSError):  # that script has ended
                append(self._events, event.event, event.values())

    def _knows(self, name: str, loader: str) -> bool:
        """Whether a loader with this content is registered; drops what it had before."""
        self._superseded |= {self._latest.get(loader, name)} - {name}
        self._latest[loader] = name
        for old in self._superseded - {*self._latest.values(), *self._used()}:
            self._drop(old)
            for split in [split for split in self._copies if split.partition("/")[0] == old]:
                del self._copies[split]
            self._superseded.discard(old)
        known = self.setups.pop(name, None)
        if known is not None:
            self.setups[name] = known  # most recently used
        return known is not None

    def register(self, name: str, setup: Any) -> None:
        """Called by scripts: register a loader; its Setup outlives the script, as others may share it."""
        kept = ray.put(setup)
        with self.shared.changed:
            self.setups[name] = kept
            used = self._used()
            for oldest in [each for each in list(self.setups)[:-MOST_LOADED] if each not in used]:
                self._drop(oldest)

    def _drop(self, name: str) -> None:
        self.setups.pop(name, None)
        working = {each.by.node for each in self.hosts.workers.values()}
        for node in {self.node, *self.hosts.agents.nodes, *working}:
            self.shared.holdings.discard(node, name)

    def _setup(self, split: str, loaded: list[str]) -> SplitSetup | None:
        setup, passes = super()._setup(split, loaded), self.attempt.passes if self.attempt else {}
        where = next((each.where for each in passes.values() if each.plan.split == split), None)
        return setup and setup._replace(where=where)

    def _open(self) -> set[str]:
        return {each.plan.split for each in self.attempt.passes.values()} if self.attempt else set()

    def forget(self, split: str) -> None:
        with self.shared.changed:
            self._copies.pop(split, None)
            self._copies.pop(f"{split}+", None)  # that of all ranks

    def _used(self) -> set[str]:
        return {split.partition("/")[0] for split in self._open()}

    def emptied(self) -> set[str]:
        with self.shared.changed:
            if self.attempt is not None:
                self.attempt.sharing.leave_hosts(self.shared.pool.closing)
        return super().emptied()

    def copies(self) -> set[str]:
        """As the base's: each pass has a copy of the dataset, unless workers are persistent."""
        return {*self._open(), *self._copies}

    def enter(self, me: Any, node: str, job: str) -> None:
        """Called by scripts first: registers the job whose end terminates this detached actor."""
        with self.shared.changed:
            # Until this actor is killed: the script then starts another one.
            self.shared.changed.wait_for(lambda: not self._over, ENDS_WITHIN_S)
            if not self._jobs:
                threading.Thread(target=self._watch_jobs, args=(me,), daemon=True).start()
            self._jobs.add(job)
            self.hosts.training[job] = node
        self.start_engine(me)

    def open(
        self,
        me: Any,
        key: str,
        split: str,
        loader: str,
        streams: int,
        keeps: bool,
        stall_s: float,
        node: str,
        job: str,
        told: str,
        where: Any,
        ranks: int,
        shards: list[tuple[int, Shard, int]],
        total: int | None,
        wanted: WantedPart | None = None,
    ) -> tuple[int, list[str], float] | None:
        """Called by scripts: open a pass; returns as `state`, or None: `register` the loader first.

        Args:
            me: this actor's handle.
            split: name of the loader's content, and of the copies of its dataset.
            loader: what it registered before is dropped unless others use it.
            streams: workers of an iterable dataset; 0 if map-style.
            keeps: whether the copies serve later passes, too.
            told: the file through which the script sends events to the run; empty: outside a job.
            where: packed: where and how the script runs.
            ranks: of the job; blocks stay a while for those that ask later.
            shards: its first work; this and `total` as in `submit`.
            wanted: a part of streams that other ranks read, too.
        """
        with self.shared.changed:
            if not self._knows(split.partition("/")[0], loader):
                return None
            if key in self._closed:
                return self.state(key, PassProgress())
            if key in self._job_of:  # Ray asks again after a broken connection
                self.close(key)
            if node == self.node:
                self._events = told
            self._job_of[key] = job
            attempt = self.attempt
            if attempt is None or attempt.over:
                number = attempt.number + 1 if attempt else 0
                # Scripts may still be fetching these.
                self._given_before = (
                    [each.given for each in attempt.passes.values()] if attempt else []
                )
                self.attempt = attempt = LoaderAttempt(number, self.shared, self._copies)
            self._busy = time.monotonic()
            if keeps:
                self._copies.setdefault(split, {})
                # Both would use the same copies, and the script has given the earlier one up.
                for earlier in [
                    key for key, each in attempt.passes.items() if each.plan.split == split
                ]:
                    self.close(earlier)
            pass_ = attempt.open(key, split, streams, stall_s, ranks)
            pass_.where = where
            if wanted is None:
                attempt.submit(key, shards, total)
            else:
                attempt.streams.enter(RankOfStreams(key, pass_, wanted, shards, total))
        self.start_engine(me)
        return self.state(key, PassProgress())

    def _watch_jobs(self, me: Any) -> None:
        """Thread: close passes of scripts that have ended, and end with the last script."""
        while not self._over:
            time.sleep(JOBS_EVERY_S)
            ended: set[str] = set()
            with suppress(Exception):  # Ray's control store may be restarting
                ended = ray_compat.ended_jobs() or set()
            with self.shared.changed:
                for key in [key for key, job in self._job_of.items() if job in ended]:
                    self.close(key)
                self._jobs -= ended
                self.hosts.training = {
                    job: node for job, node in self.hosts.training.items() if job not in ended
                }
                self._over = not self._jobs
        ray.kill(me)

    def submit(self, key: str, shards: list[tuple[int, Shard, int]], total: int | None) -> None:
        with self.shared.changed:
            if self.attempt is not None:
                self.attempt.submit(key, shards, total)

    def take(self, key: str, places: list[BlockPlace]) -> list[tuple[str, Any]]:
        """Called by scripts: blocks of these places that are ready, in order; waits a while for the first."""
        deadline = time.monotonic() + ANSWER_S
        with self.shared.changed:
            pass_ = self.attempt.passes.get(key) if self.attempt else None
            if pass_ is not None:
                pass_.given.clear()  # the script has fetched what it was given before
            while True:
                given = self._ready(key, places)
                # A stream is continued by its reader alone.
                self.shared.has_work.notify_all() if pass_ and pass_.streams else self.shared.has_work.notify(
                    len(places)
                )
                left = deadline - time.monotonic()
                if given or left <= 0:
                    return given
                self.shared.ready.wait(left)

    def _ready(self, key: str, places: list[BlockPlace]) -> list[tuple[str, Any]]:
        attempt = self.attempt
        pass_ = attempt.passes.get(key) if attempt else None
        if attempt is None or attempt.failure or pass_ is None:
            failure = attempt.failure if attempt else None
            return [("failed", str(failure or "this pass was closed"))]
        given: list[tuple[str, Any]] = []
        for place in places:
            pass_.next = place
            if place in pass_.ready:
                parts = pass_.give(place)
                given.append(("block", [slice_of(part) for part in parts]))
                attempt.sharing.taken(pass_, place, parts)
                if not pass_.streams:
                    pass_.next = (place[0] + 1, 0)
            elif place in pass_.failed:
                given.append(("failed", pass_.failed[place]))
            elif pass_.streams and place[0] in pass_.delivered:
                given.append(("end", None))
            else:
                break
        pass_.waits = not given
        return given

    def state(self, key: str, progress: PassProgress) -> tuple[int, list[str], float]:
        """Called by scripts every two seconds: the number of chain workers, notes since the last call, and
        seconds since a stream of the pass was read again up to its place."""
        now = time.monotonic()
        with self.shared.changed:
            before = self._progress.get(key, (now, PassProgress()))[1]
            batches, seconds, late_s = (a - b for a, b in zip(progress, before, strict=True))
            if batches > 0 and key in self._job_of:
                self._progress[key] = now, progress
                # Passes of several ranks, or of loaders within each other, run at the same time.
                at_once = sum(now - at < RECENT_S for at, _ in self._progress.values())
                if (scaler := self.hosts.elastic.scaler) is not None:
                    # Batches that another rank has made cost this one nothing.
                    pass_ = self.attempt.passes.get(key) if self.attempt else None
                    made = batches * (pass_.share.made_share if pass_ else 1.0)
                    scaler.steps.add(made, seconds / at_once, late_s / at_once)
            notes = list(self.notes)
            self.notes.clear()
            pass_ = self.attempt.passes.get(key) if self.attempt else None
            return self.shared.pool.slots, notes, now - pass_.skipped if pass_ else math.inf

    def close(self, key: str) -> None:
        with self.shared.changed:
            if self._job_of.pop(key, None) is None:
                self._closed.append(key)
            self._progress.pop(key, None)
            if self.attempt is not None:
                self.attempt.close(key)
            self.shared.ready.notify_all()

    def claim(self, by: Process, loaded: list[str], last: LastBlock) -> Reply:
        with self.shared.changed:
            self.shared.ready.notify_all()
        return super().claim(by, loaded, last)

    def _made(self, by: Process, number: int, made: Made) -> bool:
        self.chain[""].take(made.report, by.node)
        return super()._made(by, number, made)


def service_of(group: str) -> Any:
    """The first caller starts it; it is detached, so that it outlives the script while other ranks use it."""
    cpu_hosts = CpuHostsConfig.model_validate_json(os.environ.get(CPU_HOSTS_VARIABLE, "{}"))
    config = Config(cluster=ClusterConfig(cpu_hosts=cpu_hosts))
    shared = {
        "name": f"stoker-loader-{group}",
        "namespace": "stoker",
        "get_if_exists": True,
        "lifetime": "detached",
    }
    service = start_service(LoaderService, config, 64, shared)
    context = ray.get_runtime_context()
    ray.get(
        service.enter.remote(service, context.get_node_id(), context.get_job_id()), timeout=ENTER_S
    )
    return service


def forget(service: Any, split: str) -> None:
    """Script, when a loader is collected; in a thread: garbage may be collected while Ray holds its locks."""

    def tell() -> None:
        with suppress(Exception):  # the cluster may have ended
            service.forget.remote(split)

    if ray.is_initialized():
        threading.Thread(target=tell, name="stoker-forget", daemon=True).start()
