"""Head: the actor between Ray Data and the train workers.

It runs one Ray Data execution after the other (train 0, val 0, train 1, …), hands each train worker
its rows as references to blocks, keeps the books of records, and collects the run's events. Data of
the next epoch flows as soon as the one before has been produced, so no epoch starts cold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from stoker.config import UsageError
from stoker.data.agents import Agents
from stoker.data.chain import BlockReport
from stoker.data.ledger import ChainBooks, DataError, EpochBooks, explain
from stoker.data.position import CarriedBooks, Plan, Position, Trail
from stoker.data.rows import Server
from stoker.data.signals import OneTimeSignal, Pace, Signal
from stoker.data.splitter import Splitter
from stoker.data.streams import Portion, Stream

BUFFER_BYTES = 512 * 2**20
"""Preprocessed data kept ready beyond the next two steps, over all train workers."""


STREAMS_AHEAD = 2
"""How many passes may be produced beyond the one that is consumed: small data would else run ahead for
all epochs and take the CPUs from training."""


class Coordinator:
    """Head: see the module. One per run, zero CPUs, called from many threads."""

    def __init__(
        self,
        dataset_of: Callable[..., Any],
        totals: dict[str, int | None],
        *,
        plan: Plan,
        by_row: bool = False,
        batch_size: int,
        remainder: str,
        budget: float,
        epochs: int,
        direct: bool = True,
    ) -> None:
        self.dataset_of, self.plan, self.by_row = dataset_of, plan, by_row
        self.totals, self.batch_size, self.remainder = totals, batch_size, remainder
        self.budget, self.epochs = budget, epochs
        self.changed = threading.Condition()
        self.streams: dict[tuple[str, int], Stream] = {}
        self.attempt = -1
        self.trainings = -1
        self.workers = 0
        self.failure = ""
        self.stop_reason = ""
        self.pace, self.stop, self.checkpoint = Pace(), Signal(), OneTimeSignal(0)
        self.chain = {split: ChainBooks() for split in ("train", "val")}
        self.events: list[dict[str, Any]] = []
        self.agents = Agents(lambda used: self.log("host_cpu", {"hosts": used}), serve=direct)

    def servers(self) -> tuple[bytes, dict[str, Server]]:
        """Train worker's call: the secret of this run's block connections, and who serves, by node."""
        return self.agents.servers()

    def new_attempt(self) -> int:
        """Train worker's call (rank 0), once per start: the number of this attempt, from 0 on."""
        with self.changed:
            self.trainings += 1
            return self.trainings

    def begin(
        self,
        me: Any,
        attempt: int,
        workers: int,
        first_epoch: int,
        position: dict[str, Any] | None = None,
    ) -> None:
        """Start (or after a restart, start again) producing from `first_epoch` on.

        The driver begins the first attempt itself, so that data flows while train workers still start.

        Args:
            me: this actor's handle.
            attempt: its number; one that is not newer than the present one changes nothing.
            workers: how many train workers there are.
            first_epoch: where training starts.
            position: an answer of `position`: where in the first epoch it starts.

        Raises:
            UsageError: the data, the seed or the shuffling have changed since the position was taken.
        """
        with self.changed:
            if attempt <= self.attempt:
                return
            self.attempt, self.workers, self.failure = attempt, workers, ""
            self.streams = {}
            self.pace, self.stop, self.checkpoint = Pace(), Signal(), OneTimeSignal(workers)
            if self.stop_reason:
                self.stop.request(self.pace)
            try:
                start = self._start(first_epoch, position)
            except UsageError as error:
                self.failure = str(error)
                raise
            finally:
                self.changed.notify_all()
            for epoch in range(first_epoch, self.epochs):
                for split in self.totals:
                    self.streams[split, epoch] = self._stream(split, epoch, start)
        threading.Thread(target=self._produce, args=(me, attempt), name="producer", daemon=True).start()

    def _start(self, first_epoch: int, saved: dict[str, Any] | None) -> Position:
        """Where training starts: at a saved place, or with an epoch."""
        again = self.by_row and self.plan.order == "any"
        fresh = Position(epoch=first_epoch, plan=self.plan, by_row=self.by_row, again=again)
        if saved is None:
            return fresh
        position = Position.model_validate(saved)
        position.check(self.plan)
        if position.epoch != first_epoch:
            raise ValueError(f"the position is of epoch {position.epoch}, not of {first_epoch}")
        if not position.again:
            return position
        if position.rows:
            text = (
                f"epoch {first_epoch} begins again: with data.order any, rows of a ray.data.Dataset have"
                " no fixed place; data.order exact goes on where it was"
            )
            self._event("note", text=text)
        return fresh

    def _stream(self, split: str, epoch: int, start: Position) -> Stream:
        train = split == "train"
        splitter = Splitter(self.workers, self.batch_size, equal=train, pad=self.remainder == "pad")
        if not train:
            return Stream(splitter, EpochBooks(split, epoch), self.totals[split])
        if epoch != start.epoch:
            plan = {"epoch": epoch, "plan": self.plan, "rows": 0, "done": [], "partial": {}}
            start = start.model_copy(update={**plan, "books": CarriedBooks()})
        books = EpochBooks(split, epoch, carried=start.books)
        return Stream(splitter, books, self.totals[split], Trail(start))

    def _produce(self, me: Any, attempt: int) -> None:
        """Thread: pull blocks out of Ray Data, one stream after the other."""
        try:
            for order, stream in enumerate(list(self.streams.values())):
                if not self._my_turn(attempt, order):
                    return
                for block in self._bundles(stream, me):
                    with self.changed:
                        stream.arrived(*block)
                        self.changed.notify_all()
                        while self._full(stream) and attempt == self.attempt and not self.failure:
                            self.changed.wait(1.0)
                        if attempt != self.attempt or self.failure:
                            return
                with self.changed:
                    stream.splitter.end()
                    stream.books.check_budget(self.budget, None)
                    if stream.splitter.rows == 0 and stream.books.carried.trained == 0:
                        raise DataError(f"the {stream.books.split} split gave no record")
                    self.changed.notify_all()
        except BaseException as error:
            self._fail(attempt, explain(error))

    def _my_turn(self, attempt: int, order: int) -> bool:
        """Wait until a stream is near enough to be produced; False where this attempt is over."""
        with self.changed:
            while attempt == self.attempt and not self.failure:
                settled = [stream.settled for stream in self.streams.values()]
                oldest = settled.index(False) if False in settled else len(settled)
                if order - oldest <= STREAMS_AHEAD:
                    return True
                self.changed.wait(1.0)
            return False

    def _bundles(self, stream: Stream, me: Any) -> Iterator[tuple[Any, int, int, str]]:
        start = stream.trail.start if stream.trail else None
        dataset = self.dataset_of(stream.books.split, stream.books.epoch, self.attempt, me, start)
        if dataset is None:
            return
        for bundle in dataset.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                about = entry.metadata
                if about.num_rows:
                    node = about.exec_stats.node_id if about.exec_stats else ""
                    yield entry.ref, about.num_rows, about.size_bytes or 0, node

    def _full(self, stream: Stream) -> bool:
        first = min((stream.steps.get(r, 0) for r in range(self.workers)), default=0)
        ahead = stream.splitter.rows - first * stream.splitter.step_rows
        if ahead < 2 * stream.splitter.step_rows:
            return False
        return sum(s.held_bytes() for s in self.streams.values()) > BUFFER_BYTES

    def _fail(self, attempt: int, reason: str) -> None:
        with self.changed:
            if attempt == self.attempt and not self.failure:
                self.failure = reason
            self.changed.notify_all()

    def next(self, attempt: int, split: str, epoch: int, rank: int, step: int) -> Portion | str | None:
        """Train worker's call: its rows of a step; None after the last, a text on failure.

        Waits until they are there; the caller sets the deadline.
        """
        with self.changed:
            while not self.failure and attempt == self.attempt:
                stream = self.streams[split, epoch]
                if stream.splitter.ready(step):
                    break
                self.changed.wait(1.0)
            else:
                return self.failure or "this attempt is over"
            portion = stream.portion(step, rank)
            if split == "train":
                self.pace.ask(rank, epoch, step)
                if portion is not None:
                    portion.stop = self.stop_reason if self.stop.due(epoch, step) else ""
                    portion.checkpoint = self.checkpoint.take(rank, epoch, step)
            stream.release(self.workers)
            self.changed.notify_all()
            return portion

    def position(self, attempt: int, epoch: int, steps: int, id_sum: int) -> dict[str, Any]:
        """Train worker's call: where the training pass stands, for a checkpoint.

        Args:
            attempt: the caller's attempt.
            epoch: which pass.
            steps: how many steps of this attempt's stream of that epoch all ranks have used.
            id_sum: over all ranks, the sum of the ids of the rows that they used in it, modulo 2**63.

        Returns:
            What `begin` takes, as JSON can hold it. After the last step of an epoch whose books are
            closed: the beginning of the next.

        Raises:
            ValueError: this attempt is over, or has not come so far.
        """
        with self.changed:
            if attempt != self.attempt:
                raise ValueError("this attempt is over")
            stream = self.streams["train", epoch]
            if stream.settled:
                start = self._start(epoch + 1, None)
                return start.model_dump(mode="json")
            return stream.position(steps, id_sum).model_dump(mode="json")

    def block_done(
        self, attempt: int, split: str, epoch: int, block: str, report: BlockReport, node: str
    ) -> None:
        """CPU task's call: one block is preprocessed."""
        with self.changed:
            if attempt != self.attempt:
                return
            stream = self.streams[split, epoch]
            if not stream.reported(block, report):
                return
            self.chain[split].take(report, node)
            for bad in report.bad:
                self._event("quarantined", split=split, epoch=epoch, key=bad.key, reason=bad.reason)
            if stream.total is not None:
                try:
                    stream.books.check_budget(self.budget, stream.total)
                except DataError as error:
                    self._fail(attempt, str(error))

    def epoch_done(
        self, attempt: int, split: str, epoch: int, rank: int, used: tuple[int, int, int]
    ) -> dict[str, Any] | str:
        """Train worker's call at the end of a pass: waits for all ranks, then settles the books.

        Args:
            attempt: the caller's attempt.
            split: train or val.
            epoch: which pass.
            rank: the caller's rank.
            used: rows (padded ones included), sum of their ids, rows that were padded.

        Returns:
            The counts, or a text where records were lost.
        """
        with self.changed:
            stream = self.streams[split, epoch]
            stream.finished[rank] = used
            if len(stream.finished) == self.workers and not stream.settled:
                try:
                    self._event("records", **stream.settle())
                except DataError as error:
                    self._fail(attempt, str(error))
            self.changed.notify_all()
            while not stream.settled:
                if self.failure or attempt != self.attempt:
                    return self.failure or "this attempt is over"
                self.changed.wait(1.0)
            return stream.books.counts()

    def request_stop(self, reason: str) -> None:
        """Driver's call: stop all ranks after the same step, soon."""
        with self.changed:
            self.stop_reason = self.stop_reason or reason
            self.stop.request(self.pace)
            self._event("stop", reason=reason)

    def request_checkpoint(self, attempt: int) -> None:
        """Train worker's call: let all ranks see `Portion.checkpoint` in the same step, soon."""
        with self.changed:
            if attempt == self.attempt:
                self.checkpoint.request(self.pace)

    def log(self, event: str, values: dict[str, Any]) -> None:
        """Train worker's call: one event for events.jsonl and the screen."""
        with self.changed:
            self._event(event, **values)

    def _event(self, event: str, **values: Any) -> None:
        self.events.append({"time": round(time.time(), 3), "event": event, **values})

    def drain(self) -> list[dict[str, Any]]:
        """Driver's call: the events since the last call."""
        with self.changed:
            events, self.events = self.events, []
            return events

    def figures(self) -> dict[str, Any]:
        """Driver's call: failure, chain costs and books so far."""
        with self.changed:
            return {
                "failure": self.failure,
                "chain": self.chain["train"].stages(),
                "bytes_per_sample": self.chain["train"].bytes_out / max(self.chain["train"].records, 1),
                "tasks_by_node": dict(self.chain["train"].tasks_by_node + self.chain["val"].tasks_by_node),
                "dropped_columns": sorted(self.chain["train"].dropped_columns),
                "open": [
                    s.books.counts() | {"split": s.books.split}
                    for s in self.streams.values()
                    if not s.settled and s.books.read
                ],
            }
