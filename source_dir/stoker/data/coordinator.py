"""Head: the actor between Ray Data and the train workers.

It runs one Ray Data execution after the other (train 0, val 0, train 1, …), hands each train worker
its rows as references to blocks, keeps the books of records, and collects the run's events. Data of
the next epoch flows as soon as the one before has been produced, so no epoch starts cold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from stoker.config import UsageError
from stoker.data.chain import ID_COLUMN, BlockReport, ChainError
from stoker.data.ledger import ChainBooks, DataError, EpochBooks
from stoker.data.splitter import Splitter

BUFFER_BYTES = 512 * 2**20
"""Preprocessed data kept ready beyond the next two steps, over all train workers."""


STREAMS_AHEAD = 2
"""How many passes may be produced beyond the one that is consumed: small data would else run ahead for
all epochs and take the CPUs from training."""


@dataclass(frozen=True)
class Portion:
    """Coordinator → train worker: rows of one step."""

    blocks: list[tuple[Any, int, int]]
    """(object reference of a block, first row, row after the last)."""
    padded: int = 0
    stop: str = ""
    """Why the run shall stop after this step; empty: it goes on."""


@dataclass
class Stream:
    """Head: one pass over one split while it is produced and consumed."""

    splitter: Splitter
    books: EpochBooks
    total: int | None
    blocks: dict[int, tuple[Any, int]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    """Next step of each rank."""
    finished: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    settled: bool = False


class Coordinator:
    """Head: see the module. One per run, zero CPUs, called from many threads."""

    def __init__(
        self,
        dataset_of: Callable[[str, int, int, Any], Any],
        totals: dict[str, int | None],
        *,
        batch_size: int,
        remainder: str,
        budget: float,
        epochs: int,
    ) -> None:
        self.dataset_of = dataset_of
        self.totals, self.batch_size, self.remainder = totals, batch_size, remainder
        self.budget, self.epochs = budget, epochs
        self.changed = threading.Condition()
        self.streams: dict[tuple[str, int], Stream] = {}
        self.attempt = -1
        self.trainings = -1
        self.workers = 0
        self.failure = ""
        self.stop_reason, self.stop_step = "", -1
        self.chain = {split: ChainBooks() for split in ("train", "val")}
        self.events: list[dict[str, Any]] = []

    def new_attempt(self) -> int:
        """Train worker's call (rank 0), once per start: the number of this attempt, from 0 on."""
        with self.changed:
            self.trainings += 1
            return self.trainings

    def begin(self, me: Any, attempt: int, workers: int, first_epoch: int) -> None:
        """Start (or after a restart, start again) producing from `first_epoch` on.

        The driver begins the first attempt itself, so that data flows while train workers still start.
        """
        with self.changed:
            if attempt <= self.attempt:
                return
            self.attempt, self.workers, self.failure = attempt, workers, ""
            self.streams = {}
            for epoch in range(first_epoch, self.epochs):
                for split in self.totals:
                    self.streams[split, epoch] = self._stream(split, epoch)
            self.changed.notify_all()
        threading.Thread(target=self._produce, args=(me, attempt), name="producer", daemon=True).start()

    def _stream(self, split: str, epoch: int) -> Stream:
        train = split == "train"
        pad = self.remainder == "pad"
        splitter = Splitter(self.workers, self.batch_size, equal=train, pad=pad)
        return Stream(splitter, EpochBooks(split, epoch), self.totals[split])

    def _produce(self, me: Any, attempt: int) -> None:
        """Thread: pull blocks out of Ray Data, one stream after the other."""
        try:
            for position, ((split, epoch), stream) in enumerate(list(self.streams.items())):
                if not self._my_turn(attempt, position):
                    return
                for reference, rows, size in self._bundles(split, epoch, me):
                    with self.changed:
                        number = stream.splitter.add(rows)
                        stream.blocks[number] = (reference, size)
                        self.changed.notify_all()
                        while self._full(stream) and attempt == self.attempt and not self.failure:
                            self.changed.wait(1.0)
                        if attempt != self.attempt or self.failure:
                            return
                with self.changed:
                    stream.splitter.end()
                    stream.books.check_budget(self.budget, None)
                    if stream.splitter.rows == 0:
                        raise DataError(f"the {split} split gave no record")
                    self.changed.notify_all()
        except BaseException as error:
            self._fail(attempt, explain(error))

    def _my_turn(self, attempt: int, position: int) -> bool:
        """Wait until a stream is near enough to be produced; False where this attempt is over."""
        with self.changed:
            while attempt == self.attempt and not self.failure:
                settled = [stream.settled for stream in self.streams.values()]
                oldest = settled.index(False) if False in settled else len(settled)
                if position - oldest <= STREAMS_AHEAD:
                    return True
                self.changed.wait(1.0)
            return False

    def _bundles(self, split: str, epoch: int, me: Any) -> Iterator[tuple[Any, int, int]]:
        dataset = self.dataset_of(split, epoch, self.attempt, me)
        for bundle in dataset.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                if entry.metadata.num_rows:
                    yield entry.ref, entry.metadata.num_rows, entry.metadata.size_bytes or 0

    def _full(self, stream: Stream) -> bool:
        first = min((stream.steps.get(r, 0) for r in range(self.workers)), default=0)
        ahead = stream.splitter.rows - first * stream.splitter.step_rows
        if ahead < 2 * stream.splitter.step_rows:
            return False
        held = sum(size for s in self.streams.values() for _, size in s.blocks.values())
        return held > BUFFER_BYTES

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
            stream = self.streams[split, epoch]
            while not stream.splitter.ready(step):
                if self.failure or attempt != self.attempt:
                    return self.failure or "this attempt is over"
                self.changed.wait(1.0)
            if self.failure:
                return self.failure
            share = stream.splitter.share(step, rank)
            stop = self._stop_at(split, step)
            stream.steps[rank] = step + 1
            portion = None
            if share is not None:
                blocks = [(stream.blocks[s.block][0], s.start, s.stop) for s in share.slices]
                portion = Portion(blocks, share.padded, stop)
            self._release(stream)
            self.changed.notify_all()
            return portion

    def _stop_at(self, split: str, step: int) -> str:
        """All ranks must stop after the same step: the first that no rank had asked for yet."""
        if not self.stop_reason or split != "train":
            return ""
        if self.stop_step < 0:
            asked = [
                s
                for st in self.streams.values()
                if st.books.split == "train" and not st.settled
                for s in st.steps.values()
            ]
            self.stop_step = max([step, *asked])
        return self.stop_reason if step >= self.stop_step else ""

    def _release(self, stream: Stream) -> None:
        if len(stream.steps) < self.workers:
            return
        # The step before may still be under way to a worker: keep its blocks one step longer.
        step = min(stream.steps.values()) - 1
        for number in [n for n in stream.blocks if stream.splitter.block_done(n, step)]:
            if not stream.splitter.may_remain(number):
                del stream.blocks[number]

    def block_done(
        self, attempt: int, split: str, epoch: int, block: str, report: BlockReport, node: str
    ) -> None:
        """CPU task's call: one block is preprocessed."""
        with self.changed:
            if attempt != self.attempt:
                return
            stream = self.streams[split, epoch]
            if not stream.books.take(block, report):
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
                    self._settle(stream)
                except DataError as error:
                    self._fail(attempt, str(error))
            self.changed.notify_all()
            while not stream.settled:
                if self.failure or attempt != self.attempt:
                    return self.failure or "this attempt is over"
                self.changed.wait(1.0)
            return stream.books.counts()

    def _settle(self, stream: Stream) -> None:
        books = stream.books
        rows = sum(used[0] for used in stream.finished.values())
        books.padded = sum(used[2] for used in stream.finished.values())
        books.trained = rows - books.padded
        remaining = self._ids(stream)
        books.remainder = len(remaining)
        books.used_ids = sum(used[1] for used in stream.finished.values()) + sum(remaining)
        counts = books.settle()
        stream.settled = True
        stream.blocks.clear()
        self._event("records", split=books.split, remainder_ids=remaining, **counts)

    def _ids(self, stream: Stream) -> list[int]:
        """Ids of the rows that no worker takes: fewer than there are workers."""
        import ray

        ids: list[int] = []
        for piece in stream.splitter.slices_of(stream.splitter.remainder):
            table = ray.get(stream.blocks[piece.block][0], timeout=60)
            ids += table[ID_COLUMN].to_pylist()[piece.start : piece.stop]
        return ids

    def request_stop(self, reason: str) -> None:
        """Driver's call: stop all ranks after the same step, soon."""
        with self.changed:
            self.stop_reason = self.stop_reason or reason
            self._event("stop", reason=reason)

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


def explain(error: BaseException) -> str:
    """Head: the one line behind an error that Ray wrapped: its deepest cause."""
    cause: BaseException = error
    seen = {id(cause)}
    while True:
        below = getattr(cause, "cause", None) or cause.__cause__
        if not isinstance(below, BaseException) or id(below) in seen:
            break
        seen.add(id(below))
        cause = below
        if isinstance(cause, ChainError | DataError | UsageError):
            break
    if isinstance(cause, ChainError | DataError | UsageError):
        return str(cause).splitlines()[0]
    from stoker.recipe import where_raised

    return where_raised(cause)
