"""Head: position of a training pass, so that another run can continue from there; pure.

A *shard* is read by one task, in *blocks* of records; the rows of a shard arrive in its order, whatever the
order among shards. So the position of a pass is a prefix of every shard: how many whole blocks were consumed
and how many rows of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.config.redaction import redact
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.protocol import BlockReport, CarriedAccount, DataCursor, Plan
from stoker.read.identity import SEPARATOR, agree
from stoker.read.sources import ID_MODULUS, digest
from stoker.recipe import SOURCE_FOLDER, code_digest


def refuse_other_data(position: DataCursor, plan: Plan) -> None:
    """Refuse to resume with other data or another order.

    Args:
        position: from a checkpoint.
        plan: of this run.

    Raises:
        UsageError: states what has changed.
    """
    if not agree(position.plan.fingerprint, plan.fingerprint):
        before, now = (p.fingerprint.partition(SEPARATOR)[0] for p in (position.plan, plan))
        how = f"fingerprint {before}, now {now}"
        if before == now:
            how = "names, sizes and counts agree, but not what the records hold"
        raise UsageError(
            f"resume: the training data has changed since the checkpoint was written ({how}); restore it,"
            " or start a new run"
        )
    unstable = position.plan.unstable or plan.unstable
    if unstable and "exact" in (position.plan.order, plan.order):
        raise UsageError(
            f"resume: {unstable}, so the run cannot resume exactly; draw from the generators of random,"
            " numpy.random or torch, which are seeded for each record, or start a new run"
        )
    for key in ("seed", "shuffle", "bucket_by"):
        before, now = getattr(position.plan, key), getattr(plan, key)
        if before != now:
            name = "seed" if key == "seed" else f"data.{key}"
            raise UsageError(
                f"resume: {name} was {before} when the checkpoint was written, now it is {now}:"
                " the order of the records would change"
            )


def fresh(epoch: int, plan: Plan, by_row: bool) -> DataCursor:
    """The start of an epoch."""
    return DataCursor(epoch=epoch, plan=plan, by_row=by_row, again=by_row and plan.order == "any")


def start_at(position: DataCursor | None, start: DataCursor) -> tuple[DataCursor, str]:
    """Where training starts, and a note for people, or "".

    Args:
        position: where an attempt ended; None: nowhere.
        start: the start of the epoch.

    Raises:
        UsageError: the data or its order have changed.
    """
    if position is None:
        return start, ""
    refuse_other_data(position, start.plan)
    if position.epoch != start.epoch:
        raise ValueError(f"the position is of epoch {position.epoch}, not of {start.epoch}")
    if not position.by_row or (not position.again and start.plan.order == "exact"):
        return position, ""
    # In another order, the first rows would not be those that were trained.
    repeated, note = position.books.repeated + position.rows, ""
    if position.rows:
        note = (
            f"epoch {start.epoch + 1} begins again: with data.order any, rows of a ray.data.Dataset have"
            f" no fixed place, so {position.rows} records are trained once more ({repeated} repeated in"
            " all in this epoch); data.order exact resumes in place"
        )
    changes = {"books": CarriedAccount(repeated=repeated), "unvalidated": position.unvalidated}
    return start.model_copy(update=changes), note


def about(start: DataCursor, workers: int, config: Config) -> dict[str, Any]:
    """Everything that decides which records each step of an attempt takes, for rebuilding a step."""
    train = config.train
    return {
        "workers": workers,
        "batch_size": train.batch_size,
        "accumulate_steps": train.accumulate_steps,
        "remainder": config.data.remainder,
        "block_records": config.data.block_records,
        "params": {name: digest(redact(value, name)) for name, value in config.params.items()},
        "code": code_digest(SOURCE_FOLDER),
        "start": start.model_dump(mode="json"),
    }


def arrival(report: BlockReport) -> list[int]:
    """What identifies a block and its rows, for rebuilding a step.

    Returns:
        Shard, index in it, number of rows, and the sum of their ids modulo 2**32.
    """
    return [report.shard, report.nth, report.rows, (report.id_sum - report.bad_id_sum) % 2**32]


class Block(NamedTuple):
    """What the cursor needs to know about one block of a shard's records."""

    rows: int
    records: int
    id_sum: int
    bad: int
    bad_id_sum: int
    last: bool


@dataclass
class Trail:
    """What a pass produced and in which order it arrived."""

    start: DataCursor
    blocks: dict[int, list[Block]] = field(default_factory=dict)
    arrived: list[tuple[int, int]] = field(default_factory=list)
    """(shard, rows that were not skipped) of each block, numbered as in the splitter."""
    _skipped: dict[int, int] = field(default_factory=dict)

    def report(self, report: BlockReport) -> None:
        """Record the next block of its shard."""
        if not self.start.by_row:
            bad = len(report.bad)
            made = Block(report.rows, report.records, report.id_sum, bad, report.bad_id_sum, report.last)
            self.blocks.setdefault(report.shard, []).append(made)

    def arrive(self, shard: int, rows: int) -> int:
        """Record the arrival of a block.

        Returns:
            Number of leading rows to skip because they were consumed before this start.
        """
        if self.start.by_row:
            shard = -1
            begun: tuple[int, int] | None = (0, self.start.rows)
        else:
            begun = self.start.begun(shard)
        skip = min(rows, (begun[1] if begun else 0) - self._skipped.get(shard, 0))
        if skip:
            self._skipped[shard] = self._skipped.get(shard, 0) + skip
        if rows > skip:
            self.arrived.append((shard, rows - skip))
        return skip

    def after(self, rows: int, id_sum: int) -> DataCursor:
        """The position after some rows."""
        start, books = self.start, self.start.books
        changes: dict[str, Any] = {
            "trained": books.trained + rows,
            "used_ids": (books.used_ids + id_sum) % ID_MODULUS,
        }
        if start.by_row:
            return start.model_copy(
                update={"rows": start.rows + rows, "books": books.model_copy(update=changes)}
            )
        done = {shard for first, stop in start.done for shard in range(first, stop)}
        partial: dict[int, tuple[int, int]] = dict(start.partial)
        read, read_ids, bad, bad_ids = books.read, books.read_ids, books.bad, books.bad_ids
        for shard, consumed in self._consumed(rows).items():
            first, inside = start.begun(shard) or (0, 0)
            blocks, left = self.blocks.get(shard, []), inside + consumed
            whole = 0
            while whole < len(blocks) and left >= blocks[whole].rows:
                left -= blocks[whole].rows
                whole += 1
            for block in blocks[:whole]:
                read, read_ids = read + block.records, read_ids + block.id_sum
                bad, bad_ids = bad + block.bad, bad_ids + block.bad_id_sum
            partial.pop(shard, None)
            if whole and blocks[whole - 1].last:
                done.add(shard)
            elif first + whole or left:
                partial[shard] = (first + whole, left)
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
        """Rows by shard. Includes shards whose blocks gave no row so far: their bad records are read."""
        consumed = dict.fromkeys(self.blocks, 0)
        for shard, count in self.arrived:
            taken = min(rows, count)
            consumed[shard] = consumed.get(shard, 0) + taken
            rows -= taken
            if not rows:
                break
        return consumed


def ranges(numbers: set[int]) -> list[tuple[int, int]]:
    """A set of numbers as ranges first … last + 1."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found
