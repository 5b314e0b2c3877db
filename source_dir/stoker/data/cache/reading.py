"""What of a chain is kept across epochs, and reading shards through what a host has kept.

The first stages of a chain that draw nothing give the same result for a record in every epoch. With
`data.cache` a host keeps these results; the rest of the chain runs on them. Keys hold the source's
fingerprint, the split and the stages, so nothing is found that other data or another chain has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from stoker.data.cache.store import HostCache
from stoker.data.messages import BadRecord, Record, Shard
from stoker.data.sources.base import Source, StreamedSource, digest, listing_of, one_by_one
from stoker.errors import CacheError

HOME_RECORDS = 2048
"""Records that are permuted among themselves, at least, where each host shall find its own again: about as
many as the shuffle buffers that readers of shards use."""
MOST_HOMES = 64


def homes_of(count: int | None, block_records: int) -> int:
    """Head: into how many parts the records of a split are divided, each of which one host keeps.

    Few records are permuted all together: then each host keeps what it comes across.
    """
    homes = min(MOST_HOMES, (count or 0) // max(HOME_RECORDS, 4 * block_records))
    return homes if homes > 1 else 0


class CachedReader:
    """Chain worker: the records of a shard in the order of `Source.read`, those that the host has kept from
    its cache.

    Args:
        source: where the others come from.
        shard: what to read.
        order: makes the generator that permutes the records, anew at each call.
        cache: of this host.
        store: whether to keep what is not kept yet.
        refuses: why a record shall not be read; empty: it may.
    """

    def __init__(
        self,
        source: Source,
        shard: Shard,
        order: Callable[[], Any],
        cache: HostCache,
        store: bool,
        refuses: Callable[[str], str] = lambda key: "",
    ) -> None:
        self.refuses = refuses
        self.source, self.shard, self.order, self.cache, self.store = source, shard, order, cache, store
        items = f":{digest(shard.items)}" if shard.items else ""
        self.name = f"{shard.path}:{shard.start}:{shard.stop}{items}"
        self.seen: dict[str, None] = {}
        """Keys in the order in which they were read."""
        self.kept = 0

    def __iter__(self) -> Iterator[Record | BadRecord]:
        listing = listing_of(self.source, self.shard)
        if listing is not None:
            yield from one_by_one(self.source, listing, self.cache.load, self.refuses)
            return
        done = 0
        for key in self._whole():
            kept = self.cache.load(key)
            if kept is None:  # the folder has gone meanwhile
                break
            yield kept
            done += 1
        else:
            if done:
                return
        for record in islice(self.source.read(self.shard, self.order()), done, None):
            if isinstance(record, BadRecord):
                yield record
                continue
            if record["key"] in self.seen:
                raise CacheError(
                    f"data.cache: two records have the key {record['key']}, so one would be taken for the"
                    " other; give each its own, or set it to none"
                )
            self.seen[record["key"]] = None
            kept = self.cache.load(record["key"])
            self.kept += kept is not None
            yield record if kept is None else kept

    def _whole(self) -> list[str]:
        """The keys of the shard in the order of this pass, where all of its records are kept."""
        if not self._arranged():
            return []
        keys = self.cache.listing(self.name)
        if keys is None:
            return []
        return [keys[i] for i in self._arrangement(len(keys))]

    def _arrangement(self, count: int) -> list[int]:
        return self.source.arrangement(count, self.order()) if isinstance(self.source, StreamedSource) else []

    def _arranged(self) -> bool:
        """Whether the source has an `arrangement`, and it is that of its `read`; a class of the user's may
        have changed only the latter."""
        kind = type(self.source)
        if not isinstance(self.source, StreamedSource):
            return False
        owners = [next(c for c in kind.__mro__ if name in vars(c)) for name in ("read", "arrangement")]
        return owners[0] is owners[1]

    def keep(self, record: Record) -> int:
        """Keep a record that has passed the first stages; the bytes it takes."""
        if not self.store:
            return 0
        size = self.cache.keep(record)
        self.kept += size > 0
        return size

    def finished(self, whole: bool) -> None:
        """The shard was read.

        Args:
            whole: from its first record to its last, and none of them was bad.
        """
        if not (whole and self.store and self.seen and self.kept == len(self.seen) and self._arranged()):
            return
        order = self._arrangement(len(self.seen))
        keys = [""] * len(order)
        for place, key in zip(order, self.seen, strict=True):
            keys[place] = key
        self.cache.keep_listing(self.name, keys)
