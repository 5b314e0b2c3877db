"""Head: the books of records: read = trained + quarantined + remainder, or the run fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from stoker.data.chain import BlockReport, StageCost
from stoker.data.sources import BadRecord

ID_MODULUS = 2**63


class DataError(RuntimeError):
    """Head and train worker: the data of this run cannot be trusted or no longer comes."""


@dataclass
class EpochBooks:
    """Head: one pass over one split in one attempt."""

    split: str
    epoch: int
    read: int = 0
    trained: int = 0
    padded: int = 0
    remainder: int = 0
    read_ids: int = 0
    used_ids: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    bad_ids: int = 0
    blocks: set[str] = field(default_factory=set)

    def take(self, block: str, report: BlockReport) -> bool:
        """Book one preprocessed block; False where it was booked before."""
        if block in self.blocks:
            return False
        self.blocks.add(block)
        self.read += report.records
        self.read_ids += report.id_sum
        self.bad += report.bad
        self.bad_ids += report.bad_id_sum
        return True

    def check_budget(self, budget: float, total: int | None) -> None:
        """Fail as soon as it is certain that too many records are bad.

        Raises:
            DataError: naming how many, and the first with its reason.
        """
        whole = max(self.read, total or 0)
        if self.bad and len(self.bad) > budget * whole:
            first = self.bad[0]
            raise DataError(
                f"{len(self.bad)} of {whole} {self.split} records cannot be used, more than"
                f" data.bad_record_budget allows ({budget:.2%}); the first is {first.key}: {first.reason}"
                " (all of them: quarantine.jsonl)"
            )

    def settle(self) -> dict[str, int]:
        """Close the epoch.

        Raises:
            DataError: records were lost, came twice, or were exchanged.
        """
        booked = self.trained + len(self.bad) + self.remainder
        if booked != self.read:
            raise DataError(
                f"{self.split} epoch {self.epoch}: {self.read} records were read, but {self.trained}"
                f" trained + {len(self.bad)} quarantined + {self.remainder} remaining = {booked}"
            )
        if (self.used_ids + self.bad_ids - self.read_ids) % ID_MODULUS:
            raise DataError(
                f"{self.split} epoch {self.epoch}: the counts agree but the record ids do not: some"
                " came twice and others never"
            )
        return self.counts()

    def counts(self) -> dict[str, int]:
        """The figures of this pass as summary.json holds them."""
        used = "trained" if self.split == "train" else "validated"
        return {
            "epoch": self.epoch,
            "read": self.read,
            used: self.trained,
            "quarantined": len(self.bad),
            "remainder": self.remainder,
            "padded": self.padded,
        }


@dataclass
class ChainBooks:
    """Head: what the chain cost, over the whole run."""

    records: int = 0
    bytes_out: int = 0
    costs: dict[str, StageCost] = field(default_factory=dict)
    tasks_by_node: Counter[str] = field(default_factory=Counter)
    dropped_columns: set[str] = field(default_factory=set)

    def take(self, report: BlockReport, node: str) -> None:
        """Add one block."""
        self.records += report.records
        self.bytes_out += report.bytes_out
        self.tasks_by_node[node] += 1
        self.dropped_columns.update(report.dropped_columns)
        for name, cost in report.costs.items():
            mine = self.costs.setdefault(name, StageCost())
            mine.cpu_s += cost.cpu_s
            mine.bytes_out += cost.bytes_out

    def stages(self) -> list[dict[str, Any]]:
        """Per stage: CPU ms and bytes per record."""
        n = max(self.records, 1)
        return [
            {
                "stage": name,
                "cpu_ms_per_sample": round(1000 * cost.cpu_s / n, 4),
                "bytes_out": round(cost.bytes_out / n),
            }
            for name, cost in self.costs.items()
        ]
