"""Sources of records. The head plans and checks shards, chain workers read them.

One file per format; each has its `read_…` function, which `stoker.data` exports.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from stoker.errors import DataError
from stoker.messages import BadRecord, Record, Shard

if TYPE_CHECKING:
    import numpy as np


ID_MODULUS = 2**63


class Source(ABC):
    """Head and chain worker: the records of one split."""

    random: bool = True
    """False: reading draws no random numbers. Otherwise the global generators (`random`, `numpy.random`,
    torch) are seeded for each record, by (seed, epoch, key) if keys are known before (`IndexedSource`)."""

    notes: tuple[str, ...] = ()
    """Lines on what lies beside the records and is not read, for the screen and `peek`."""

    def noting(self, *notes: str) -> Self:
        """Head: this source with more notes."""
        self.notes += notes
        return self

    def check(self) -> None:  # noqa: B027 - nothing to check is a good answer
        """Head: check the data as far as possible before training.

        Raises:
            UsageError: absent, empty, truncated or without a required column; names the file.
        """

    @abstractmethod
    def shards(self, records: int, order: np.random.Generator | None) -> list[Shard]:
        """Head: divide the split into shards of about `records` records, permuted by `order`."""

    @abstractmethod
    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        """Chain worker: the records of a shard; a record that cannot be read becomes a BadRecord.

        Raises:
            OSError: accessing the data failed; the head retries the shard, on another host if possible.
        """

    @abstractmethod
    def count(self) -> int | None:
        """Head: the number of records; None if only reading would tell."""

    far: bool = False
    """Whether reading waits for a network, so that `prepare` saves time."""

    def prepare(self, shard: Shard) -> None:  # noqa: B027 - nothing to prepare is a good answer
        """Chain worker: start fetching a shard that will probably be the next one to `read`."""

    def for_workers(self) -> Source:
        """Head: what chain workers need for `read`, without head-only data such as file lists."""
        return self

    def fingerprint(self) -> str:
        """Head: short text that changes if the records change; takes about a second at most.

        Empty: only reading can tell, so records are sampled (`stoker.read.identity`).
        """
        return ""

    def classes(self) -> list[str] | None:
        """Head: class names in the order of their labels, if the source knows them."""
        return None

    def path_of(self, key: str) -> str:
        """Head: where a user finds a record; the key, unless it is part of a path only."""
        return key

    def to_ray(self, records: int = 1024) -> Any:
        """Anywhere, connected to Ray: the records as a `ray.data.Dataset`, for other pipelines.

        Args:
            records: approximate number per block.

        Returns:
            Rows with the columns of a record. Reading a damaged record raises DataError.
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
    """Head and chain worker: records with keys that are known before reading, each readable alone."""

    @abstractmethod
    def shards(self, records: int, order: np.random.Generator | None, homes: int = 0) -> list[Shard]:
        """Head: as `Source.shards`; see `cut_indices` for `homes`."""

    @abstractmethod
    def listing(self, shard: Shard) -> list[tuple[str, Shard]]:
        """Chain worker: key and shard of each record of a shard."""


class StreamedSource(Source):
    """Head and chain worker: records that are read sequentially."""

    @abstractmethod
    def arrangement(self, count: int, order: np.random.Generator | None) -> list[int]:
        """Chain worker: the order in which `read` returns the `count` records of a shard."""


def listing_of(source: Source, shard: Shard) -> list[tuple[str, Shard]] | None:
    """Chain worker: key and shard of each record; None if only reading the shard tells."""
    return source.listing(shard) if isinstance(source, IndexedSource) else None


def cut_indices(n: int, records: int, order: np.random.Generator | None, homes: int = 0) -> list[Shard]:
    """Head: divide the permuted indices 0 … n-1 into shards of `records`.

    Args:
        n: number of indices.
        records: per shard.
        order: permutes them; None: keep their order.
        homes: permute within this many fixed random parts, then permute the shards of all parts; 0: permute
            all indices together.
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
    """Head: an identifier of data, 16 hexadecimal digits."""
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
    """Chain worker: the listed records of a shard, each read alone unless it is refused or cached here."""
    for key, alone in listing:
        if reason := refuses(key):
            yield BadRecord(key, reason)
        elif (kept := load(key)) is not None:
            yield kept
        else:
            yield from source.read(alone, None)
