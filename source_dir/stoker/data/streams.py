"""Head: one pass over one split while it is produced and consumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.data.chain import ID_COLUMN, BlockReport
from stoker.data.ledger import EpochBooks
from stoker.data.position import Position, Trail
from stoker.data.rows import Rows
from stoker.data.serving import columns_of
from stoker.data.splitter import Slice, Splitter

SERVED_FROM_BYTES = 100 * 1024
"""Ray keeps smaller objects with their owner, not in the shared memory of the host that made them."""


@dataclass
class Portion:
    """Coordinator → train worker: rows of one step."""

    blocks: list[Rows]
    padded: int = 0
    stop: str = ""
    """Why the run shall stop after this step; empty: it goes on."""
    checkpoint: bool = False
    """Whether a checkpoint shall be written after this step."""


@dataclass
class Stream:
    """Head: a pass; the coordinator holds its lock around every call."""

    splitter: Splitter
    books: EpochBooks
    total: int | None
    trail: Trail | None = None
    """Training passes remember what came in which order, to say where they stand."""
    blocks: dict[int, tuple[Any, int, str]] = field(default_factory=dict)
    """Blocks that are still needed: number → (object reference, bytes, node that holds it)."""
    steps: dict[int, int] = field(default_factory=dict)
    """Next step of each rank."""
    finished: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    settled: bool = False
    held_bytes: int = 0
    """Bytes of the blocks that are still needed."""
    slowest: int = 0
    """The step that the slowest rank asks for next."""

    def reported(self, name: str, report: BlockReport) -> bool:
        """A task has preprocessed a group of records; False where that was booked before."""
        if not self.books.take(name, report):
            return False
        if self.trail is not None:
            self.trail.report(report)
        return True

    def arrived(self, reference: Any, rows: int, size: int, node: str = "", piece: int = -1) -> None:
        """A block is there, and its report was taken before."""
        skip = self.trail.arrive(piece, rows) if self.trail is not None else 0
        if skip < rows:
            self.blocks[self.splitter.add(rows, skip)] = (reference, size, node)
            self.held_bytes += size

    @property
    def rows_ahead(self) -> int:
        """Rows beyond what every rank has asked for."""
        return self.splitter.rows - self.slowest * self.splitter.step_rows

    def portion(self, step: int, rank: int) -> Portion | None:
        """A worker's rows of a step, which must be ready; None after its last."""
        share = self.splitter.share(step, rank)
        self.steps[rank] = step + 1
        if len(self.steps) == self.splitter.workers:
            self.slowest = min(self.steps.values())
        if share is None:
            return None
        return Portion([self._rows(part) for part in share.slices], share.padded)

    def _rows(self, part: Slice) -> Rows:
        reference, size, node = self.blocks[part.block]
        # What is small travels inside Ray's own messages.
        return Rows(reference, part.start, part.stop, node if size >= SERVED_FROM_BYTES else "")

    def release(self) -> None:
        """Drop the blocks that every worker has taken."""
        # The step before may still be under way to a worker: keep its blocks one step longer.
        step = self.slowest - 1
        for number in [n for n in self.blocks if self.splitter.block_done(n, step)]:
            if not self.splitter.may_remain(number):
                self.held_bytes -= self.blocks.pop(number)[1]

    def position(self, steps: int, id_sum: int) -> Position:
        """Where a training pass stands after some steps of this attempt.

        Raises:
            ValueError: so much has not been given out.
        """
        if self.trail is None or not self.splitter.ready(steps - 1):
            raise ValueError(f"{self.books.split} epoch {self.books.epoch}: step {steps} is not reached")
        rows = steps * self.splitter.step_rows
        if self.splitter.ended:
            rows = min(rows, self.splitter.remainder.start)
        position = self.trail.after(rows, id_sum)
        self.books.trained = position.books.trained
        return position

    def settle(self) -> dict[str, Any]:
        """Close the books.

        Returns:
            The counts and the ids of the rows that no worker took.

        Raises:
            DataError: records were lost, doubled or exchanged.
        """
        used = list(self.finished.values())
        remaining = self._ids(self.splitter.remainder)
        rows, padded = sum(u[0] for u in used), sum(u[2] for u in used)
        self.books.use(rows, padded, sum(u[1] for u in used), remaining)
        counts = self.books.settle(self.total)
        self.settled = True
        self.blocks.clear()
        self.held_bytes = 0
        return {"split": self.books.split, "remainder_ids": remaining, **counts}

    def _ids(self, rows: range) -> list[int]:
        """Ids of the rows that no worker takes: fewer than there are workers."""
        import ray

        ids: list[int] = []
        for piece in self.splitter.slices_of(rows):
            columns = columns_of(ray.get(self.blocks[piece.block][0], timeout=60))
            ids += columns[ID_COLUMN][piece.start : piece.stop].tolist()
        return ids
