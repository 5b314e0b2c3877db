"""Head: position of a training pass, so that another run can continue from there; pure.

A *shard* is read by one task, in *blocks* of records; the rows of a shard arrive in its order, whatever the
order among shards. So the position of a pass is a prefix of every shard: how many whole blocks were consumed
and how many rows of the next one.
"""

from __future__ import annotations

from collections import Counter, deque
from copy import copy
from typing import Any, NamedTuple

from stoker.config.redaction import redact
from stoker.config.schema import Config
from stoker.errors import DataError, UsageError
from stoker.protocol import BlockReport, CarriedAccount, DataCursor, Plan
from stoker.read.identity import SEPARATOR, agree
from stoker.read.sources import ID_MODULUS, digest
from stoker.recipe import SOURCE_FOLDER, code_digest
from stoker.serve.items import Numbers


def refuse_other_data(position: DataCursor, plan: Plan) -> None:
    _refuse_changed("training", position.plan.fingerprint, plan.fingerprint)
    if position.plan.validation is not None and plan.validation is not None:
        _refuse_changed("validation", position.plan.validation, plan.validation)
    share, wanted = position.plan.cache_share, plan.cache_share
    if None not in (share, wanted) and share != wanted:
        raise UsageError(
            f"resume: data.cache_share was {share} when the checkpoint was written, now it is {wanted}: the"
            " pixels of large photos would change; leave it out to continue with the former share"
        )
    for key in ("seed", "shuffle", "bucket_by"):
        before, now = getattr(position.plan, key), getattr(plan, key)
        if before != now:
            name = "seed" if key == "seed" else f"data.{key}"
            raise UsageError(
                f"resume: {name} was {before} when the checkpoint was written, now it is {now}:"
                " the order of the records would change"
            )


def _refuse_changed(kind: str, saved: str, found: str) -> None:
    if agree(saved, found):
        return
    before, now = (text.partition(SEPARATOR)[0] or "none" for text in (saved, found))
    how = f"fingerprint {before}, now {now}"
    if before == now:
        how = "names, sizes and counts agree, but not what the records hold"
    raise UsageError(
        f"resume: the {kind} data has changed since the checkpoint was written ({how}); restore it,"
        " or start a new run"
    )


def fresh(epoch: int, plan: Plan, by_row: bool) -> DataCursor:
    return DataCursor(epoch=epoch, plan=plan, by_row=by_row, again=by_row and plan.order == "any")


def start_at(position: DataCursor | None, start: DataCursor) -> tuple[DataCursor, str]:
    """Where training starts if an attempt ended at `position`, and a note for people, or ""."""
    if position is None:
        return start, ""
    refuse_other_data(position, start.plan)
    if position.epoch != start.epoch:
        raise ValueError(f"the position is of epoch {position.epoch}, not of {start.epoch}")
    absent = [key for key in ("validation", "cache_share") if getattr(position.plan, key) is None]
    plan = position.plan.model_copy(update={key: getattr(start.plan, key) for key in absent})
    position = position.model_copy(update={"plan": plan})
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
    """What rebuilding a step of an attempt needs, and what must still be the same then."""
    return {
        "workers": workers,
        "accumulate_steps": config.train.accumulate_steps,
        "block_records": config.data.block_records,
        "params": {name: digest(redact(value, name)) for name, value in config.params.items()},
        "code": code_digest(SOURCE_FOLDER),
        "start": start.model_dump(mode="json"),
    }


def ids_of_rows(report: BlockReport) -> int:
    """In six digits, what tells a block from one with other records."""
    return (report.id_sum - report.bad_id_sum) % 10**6


class Block(NamedTuple):
    rows: int
    sums: tuple[int, int, int, int]
    """Records and the sum of their ids, and the same of the bad ones."""
    last: bool
    bad: dict[str, str]
    digest: int


class Trail:
    """What a pass produced since `start`, as it arrived, but for what training will not return to."""

    def __init__(self, start: DataCursor) -> None:
        self.start = start
        self.rows = 0
        """Rows of this start that were left behind: no position before them is asked for."""
        self._sums = [start.books.read, start.books.read_ids, start.books.bad, start.books.bad_ids]
        self._done, self._partial = Numbers(start.done), dict(start.partial)
        self._blocks: dict[int, deque[Block]] = {}
        """By shard, the blocks that have rows beyond those."""
        self._arrived: deque[tuple[int, int]] = deque()
        """(shard, rows that were not skipped) of each block with rows beyond those."""
        self._skipped: Counter[int] = Counter()

    def report(self, report: BlockReport) -> bool:
        """Add a block; False if its rows were consumed in part and its values are others now."""
        if self.start.by_row:
            return True
        self._refuse_moved(report)
        sums = report.records, report.id_sum, len(report.bad), report.bad_id_sum
        bad = {bad.called: bad.reason for bad in report.bad}
        made = Block(report.rows, sums, report.last, bad, report.digest)
        self._blocks.setdefault(report.shard, deque()).append(made)
        self._use(report.shard, 0)
        known = self.start.digests.get(report.shard, report.digest)
        return known == report.digest or report.nth != self.start.partial[report.shard][0]

    def _refuse_moved(self, report: BlockReport) -> None:
        """Refuse that rows which were consumed of the next block of a shard are others now."""
        whole, rows = self.start.partial.get(report.shard, (0, 0))
        if not rows or report.nth != whole:
            return
        known, before = self.start.quarantined.get(report.shard, {}), 0
        for bad in sorted(report.bad, key=lambda bad: bad.place):
            if bad.called in known:
                before += 1
            elif bad.place - before < rows:  # it was a row then, one of those consumed
                raise DataError(
                    f"record {bad.key}, of whose block rows were trained before, {bad.reason}: others"
                    " would be trained twice or never; restore it, or resume from an earlier checkpoint",
                    key="block.remade",
                )

    def arrive(self, shard: int, rows: int) -> int:
        """Record the arrival of a block; returns how many leading rows were consumed before this start."""
        by_row = self.start.by_row
        before = self.start.rows if by_row else (self.start.begun(shard) or (0, 0))[1]
        shard = -1 if by_row else shard
        skip = min(rows, before - self._skipped[shard]) if before else 0
        if skip:
            self._skipped[shard] += skip
        if rows > skip and not by_row:
            self._arrived.append((shard, rows - skip))
        return skip

    def leave(self, rows: int) -> None:
        """Forget what only positions before these rows of this start need."""
        left, self.rows = rows - self.rows, max(self.rows, rows)
        while left > 0 and self._arrived:
            shard, count = self._arrived.popleft()
            if count > left:
                self._arrived.appendleft((shard, count - left))
            self._use(shard, min(left, count))
            left -= count

    def _use(self, shard: int, rows: int) -> None:
        """Rows of a shard were consumed, and with them its blocks without rows that follow."""
        whole, left = self._partial.pop(shard, (0, 0))
        left += rows
        blocks, last = self._blocks.get(shard, deque()), False
        while blocks and left >= blocks[0].rows:
            block = blocks.popleft()
            whole, left, last = whole + 1, left - block.rows, block.last
            self._sums = [
                before + more for before, more in zip(self._sums, block.sums, strict=True)
            ]
        if not blocks:
            self._blocks.pop(shard, None)
        if last:
            self._done.add(shard)
        elif whole or left:
            self._partial[shard] = (whole, left)

    def after(self, rows: int, id_sum: int) -> DataCursor:
        if rows < self.rows:
            raise ValueError(
                f"the position after {rows} rows is no longer known, only from {self.rows} on"
            )
        there = self._copy()
        there.leave(rows)
        start, (read, read_ids, bad, bad_ids) = self.start, there._sums
        books = {
            "trained": start.books.trained + rows,
            "used_ids": (start.books.used_ids + id_sum) % ID_MODULUS,
            "read": read,
            "read_ids": read_ids % ID_MODULUS,
            "bad": bad,
            "bad_ids": bad_ids % ID_MODULUS,
        }
        quarantined, digests = dict[int, dict[str, str]](), dict[int, int]()
        for shard, (_, rows_of_next) in there._partial.items():
            # None, if the next one was not made again since `start`.
            blocks = there._blocks.get(shard)
            if rows_of_next:
                quarantined[shard] = blocks[0].bad if blocks else start.quarantined.get(shard, {})
                digest = blocks[0].digest if blocks else start.digests.get(shard, 0)
                digests |= {shard: digest} if digest else {}
        return start.model_copy(
            update={
                "rows": start.rows + rows,
                "quarantined": quarantined,
                "digests": digests,
                "done": there._done.ranges,
                "partial": dict(sorted(there._partial.items())),
                "books": start.books.model_copy(update=books),
            }
        )

    def _copy(self) -> Trail:
        there = copy(self)
        there._done, there._partial = Numbers(self._done.ranges), dict(self._partial)
        there._blocks = {shard: deque(blocks) for shard, blocks in self._blocks.items()}
        there._arrived = deque(self._arrived)
        return there
