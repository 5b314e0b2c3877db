"""Head: a pass over one split of a recipe, and how its rows are given to train workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.errors import DataError
from stoker.messages import ID_COLUMN, BlockReport, BlockSlice, DataCursor, Schema, StepAssignment
from stoker.serve.accounting import EpochAccount
from stoker.serve.blocks.client import Transport
from stoker.serve.cursor import Trail
from stoker.serve.items import Held, ReadyBlock
from stoker.serve.passes import Pass
from stoker.serve.splitter import Slice, Splitter

Used = tuple[int, int, int]
"""Of one rank: rows (including padded ones), sum of their ids, number of padded rows."""


@dataclass(eq=False, kw_only=True)
class RecipePass(Pass):
    """Gives each rank its rows of each step, and accounts for all records."""

    splitter: Splitter
    account: EpochAccount
    total: int | None
    trail: Trail | None = None
    """For training passes: the order of arrivals, from which the position follows."""
    schema: Schema | None = None
    """Schema of the split, set by the run's first block; each block is compared with it."""
    blocks: dict[int, ReadyBlock] = field(default_factory=dict)
    """Blocks still needed, by number."""
    steps: dict[int, int] = field(default_factory=dict)
    """Next step of each rank."""
    finished: dict[int, Used] = field(default_factory=dict)
    reconciled: bool = False
    slowest: int = 0
    """The step that the slowest rank requests next."""
    fetched: dict[int, int] = field(default_factory=dict)
    """By rank: it has fetched all steps before this one."""

    def __post_init__(self) -> None:
        self._held = Held()
        self.step_rows = self.splitter.step_rows

    @property
    def held(self) -> Held:
        return self._held

    @property
    def needed(self) -> list[ReadyBlock]:
        return list(self.blocks.values())

    @property
    def ended(self) -> bool:
        return self.splitter.ended

    @property
    def rows_ahead(self) -> int:
        return self.splitter.rows - self.slowest * self.step_rows

    def clear(self) -> None:
        """As the base's."""
        super().clear()
        self.blocks.clear()

    def reported(self, report: BlockReport, node: str) -> bool:
        """A chain worker on a node has made a block; False if it was already counted."""
        if not self.account.take(report, node):
            return False
        if self.trail is not None:
            self.trail.report(report)
        return True

    def arrived(self, block: ReadyBlock) -> None:
        """A block has arrived; its report came earlier."""
        rows = block.report.rows
        skip = self.trail.arrive(block.report.shard, rows) if self.trail is not None else 0
        if skip < rows:
            self.blocks[self.splitter.add(rows, skip)] = block
            self.held.add(block)

    def portion(self, step: int, rank: int) -> StepAssignment | None:
        """A worker's rows of a step, which must be ready; None after its last."""
        share = self.splitter.share(step, rank)
        self.steps[rank] = step + 1
        if len(self.steps) == self.splitter.workers:
            self.slowest = min(self.steps.values())
        if share is None:
            return None
        return StepAssignment([self._rows(part) for part in share.slices], share.padded, schema=self.schema)

    def _rows(self, part: Slice) -> BlockSlice:
        return self.blocks[part.block].part(part.start, part.stop)

    def release(self) -> None:
        """Drop the blocks that every worker has fetched."""
        if len(self.fetched) < self.splitter.workers:
            return
        step = min(self.fetched.values())
        # Blocks are needed in the order of their numbers, so stop at the first that is needed.
        while self.blocks:
            number = next(iter(self.blocks))
            if not self.splitter.block_done(number, step) or self.splitter.may_remain(number):
                break
            self.held.add(self.blocks.pop(number), -1)

    def position(self, steps: int, id_sum: int) -> DataCursor:
        """Position of a training pass after some steps of this attempt.

        Raises:
            ValueError: it has not given out that many steps.
        """
        if self.trail is None or not self.splitter.ready(steps - 1):
            raise ValueError(f"{self.account.split} epoch {self.account.epoch}: step {steps} is not reached")
        rows = steps * self.splitter.step_rows
        if self.splitter.ended:
            rows = min(rows, self.splitter.remainder.start)
        position = self.trail.after(rows, id_sum)
        self.account.trained = position.books.trained
        return position

    def unused(self) -> list[BlockSlice]:
        """The rows that no worker takes."""
        return [self._rows(part) for part in self.splitter.slices_of(self.splitter.remainder)]

    def reconcile(self, remaining: list[int]) -> dict[str, Any]:
        """Close the account.

        Args:
            remaining: ids of the `unused` rows.

        Returns:
            The counts and the ids of the rows that no worker took.

        Raises:
            DataError: records were lost, duplicated or exchanged.
        """
        used = list(self.finished.values())
        rows, padded = sum(u[0] for u in used), sum(u[2] for u in used)
        self.account.use(rows, padded, sum(u[1] for u in used), remaining)
        counts = self.account.reconcile(self.total)
        self.reconciled = True
        self.blocks.clear()
        self._held = Held()
        return {"split": self.account.split, "remainder_ids": remaining, **counts}

    def cut(self, steps: int) -> dict[str, Any]:
        """Book a training pass that a limit ends after these steps of this attempt; its place stays.

        Raises:
            DataError: the train workers used other rows than they were given.
        """
        used = sum(rows - padded for rows, _, padded in self.finished.values())
        given = self.position(steps, 0).books.trained - self.account.carried.trained
        if used != given:
            raise DataError(
                f"train epoch {self.account.epoch + 1}: {given} records were given out, but {used} trained"
            )
        self.reconciled = True
        return {"split": "train", **self.account.counts(self.total)}


def ids_of(rows: list[BlockSlice], transport: Transport) -> list[int]:
    """The record ids of some rows; fetches them, so no lock may be held.

    Raises:
        DataError: a block is not available.
    """
    found: list[int] = []
    for part in rows:
        columns, start, stop, _ = transport.rows(part)
        found += columns[ID_COLUMN][start:stop].tolist()
    return found
