"""Head: where a pass over the training records stands, so that another run can go on there; pure.

A *piece* is read by one task, in *groups* of records; the rows of a piece arrive in its order, whatever
the order among pieces. So the place of a pass is, per piece, how many whole groups were consumed and how
many rows of the next one: a prefix of every piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from stoker.config import UsageError
from stoker.data.preprocessing.chain import BlockReport
from stoker.data.sources.base import ID_MODULUS
from stoker.data.sources.identity import SEPARATOR, agree


class CarriedBooks(BaseModel):
    """Head: what the books of an epoch held for the records that were consumed before."""

    model_config = ConfigDict(frozen=True)

    read: int = 0
    read_ids: int = 0
    trained: int = 0
    used_ids: int = 0
    bad: int = 0
    bad_ids: int = 0
    repeated: int = 0
    """Records trained before the epoch began again: they are trained once more."""


class Plan(BaseModel):
    """Head: what fixes the order of an epoch's records, and of which records."""

    model_config = ConfigDict(frozen=True)

    seed: int
    shuffle: bool
    order: str
    block_records: int
    fingerprint: str
    unstable: str = ""
    """Why the fingerprint does not tell whether the records are the same; empty: it does."""
    homes: int = 0
    """Into how many parts the records are divided, each of which is permuted by itself."""


class Position(BaseModel):
    """Head: a place inside an epoch, as a checkpoint keeps it."""

    model_config = ConfigDict(frozen=True)

    version: int = 1
    epoch: int
    rows: int = 0
    """Rows consumed of this epoch."""
    plan: Plan
    done: list[tuple[int, int]] = []
    """Pieces that are consumed: ranges first … last + 1 of their numbers in the epoch's order."""
    partial: dict[int, tuple[int, int]] = {}
    """Other pieces that were begun: number → (whole groups, rows of the next group)."""
    by_row: bool = False
    """A dataset without pieces: `rows` alone says where it stands."""
    again: bool = False
    """The place cannot be found again: the epoch starts from its beginning."""
    books: CarriedBooks = CarriedBooks()
    deadly: dict[str, str] = {}
    """Training records that were quarantined because they killed their process: key → reason. A run that
    goes on leaves them out as well, so that groups keep their rows."""
    unvalidated: int | None = None
    """An epoch that was trained but not validated: its validation comes first."""

    def check(self, plan: Plan) -> None:
        """Head: refuse to go on in other data or another order.

        Raises:
            UsageError: naming what has changed.
        """
        if not agree(self.plan.fingerprint, plan.fingerprint):
            before, now = (p.fingerprint.partition(SEPARATOR)[0] for p in (self.plan, plan))
            how = f"fingerprint {before}, now {now}"
            if before == now:
                how = "names, sizes and counts agree, but not what the records hold"
            raise UsageError(
                f"resume: the training data has changed since the checkpoint was written ({how}); restore it,"
                " or start a new run"
            )
        unstable = self.plan.unstable or plan.unstable
        if unstable and "exact" in (self.plan.order, plan.order):
            raise UsageError(
                f"resume: {unstable}, so the run cannot go on exactly; draw from the generators of random,"
                " numpy.random or torch, which are seeded for each record, or start a new run"
            )
        for key in ("seed", "shuffle"):
            before, now = getattr(self.plan, key), getattr(plan, key)
            if before != now:
                name = "seed" if key == "seed" else f"data.{key}"
                raise UsageError(
                    f"resume: {name} was {before} when the checkpoint was written, now it is {now}:"
                    " the order of the records would be another"
                )

    def begun(self, piece: int) -> tuple[int, int] | None:
        """(whole groups, rows of the next group) consumed of a piece; None where all of it is."""
        if any(first <= piece < stop for first, stop in self.done):
            return None
        return self.partial.get(piece, (0, 0))


class Group(NamedTuple):
    """Head: what the books need of one group of a piece's records."""

    rows: int
    records: int
    id_sum: int
    bad: int
    bad_id_sum: int
    last: bool


@dataclass
class Trail:
    """Head: what a pass produced and in which order it arrived."""

    start: Position
    groups: dict[int, list[Group]] = field(default_factory=dict)
    arrived: list[tuple[int, int]] = field(default_factory=list)
    """(piece, rows that were not skipped) of each block, as the splitter numbers them."""
    _skipped: dict[int, int] = field(default_factory=dict)

    def report(self, report: BlockReport) -> bool:
        """Note a group that a task has preprocessed; False where it was noted before."""
        if report.piece < 0:
            return True
        groups = self.groups.setdefault(report.piece, [])
        begun = self.start.begun(report.piece)
        first = begun[0] if begun else 0
        if report.nth - first < len(groups):
            return False
        groups.append(
            Group(
                report.rows,
                report.records,
                report.id_sum,
                len(report.bad),
                report.bad_id_sum,
                report.last,
            )
        )
        return True

    def arrive(self, piece: int, rows: int) -> int:
        """Note a block that has arrived.

        Args:
            piece: its piece; -1 for a dataset that has none.
            rows: how many it holds.

        Returns:
            How many rows at its beginning were consumed before this start, and are to be skipped.
        """
        if self.start.by_row:
            begun: tuple[int, int] | None = (0, self.start.rows)
        else:
            begun = self.start.begun(piece)
        skip = min(rows, (begun[1] if begun else 0) - self._skipped.get(piece, 0))
        if skip:
            self._skipped[piece] = self._skipped.get(piece, 0) + skip
        if rows > skip:
            self.arrived.append((piece, rows - skip))
        return skip

    def after(self, rows: int, id_sum: int) -> Position:
        """The place after some rows.

        Args:
            rows: consumed since this start.
            id_sum: the sum of their ids.
        """
        start, books = self.start, self.start.books
        changes: dict[str, Any] = {
            "trained": books.trained + rows,
            "used_ids": (books.used_ids + id_sum) % ID_MODULUS,
        }
        if start.by_row:
            return start.model_copy(
                update={"rows": start.rows + rows, "books": books.model_copy(update=changes)}
            )
        done = {piece for first, stop in start.done for piece in range(first, stop)}
        partial: dict[int, tuple[int, int]] = dict(start.partial)
        read, read_ids, bad, bad_ids = books.read, books.read_ids, books.bad, books.bad_ids
        for piece, consumed in self._consumed(rows).items():
            first, inside = start.begun(piece) or (0, 0)
            groups, left = self.groups.get(piece, []), inside + consumed
            whole = 0
            while whole < len(groups) and left >= groups[whole].rows:
                left -= groups[whole].rows
                whole += 1
            for group in groups[:whole]:
                read, read_ids = read + group.records, read_ids + group.id_sum
                bad, bad_ids = bad + group.bad, bad_ids + group.bad_id_sum
            partial.pop(piece, None)
            if whole and groups[whole - 1].last:
                done.add(piece)
            elif first + whole or left:
                partial[piece] = (first + whole, left)
        changes |= {
            "read": read,
            "read_ids": read_ids % ID_MODULUS,
            "bad": bad,
            "bad_ids": bad_ids % ID_MODULUS,
        }
        return start.model_copy(
            update={
                "rows": start.rows + rows,
                "done": ranges(done),
                "partial": dict(sorted(partial.items())),
                "books": books.model_copy(update=changes),
            }
        )

    def _consumed(self, rows: int) -> dict[int, int]:
        """Rows by piece. A piece whose groups so far gave no row counts too: its bad records are read."""
        consumed = dict.fromkeys(self.groups, 0)
        for piece, count in self.arrived:
            taken = min(rows, count)
            consumed[piece] = consumed.get(piece, 0) + taken
            rows -= taken
            if not rows:
                break
        return consumed


def ranges(numbers: set[int]) -> list[tuple[int, int]]:
    """Head: a set of numbers as ranges first … last + 1."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found
