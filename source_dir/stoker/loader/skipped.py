"""Script: the records that a pass of a `stoker.DataLoader` has skipped, and how many it may skip."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.loader.digests import PLAIN
from stoker.serve.accounting import LEAST_ASSUMED


class Quarantine:
    def __init__(self, budget: float, total: int | None) -> None:
        self.budget, self.total, self.read = budget, total, 0
        self.records: list[tuple[Any, str]] = []

    def plain(self, count: int) -> list[tuple[Any, str]]:
        """The first records as a state may contain them."""
        return [(_plain(index), reason) for index, reason in self.records[:count]]

    def add(self, bad: Any, read: int) -> str:
        """Why the pass fails now; a few at the start of an unknown total prove nothing."""
        self.records += bad
        self.read += read
        return (
            self._over(max(self.read, LEAST_ASSUMED if self.total is None else self.total))
            if bad
            else ""
        )

    def ended(self) -> str:
        return self._over(max(self.read, self.total or 0))

    def _over(self, whole: int) -> str:
        if len(self.records) <= self.budget * whole:
            return ""
        index, reason = self.records[-1]
        return (
            f"{len(self.records)} of {whole} records cannot be loaded, more than"
            f" bad_record_budget={self.budget}; last one: index {index!r}: {reason}"
        )


def _plain(index: Any) -> Any:
    """An index as a state may contain it."""
    index = index.item() if isinstance(index, np.number) else index
    return index if type(index) in PLAIN else repr(index)
