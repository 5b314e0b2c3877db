"""Caches the deterministic prefix of a chain and reads shards through that cache.

The first deterministic stages of a chain give the same result for a record in every epoch. With `data.cache`
a host stores these results and runs only the rest of the chain on them. Keys include the source's
fingerprint, the split and the stages, so results of other data or another chain are never found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from stoker.errors import CacheError
from stoker.messages import BadRecord, Record, Shard
from stoker.read.base import Source, StreamedSource, digest, listing_of, one_by_one
from stoker.read.cache_store import HostCache

HOME_RECORDS = 2048
"""Minimum number of records to permute together if each host must find its own again: about the size of a
typical shuffle buffer."""
MOST_HOMES = 64


def homes_of(count: int | None, block_records: int) -> int:
    """Head: number of parts that the records of a split are divided into, each cached by one host.

    A small split is permuted as a whole: each host then caches the records it encounters.
    """
    homes = min(MOST_HOMES, (count or 0) // max(HOME_RECORDS, 4 * block_records))
    return homes if homes > 1 else 0


class CachedReader:
    """Chain worker: the records of a shard in the order of `Source.read`, from the cache if possible.

    Args:
        source: where uncached records come from.
        shard: what to read.
        order: creates the generator that permutes the records, a new one at each call.
        cache: of this host.
        store: whether to cache records that are not cached yet.
        refuses: why a record must not be read; empty: it may.
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
        """Keys in reading order."""
        self.kept = 0
        self.asked = ""
        """Listed key of the record that is being read."""

    def __iter__(self) -> Iterator[Record | BadRecord]:
        listing = listing_of(self.source, self.shard)
        if listing is not None:
            yield from map(self._as_listed, one_by_one(self.source, listing, self._load, self.refuses))
            return
        done = 0
        for key in self._whole():
            kept = self.cache.load(key)
            if kept is None:  # the folder was removed meanwhile
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
                    f"data.cache: two records have the key {record['key']}, so one would be mistaken for the"
                    " other; make keys unique or set data.cache=none"
                )
            self.seen[record["key"]] = None
            kept = self.cache.load(record["key"])
            self.kept += kept is not None
            yield record if kept is None else kept

    def _load(self, key: str) -> Record | None:
        self.asked = key
        return self.cache.load(key)

    def _as_listed(self, record: Record | BadRecord) -> Record | BadRecord:
        """Refuse a record of another key than its listed one, which may be that of another record."""
        if not isinstance(record, BadRecord) and record["key"] != self.asked:
            raise CacheError(
                f"data.cache: record {self.asked} gives itself the key {record['key']!r}, so another could be"
                " mistaken for it; leave key out of the dataset's items or set data.cache=none"
            )
        return record

    def _whole(self) -> list[str]:
        """The keys of the shard in the order of this pass, if all of its records are cached."""
        if not self._arranged():
            return []
        keys = self.cache.listing(self.name)
        if keys is None:
            return []
        return [keys[i] for i in self._arrangement(len(keys))]

    def _arrangement(self, count: int) -> list[int]:
        return self.source.arrangement(count, self.order()) if isinstance(self.source, StreamedSource) else []

    def _arranged(self) -> bool:
        """Whether the source has an `arrangement` that matches its `read`; a user's subclass may override
        only the latter."""
        kind = type(self.source)
        if not isinstance(self.source, StreamedSource):
            return False
        owners = [next(c for c in kind.__mro__ if name in vars(c)) for name in ("read", "arrangement")]
        return owners[0] is owners[1]

    def keep(self, record: Record) -> int:
        """Cache a record that has passed the first stages; returns the bytes it takes."""
        if not self.store:
            return 0
        size = self.cache.keep(record)
        self.kept += size > 0
        return size

    def finished(self, whole: bool) -> None:
        """End of the shard.

        Args:
            whole: it was read from first to last record, and none was bad.
        """
        if not (whole and self.store and self.seen and self.kept == len(self.seen) and self._arranged()):
            return
        order = self._arrangement(len(self.seen))
        keys = [""] * len(order)
        for place, key in zip(order, self.seen, strict=True):
            keys[place] = key
        self.cache.keep_listing(self.name, keys)
