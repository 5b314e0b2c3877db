"""Head: which chain worker is fetching which shard before it is given it; part of the planner."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice

from stoker.serve.items import Numbered
from stoker.serve.pool import Pool

PREPARED_S = 10.0
"""For this long, other chain workers leave a shard to the one that prepares it."""


class Preparing:
    """Head: see the module.

    Args:
        pool: the hosts.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._shards: dict[str, tuple[float, Numbered]] = {}
        """By chain worker: since when, and which."""

    def announce(self, work: deque[Numbered], process: str) -> Numbered:
        """The shard that a chain worker will probably get next, for it to prepare."""
        (shard,) = self._first(work, process, 1)
        self._shards[process] = time.monotonic(), shard
        return shard

    def take(self, work: deque[Numbered], process: str, most: int) -> list[Numbered]:
        """Remove the next shards of a chain worker: first the one that it prepares, last those of others."""
        shards = self._first(work, process, most)
        for shard in shards:
            work.remove(shard)
        return shards

    def _first(self, work: deque[Numbered], process: str, most: int) -> list[Numbered]:
        own = self._shards.pop(process, (0.0, None))[1]
        near = list(islice(work, most if own is None and not self._shards else most + 2 * self._pool.slots))
        now = time.monotonic()
        self._shards = {p: (at, shard) for p, (at, shard) in self._shards.items() if now - at < PREPARED_S}
        others = [shard for _, shard in self._shards.values()]
        return sorted(near, key=lambda shard: (shard != own, shard in others))[:most]
