"""Sources: where records come from. The head plans and checks shards, chain workers read them.

One file per format; each has its `read_…`, which `stoker.data` offers.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stoker.data.messages import BadRecord, Record, Shard
from stoker.errors import DataError

if TYPE_CHECKING:
    import numpy as np


ID_MODULUS = 2**63


class Source(ABC):
    """Head and chain worker: the records of one split."""

    random: bool = True
    """False: reading draws no random numbers. Else the global generators (`random`, `numpy.random`, torch)
    are seeded for every record, by (seed, epoch, key) where the keys are known before (`IndexedSource`)."""

    def check(self) -> None:  # noqa: B027 - nothing to check is a good answer
        """Head: look at what can be looked at before training.

        Raises:
            UsageError: absent, empty, truncated or lacking a column, naming the file.
        """

    @abstractmethod
    def shards(self, records: int, order: np.random.Generator | None) -> list[Shard]:
        """Head: the split cut into shards of about `records` records, permuted by `order`."""

    @abstractmethod
    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        """Chain worker: the records of a shard; a record that cannot be read comes as a BadRecord.

        Raises:
            OSError: the way to the data failed; the head has the shard read again, elsewhere if it can.
        """

    @abstractmethod
    def count(self) -> int | None:
        """Head: the number of records, None where only reading would tell."""

    def for_workers(self) -> Source:
        """Head: what chain workers need for `read`; a long list of files, say, stays on the head."""
        return self

    def fingerprint(self) -> str:
        """Head: short text that changes when other records would be read; made within about a second.

        Empty: nothing but reading tells, so a sample of the records is read (`stoker.data.sources.identity`).
        """
        return ""

    def classes(self) -> list[str] | None:
        """Head: names of the classes in the order of their labels, where the source knows them."""
        return None

    def to_ray(self, records: int = 1024) -> Any:
        """Anywhere, connected to Ray: the records as a `ray.data.Dataset`, for other pipelines than Stoker's.

        Args:
            records: of a block, about.

        Returns:
            Rows with the columns of a record. Reading a record that is damaged raises DataError.
        """
        import ray

        shards, reader = self.shards(records, None), self.for_workers()

        def rows(row: dict[str, Any]) -> Iterator[Record]:
            for record in reader.read(shards[row["id"]], None):
                if isinstance(record, BadRecord):
                    raise DataError(f"record {record.key} {record.reason}")
                yield record

        return ray.data.range(len(shards), override_num_blocks=max(len(shards), 1)).flat_map(rows)


class IndexedSource(Source):
    """Head and chain worker: records that are known by name before they are read, each by itself."""

    @abstractmethod
    def shards(self, records: int, order: np.random.Generator | None, homes: int = 0) -> list[Shard]:
        """Head: as `Source.shards`; see `cut_indices` for `homes`."""

    @abstractmethod
    def listing(self, shard: Shard) -> list[tuple[str, Shard]]:
        """Chain worker: key and shard of each record of a shard."""


class StreamedSource(Source):
    """Head and chain worker: records that are read one after the other."""

    @abstractmethod
    def arrangement(self, count: int, order: np.random.Generator | None) -> list[int]:
        """Chain worker: in which order `read` gives the `count` records of a shard."""


def listing_of(source: Source, shard: Shard) -> list[tuple[str, Shard]] | None:
    """Chain worker: key and shard of each record; None where only reading the shard tells."""
    return source.listing(shard) if isinstance(source, IndexedSource) else None


def cut_indices(n: int, records: int, order: np.random.Generator | None, homes: int = 0) -> list[Shard]:
    """Head: the indices 0 … n-1, permuted, in shards of `records`.

    Args:
        n: how many.
        records: in a shard.
        order: permutes them; None: as they are.
        homes: permute within so many random parts of them that never change, and then the shards of all
            parts; 0: permute all at once.
    """
    import numpy as np

    parts: list[tuple[str, list[int]]]
    if order is None:
        parts = [(str(i), list(range(i, min(i + records, n)))) for i in range(0, n, records)]
    elif homes < 2:
        indices = order.permutation(n).tolist()
        parts = [("", indices[i : i + records]) for i in range(0, n, records)]
    else:
        whole = np.random.default_rng(0).permutation(n)
        parts = []
        for home in range(homes):
            own = order.permutation(whole[home::homes]).tolist()
            parts += [(str(home), own[i : i + records]) for i in range(0, len(own), records)]
        parts = [parts[i] for i in order.permutation(len(parts))]
    return [Shard("", rows=len(part), items=tuple(part), home=home) for home, part in parts]


def digest(*parts: Any) -> str:
    """Head: what identifies data, as 16 hexadecimal digits."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def record_id(key: str) -> int:
    """Every host: a record's identity as 63 bits, so that sums of ids compare sets of records."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def one_by_one(
    source: Source,
    listing: list[tuple[str, Shard]],
    load: Callable[[str], Record | None],
    refuses: Callable[[str], str],
) -> Iterator[Record | BadRecord]:
    """Chain worker: the listed records of a shard, each read by itself unless it is refused or kept here."""
    for key, alone in listing:
        if reason := refuses(key):
            yield BadRecord(key, reason)
        elif (kept := load(key)) is not None:
            yield kept
        else:
            yield from source.read(alone, None)
