"""Head: the actor between scripts that iterate over a `stoker.DataLoader` and the chain workers.

One for all loaders and ranks of a job. It rests on the same execution, planner and transport as recipes: a
shard is some batches of a loader, a block is what they became.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from stoker.data.coordinator.production import Production
from stoker.data.engine.chain_worker import MOST_LOADED
from stoker.data.engine.pool import ChainHost
from stoker.data.messages import BlockReport, Origin, Server, Shard, Told
from stoker.data.transport.agents import Agents
from stoker.loader.attempt import STREAM_AHEAD, LoaderAttempt, LoaderPass, LoaderSettings, Place

ANSWER_S = 5.0
"""A call answers after this, with nothing, so that the script can look at its own deadline."""
HOLD_S = 60.0
"""How long a worker of an iterable dataset is held back at a time."""
IDLE_S = 15.0
"""Without a pass for so long, chain workers are ended, and their CPUs are free for others."""


class Taken:
    """Kinds of answers."""

    BLOCK, END, FAILED = "block", "end", "failed"


class LoaderService(Production):
    """Head: see the module. Zero CPUs, called from many threads.

    Args:
        hosts: from train workers by node to the hosts that preprocess.
        budget_bytes: of batches that are kept ready.
        stall_s: after so long without any result, work has failed.
    """

    def __init__(
        self, hosts: Callable[[Counter[str]], list[ChainHost]], budget_bytes: int, stall_s: float
    ) -> None:
        self.passes: Any
        self.attempt: Any = None
        """A LoaderAttempt."""
        settings: Any = LoaderSettings(stall_s)
        super().__init__(settings, {}, hosts)
        self.budget_bytes = budget_bytes
        self.notes: list[str] = []
        self.agents = Agents(lambda used: None, note=self.notes.append)

        self._busy = time.monotonic()
        """When a pass was last open."""

    def is_idle(self, now: float) -> bool:
        """As in a run; here others may want the CPUs between two passes."""
        if self.attempt.lines:
            self._busy = now
        return now - self._busy > IDLE_S

    def _run_engine(self, me: Any) -> None:
        super()._run_engine(me)
        with self.changed:
            wanted = not self.attempt.over and bool(self.attempt.lines)
        if wanted:  # a pass was opened while the execution ended
            self.start_engine(me)

    def servers(self) -> tuple[bytes, dict[str, Server]]:
        """Script's call: the secret of block connections, and who serves, by node."""
        return self.agents.servers()

    def log(self, event: str, values: dict[str, Any]) -> None:
        """Script's call: a line about the transport."""
        with self.changed:
            self.notes.append(str(values.get("text", "")))

    def knows(self, name: str) -> bool:
        """Script's call: whether a loader with this content was registered."""
        with self.changed:
            known = self.setups.pop(name, None)
            if known is not None:
                self.setups[name] = known  # the last that is forgotten
            return known is not None

    def register(self, name: str, references: list[Any]) -> None:
        """Script's call: a loader; the reference is that of its Setup."""
        with self.changed:
            self.setups[name] = references[0]
            used = {split.partition("/")[0] for split in self._open()}
            for oldest in [each for each in list(self.setups)[:-MOST_LOADED] if each not in used]:
                del self.setups[oldest]

    def _open(self) -> set[str]:
        return {line.plan.split for line in self.attempt.lines.values()} if self.attempt else set()

    def setup(self, split: str, loaded: list[str]) -> tuple[list[Any], list[str]]:
        """Chain worker's call: as in a run; passes over one loader share its Setup, and copies of a dataset
        that were made for passes that are over go."""
        with self.changed:
            references, _ = super().setup(split.partition("/")[0], loaded)
            return references, [each for each in loaded if "/" in each and each not in self._open()]

    def open(self, me: Any, key: str, name: str, streams: int, node: str) -> None:
        """Script's call: it begins to iterate.

        Args:
            me: this actor's handle.
            key: of the pass.
            name: of its registered loader.
            streams: see LoaderPass.
            node: where the script runs.
        """
        with self.changed:
            attempt = self.attempt
            if attempt is None or attempt.over:
                number = attempt.number + 1 if attempt else 0
                attempt = LoaderAttempt(
                    number, self.passes, self.pool, self.budget_bytes, self.ticket_numbers,
                    self.changed, self.ready, self.notes.append,
                )  # fmt: skip
                self.attempt = attempt
            self.training[len(self.training)] = node
            self._busy = time.monotonic()
            attempt.open(key, name, streams)
            self.changed.notify_all()
        self.start_engine(me)

    def submit(self, key: str, shards: list[tuple[int, Shard, int]], total: int | None) -> None:
        """Script's call: more to be made; see LoaderAttempt."""
        with self.changed:
            self.attempt.submit(key, shards, total)

    def take(self, key: str, places: list[Place]) -> list[tuple[str, Any]]:
        """Script's call: the blocks of these places in order, as far as they are ready.

        Waits some seconds for the first, and answers with nothing then.
        """
        deadline = time.monotonic() + ANSWER_S
        with self.changed:
            while True:
                given = self._ready(key, places)
                left = deadline - time.monotonic()
                if given or left <= 0:
                    if given:
                        self.changed.notify_all()
                    return given
                self.changed.notify_all()  # a worker that is ahead may have to make way
                self.ready.wait(left)

    def _ready(self, key: str, places: list[Place]) -> list[tuple[str, Any]]:
        line = self.attempt.lines.get(key)
        if self.attempt.failure or line is None:
            return [(Taken.FAILED, self.attempt.failure or "the batches of this pass are made no more")]
        made: LoaderPass = line.stream
        given: list[tuple[str, Any]] = []
        for place in places:
            made.next = place
            if place in made.ready:
                made.sizes.pop(place)
                given.append((Taken.BLOCK, made.ready.pop(place)))
                if not made.streams:
                    made.next = (place[0] + 1, 0)
            elif place in made.failed:
                given.append((Taken.FAILED, made.failed[place]))
            elif made.streams and place[0] in line.delivered:
                given.append((Taken.END, None))
            else:
                break
        return given

    def state(self) -> tuple[int, list[str]]:
        """Script's call: how many chain workers there are, and the notes since the last call."""
        with self.changed:
            notes = list(self.notes)
            self.notes.clear()
            return self.pool.slots, notes

    def close(self, key: str) -> None:
        """Script's call: it iterates no more."""
        with self.changed:
            if self.attempt is not None:
                self.attempt.close(key)

    def item_ended(self, ticket: int) -> None:
        """Chain worker's call; a script may wait for word that a worker has come to its end."""
        super().item_ended(ticket)
        with self.changed:
            self.ready.notify_all()

    def block_made(self, ticket: int, report: BlockReport, origin: Origin, told: Told) -> bool:
        """Chain worker's call; it waits where the batches of an iterable dataset are made too fast."""
        go_on = super().block_made(ticket, report, origin, told)
        deadline = time.monotonic() + HOLD_S
        with self.changed:
            while go_on and self._planner() is not None:
                planner = self.attempt.planner
                item = planner.active.get(ticket)
                if item is None or not item.shards or not item.line.stream.streams:
                    break
                item.quiet_since = item.stuck_since = time.monotonic()
                ahead = item.line.stream.ahead_of(report.shard)
                if planner.makes_way(ticket, ahead):
                    return False
                if ahead < STREAM_AHEAD or time.monotonic() > deadline:
                    break
                self.changed.wait(1.0)
        return go_on


_held: set[Any] = set()
"""Script: Ray ends a service when the process that started it lets go of the first handle, as with a loader
that is not needed any more, whoever else uses the service; a set keeps the first of equal ones."""


def service_of(group: str, stall_s: float) -> Any:
    """Script: the service of its job, which the first one to ask starts."""
    import ray

    from stoker.bootstrap.topology import NODE_LABEL
    from stoker.data.opening import BUFFER_SHARE, LEAST_BUFFER_BYTES, Hosts

    node = ray.get_runtime_context().get_node_id()
    resources = ray.cluster_resources()
    actor = ray.remote(LoaderService).options(
        name=f"stoker-loader-{group}",
        namespace="stoker",
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=64 + 2 * int(resources.get("CPU", 1)),
        label_selector={NODE_LABEL: node},
    )
    budget = max(LEAST_BUFFER_BYTES, int(BUFFER_SHARE * resources.get("object_store_memory", 0)))
    from stoker.schema import Config

    service = actor.remote(Hosts(Config(), node), budget, stall_s)
    _held.add(service)
    return service
