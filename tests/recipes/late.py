"""A recipe whose first record comes late, and all others at once."""

from __future__ import annotations

import time
from typing import Any

from rows import Counting, Numbers


class Late(Numbers):
    pause_s = 0.0

    def read(self, shard: Any, order: Any) -> Any:
        if 0 in shard.items:
            time.sleep(self.pause_s)
        yield from super().read(shard, order)


class FirstLate(Counting):
    pause_s: float

    def read(self, split: str) -> Any:
        if split == "val":
            return None
        source = Late(self.train_records)
        source.pause_s = self.pause_s
        return source
