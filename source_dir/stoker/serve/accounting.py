"""Head: the account of records: read = trained + quarantined + remainder, or the run fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import DataError
from stoker.protocol import BadRecord, BlockReport, CarriedAccount, DataCursor, StageCost
from stoker.read.sources import ID_MODULUS as ID_MODULUS
from stoker.serve.items import Numbers

FIRST = 20
"""If all of this many first records are bad, the chain is wrong and not the data."""
LEAST_ASSUMED = 100_000
"""Assumed number of records of a pass while the total is unknown."""


@dataclass
class EpochAccount:
    split: str
    epoch: int
    read: int = 0
    trained: int = 0
    padded: int = 0
    repeated: int = 0
    """Number of times a record was trained beyond the first in this epoch: after an epoch restarted, or as
    padding."""
    remainder: int = 0
    read_ids: int = 0
    used_ids: int = 0
    bad: int = 0
    bad_ids: int = 0
    first_bad: BadRecord | None = None
    carried: CarriedAccount = field(default_factory=CarriedAccount)
    """Counts of this epoch from the run that it was resumed from."""
    by_node: dict[str, Counter[str]] = field(default_factory=dict)
    """Records from each node and, of these, those its cache held or stores from now on."""
    whole: bool = False
    ended: Numbers = field(default_factory=Numbers)
    """Shards whose last block was counted, here or in the run that this one was resumed from."""
    due: dict[int, int] = field(default_factory=dict)
    """Index of the next block of each shard that has begun and not ended."""

    @classmethod
    def since(cls, split: str, epoch: int, start: DataCursor | None) -> EpochAccount:
        if start is None:
            return cls(split, epoch)
        due = {shard: whole for shard, (whole, _) in start.partial.items()}
        return cls(split, epoch, carried=start.books, ended=Numbers(start.done), due=due)

    def __post_init__(self) -> None:
        before = self.carried
        self.read, self.read_ids = before.read, before.read_ids
        self.bad, self.bad_ids = before.bad, before.bad_ids
        self.trained, self.repeated = before.trained, before.repeated

    def take(self, report: BlockReport, node: str) -> None:
        due = self.due.get(report.shard, 0)
        if report.shard in self.ended or report.nth != due:
            ended = report.shard in self.ended
            awaited = "none was to follow" if ended else f"block {due} was the next one"
            raise DataError(
                f"{self.split} epoch {self.epoch + 1}: block {report.nth} of shard number {report.shard}"
                f" arrived, but {awaited}",
                key="account.order",
            )
        if report.last:
            self.due.pop(report.shard, None)
            self.ended.add(report.shard)
        else:
            self.due[report.shard] = report.nth + 1
        own = self.by_node.setdefault(node, Counter())
        own["records"] += report.records - len(report.bad)
        for name in ("found", "kept", "kept_bytes"):
            own[name] += getattr(report, name)
        self.read += report.records
        self.read_ids += report.id_sum
        self.bad += len(report.bad)
        self.bad_ids += report.bad_id_sum
        if report.bad and self.first_bad is None:
            self.first_bad = report.bad[0]

    def use(self, rows: int, padded: int, id_sum: int, remaining_ids: list[int]) -> None:
        """Count what train workers used: `rows` with `padded` ones, `id_sum` without; and what remains."""
        self.padded, self.remainder = padded, len(remaining_ids)
        self.repeated = self.carried.repeated + padded
        self.trained = self.carried.trained + rows - padded
        self.used_ids = self.carried.used_ids + id_sum + sum(remaining_ids)

    def check_budget(self, budget: float, total: int | None) -> None:
        """Fail as soon as too many records are bad; a few at the start of an unknown total prove nothing."""
        if self.bad == self.read >= FIRST and budget < 1:
            raise DataError(
                f"none of the first {self.read} {self.split} records can be used"
                f"{first_bad_record(self.first_bad)}",
                key="data.bad_record_budget",
            )
        whole = max(self.read, LEAST_ASSUMED if total is None else total)
        known = f"{whole} {self.split} records"
        of = f"{self.read} {self.split} records read so far" if total is None else known
        refuse_over_budget(self.bad, whole, of, budget, self.first_bad)

    def reconcile(self, total: int | None = None) -> dict[str, Any]:
        """Close the epoch, unless records were lost, duplicated or exchanged."""
        if total is not None and self.read != total:
            raise DataError(
                f"{self.split} epoch {self.epoch + 1}: the source counted {total} records before training,"
                f" but gave {self.read}: the data has changed or is damaged",
                key="account.source",
            )
        counted = self.trained + self.bad + self.remainder
        if counted != self.read:
            raise DataError(
                f"{self.split} epoch {self.epoch + 1}: {self.read} records were read, but {self.trained}"
                f" trained + {self.bad} quarantined + {self.remainder} remaining = {counted}",
                key="account.counts",
            )
        if (self.used_ids + self.bad_ids - self.read_ids) % ID_MODULUS:
            resumed = bool(self.carried.trained)
            changed = ", or the data has changed since the checkpoint" if resumed else ""
            raise DataError(
                f"{self.split} epoch {self.epoch + 1}: the counts agree but the record ids do not: some"
                f" records came twice and others are missing{changed}",
                key="account.ids",
            )
        self.whole = True
        return self.counts(total)

    def counts(self, total: int | None = None) -> dict[str, Any]:
        """The figures of this pass for summary.json; `read` and `remainder` include what it leaves unread."""
        used = "trained" if self.split == "train" else "validated"
        planned = self.read if total is None else total
        return {
            "epoch": self.epoch,
            "read": planned,
            used: self.trained,
            "quarantined": self.bad,
            "remainder": planned - self.trained - self.bad,
            "padded": self.padded,
            "repeated": self.repeated,
            "whole": self.whole,
        }


def refuse_over_budget(
    bad: int, whole: int, of: str, budget: float, first: BadRecord | None
) -> None:
    if bad and bad > budget * whole:
        raise DataError(
            f"{bad} of {of} cannot be used, more than data.bad_record_budget allows"
            f" ({budget:.2%}; raise it to skip them){first_bad_record(first)}",
            key="data.bad_record_budget",
        )


def first_bad_record(first: BadRecord | None) -> str:
    example = f"; the first is {first.key}: {first.reason}" if first else ""
    return f"{example} (all of them: quarantine.jsonl)"


@dataclass
class ChainCosts:
    records: int = 0
    seconds: float = 0.0
    """Time of all chain workers together, reading included."""
    bytes_out: int = 0
    costs: dict[str, StageCost] = field(default_factory=dict)
    tasks_by_node: Counter[str] = field(default_factory=Counter)
    collated: int = 0
    """Records in batches of the recipe's `collate`; `records` has those that no step has used yet, too."""

    @property
    def bytes_per_sample(self) -> float:
        """Of what reaches the train workers."""
        if self.collated:
            return self.costs["collate"].bytes_out / self.collated
        return self.bytes_out / max(self.records, 1)

    def collate(self, cpu_s: float, rows: int, nbytes: int) -> None:
        cost = self.costs.setdefault("collate", StageCost())
        cost.cpu_s, cost.bytes_out = cost.cpu_s + cpu_s, cost.bytes_out + nbytes
        self.collated += rows

    def take(self, report: BlockReport, node: str) -> None:
        self.records += report.records
        self.seconds += report.seconds
        self.bytes_out += report.bytes_out
        self.tasks_by_node[node] += 1
        for name, cost in report.costs.items():
            mine = self.costs.setdefault(name, StageCost(random=cost.random))
            mine.cpu_s += cost.cpu_s
            mine.bytes_out += cost.bytes_out

    def stages(self) -> list[dict[str, Any]]:
        return [
            {
                "stage": name,
                "cpu_ms_per_sample": round(1000 * cost.cpu_s / n, 4),
                "bytes_out": round(cost.bytes_out / n),
                "random": cost.random,
            }
            for name, cost in self.costs.items()
            for n in [(name == "collate" and self.collated) or max(self.records, 1)]
        ]
