"""Sources of records: the base classes, retried reads, and seeded draws while reading.

The head plans and checks shards, chain workers read them. One file per format; each has its `read_…`
function, which `stoker.data` exports.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate, chain, repeat
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Self, TypeVar

from stoker.errors import UsageError
from stoker.protocol import BadRecord, Record, Shard
from stoker.read.generators import HeldGenerators, WhenImported

if TYPE_CHECKING:
    import numpy as np

ID_MODULUS = 2**63
T = TypeVar("T")


class Source(ABC):
    """The records of one split; a subclass defines `shards`, `read` and `count`."""

    random: bool = True
    """False: reading draws no random numbers. Otherwise the global generators of `random`, NumPy and torch
    are seeded for each record, by (seed, epoch, key) if keys are known before (`IndexedSource`)."""

    @cached_property
    def held(self) -> HeldGenerators:
        """The generators of what it reads, seeded as the global ones are."""
        return HeldGenerators(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "held"}

    notes: tuple[str, ...] = ()
    """Lines on what lies beside the records and is not read, for the screen and `peek`."""

    def noting(self, *notes: str) -> Self:
        self.notes += tuple(note for note in notes if note not in self.notes)
        return self

    def check(self) -> None:  # noqa: B027 - nothing to check is a good answer
        """Check the data as far as possible before training.

        Raises:
            UsageError: absent, empty, truncated or without a required column; names the file.
        """

    @abstractmethod
    def shards(self, records: int, order: np.random.Generator | None) -> Sequence[Shard]:
        """Divide the split into shards of about `records` records, permuted by `order`; None: as they are."""

    @abstractmethod
    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        """The records of a shard, each with a unique `key`, permuted by `order`; None: as they are.

        A record that cannot be read becomes a BadRecord.

        Raises:
            OSError: accessing the data failed; the head retries the shard, on another host if possible.
        """

    @abstractmethod
    def count(self) -> int | None:
        """The number of records; None if only reading would tell."""

    far: bool = False
    """Whether reading waits for a network, so that `prepare` saves time."""

    def prepare(self, shard: Shard) -> None:  # noqa: B027 - nothing to prepare is a good answer
        """Start fetching a shard that will probably be the next one to `read`."""

    def for_workers(self) -> Source:
        """What chain workers need for `read`, without head-only data such as file lists."""
        return self

    def fingerprint(self) -> str:
        """Short text that changes if the records change; takes about a second at most.

        Empty: the type of the source and the number of its records are compared.
        """
        return ""

    def classes(self) -> list[str] | None:
        """Class names in the order of their labels, if the source knows them."""
        return None

    def path_of(self, key: str) -> str:
        """Where a user finds a record; the key, unless it is part of a path only."""
        return key


class IndexedSource(Source):
    """Records with keys that are known before reading, each readable alone."""

    @abstractmethod
    def shards(
        self, records: int, order: np.random.Generator | None, homes: int = 0
    ) -> Sequence[Shard]:
        """As `Source.shards`; see `IndexedShards` for `homes`."""

    @abstractmethod
    def listing(self, shard: Shard) -> list[tuple[str, Shard]]:
        """Key and shard of each record of a shard."""


class StreamedSource(Source):
    """Records that are read sequentially."""

    @abstractmethod
    def arrangement(self, count: int, order: np.random.Generator | None) -> list[int]:
        """The order in which `read` returns the `count` records of a shard."""


def listing_of(source: Source, shard: Shard) -> list[tuple[str, Shard]] | None:
    return source.listing(shard) if isinstance(source, IndexedSource) else None


def _shard_of(indices: Sequence[int], home: str) -> Shard:
    return Shard("", rows=len(indices), items=tuple(indices), home=home)


class IndexedShards(Sequence[Shard]):
    """The indices 0 … n-1, permuted by `order`, in shards of `records`, each made when it is taken.

    A long pass has millions of shards, so only the permutation is kept: 4 bytes per record. With `homes`, it
    permutes within so many fixed random parts, then the shards of all parts.
    """

    def __init__(
        self,
        n: int,
        records: int,
        order: np.random.Generator | None,
        homes: int = 0,
        shard: Callable[[Sequence[int], str], Shard] = _shard_of,
    ) -> None:
        import numpy as np

        self._records, self._shard = records, shard
        self._parts: list[Any] = [range(n)]
        self._picked = None
        if order is not None and homes > 1:
            whole = _permuted_range(n, np.random.default_rng(0))
            self._parts = [whole[home::homes].copy() for home in range(homes)]
            for part in self._parts:
                order.shuffle(part)
        elif order is not None:
            self._parts = [_permuted_range(n, order)]
        self._firsts = [0, *accumulate(-(-len(part) // records) for part in self._parts)]
        """Number of the first shard of each part, before the shards of all parts are permuted."""
        if order is not None and homes > 1:
            self._picked = order.permutation(len(self))

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        number = range(len(self))[at]
        if self._picked is not None:
            number = int(self._picked[number])
        home = bisect_right(self._firsts, number) - 1
        begin = (number - self._firsts[home]) * self._records
        indices = self._parts[home][begin : begin + self._records]
        if isinstance(indices, range):
            return self._shard(indices, str(begin))
        return self._shard(indices.tolist(), "" if self._picked is None else str(home))


def _permuted_range(n: int, order: np.random.Generator) -> Any:
    """As `order.permutation(n)`, in half the memory."""
    import numpy as np

    found = np.arange(n, dtype=np.uint32 if n <= 2**32 else np.uint64)
    order.shuffle(found)
    return found


def cut_indices(
    n: int, records: int, order: np.random.Generator | None, homes: int = 0
) -> list[Shard]:
    """The shards of `IndexedShards` as a list."""
    return list(IndexedShards(n, records, order, homes))


def permuted(items: list[T], order: np.random.Generator | None) -> list[T]:
    return items if order is None else [items[i] for i in order.permutation(len(items))]


def digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def record_id(key: str) -> int:
    """A record's identity as 63 bits, so that sums of ids compare sets of records."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def item_name(source: Source, key: str) -> str:
    """By what a listed item is refused: a record may have the number of another item as its own key."""
    return f"item {key}" if isinstance(source, NumberedSource) else key


def one_by_one(
    source: Source,
    listing: list[tuple[str, Shard]],
    load: Callable[[str], Record | None],
    refuses: Callable[[str], str],
) -> Iterator[Record | BadRecord]:
    for key, alone in listing:
        if reason := refuses(name := item_name(source, key)):
            yield BadRecord(key, reason, name=name)
        elif (kept := load(key)) is not None:
            yield kept
        else:
            yield from source.read(alone, None)


WAITS_S = (0.1, 0.5)


def read_again(
    key: str, read: Callable[[], T], rewind: Callable[[], None] | None = None, far: bool = False
) -> T | BadRecord:
    """Call `read`; if it raises, retry after a moment.

    An OSError of a file system or connection is tried three times and may then be retried on another host;
    a file that is missing or may not be read once, unless it is far; anything else (a damaged file, an error
    in the user's code) twice.
    """
    for number, wait_s in enumerate((*WAITS_S, 0.0), start=1):
        try:
            return read()
        except Exception as error:
            passing = may_pass(error)
            most = len(WAITS_S) + 1 if passing else 2
            if isinstance(error, PERMANENT) and not far:
                most = 1
            if number == most:
                text = " ".join(str(error).split())[:300]
                tries = f", {number} tries" if number > 1 else ""
                return BadRecord(
                    key, f"cannot be read{tries}: {type(error).__name__}: {text}", passing
                )
            if isinstance(error, OSError):
                time.sleep(wait_s)
            if rewind:
                rewind()
    raise AssertionError("the last try returns")


def may_pass(error: BaseException) -> bool:
    """Whether an error concerns access to the data rather than the data."""
    if not isinstance(error, OSError) or isinstance(error, PERMANENT):
        return False
    # Pillow reports a damaged image as an OSError.
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return error.errno is not None or not (frames and "PIL" in Path(frames[-1]).parts)


REREAD_WAITS_S = (1.0, 4.0, 16.0)
"""Delays before retrying a shard that could not be read, on another host if possible."""


PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors of a shard worth one retry (the file system may still be mounting), but not more."""


def reread_wait_s(error: BaseException, tries: int) -> float | None:
    """How long to wait before retrying failed work; None: it has failed for good."""
    most = 1 if isinstance(error, PERMANENT) else len(REREAD_WAITS_S)
    return REREAD_WAITS_S[tries] if tries < most else None


def seed_globals(text: str) -> int:
    """Seed the generators of `random`, NumPy and torch, in seven microseconds; returns the seed."""
    import numpy as np

    seed = record_id(text)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    seed_torch(seed)
    return seed


def seed_torch(seed: int) -> None:
    """Seed torch's global generator, now or as soon as torch is loaded."""
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    if generator is not None:
        generator.manual_seed(seed)
    else:
        _later["seed"] = seed
        _when_loaded.follow()


_later: dict[str, int] = {}


def _seed_loaded(torch: Any) -> None:
    _when_loaded.stop()
    torch.default_generator.manual_seed(_later["seed"])


_when_loaded = WhenImported("torch".__eq__, _seed_loaded)


def seeded(
    records: Iterable[T], keys: Iterable[str] | None, text: str, held: HeldGenerators
) -> Iterator[T]:
    """The items of a reader, with the global generators and its own seeded before each item is made."""
    reader = iter(records)
    names = map(str, range(sys.maxsize)) if keys is None else chain(keys, repeat("end"))
    for name in names:
        seed_globals(f"{text}/{name}")
        held.seed(f"{text}/{name}")
        try:
            item = next(reader)
        except StopIteration:
            return
        yield item


@contextmanager
def drawing(text: str) -> Iterator[None]:
    """Seed the global generators for users' code that runs here, and restore them afterwards."""
    before = states()
    seed_globals(text)
    try:
        yield
    finally:
        _when_loaded.stop()
        restore_generators(before)


def states() -> dict[str, Any]:
    """The states of the global generators as plain types; torch's only if it is loaded."""
    import numpy as np

    state: Any = np.random.get_state()
    name, words, *rest = state
    found: dict[str, Any] = {"random": random.getstate(), "numpy": (name, words.tobytes(), *rest)}
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


def restore_generators(found: dict[str, Any]) -> None:
    import numpy as np

    random.setstate(found["random"])
    name, words, *rest = found["numpy"]
    np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))
    if "torch" in found:
        torch = sys.modules["torch"]
        torch.set_rng_state(torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8))


class NumberedSource(IndexedSource):
    @abstractmethod
    def count(self) -> int: ...

    def shards(
        self, records: int, order: np.random.Generator | None, homes: int = 0
    ) -> Sequence[Shard]:
        return IndexedShards(self.count(), records, order, homes)

    def listing(self, shard: Shard) -> list[tuple[str, Shard]]:
        return [(str(index), Shard("", items=(index,))) for index in shard.items]


class RangeSource(NumberedSource):
    random = False

    def __init__(self, n: int) -> None:
        if n < 1:
            raise UsageError(f"read_range({n}): a split needs at least one record")
        self.n = n

    def count(self) -> int:
        return self.n

    def fingerprint(self) -> str:
        return digest("range", self.n)

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        for index in shard.items:
            yield {"key": str(index), "index": index}


class TorchSource(NumberedSource):
    """A map-style `torch.utils.data.Dataset`.

    An item is a dict of columns, or a tuple of `columns`. An item that raises is a bad record.
    """

    def __init__(
        self, dataset: Any, columns: tuple[str, ...] = ("image", "label"), cacheable: bool = False
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"read_torch({type(dataset).__name__}): needs a map-style dataset, with __len__ and"
                " __getitem__"
            )
        self.dataset = dataset
        self.columns = columns
        self.random = not cacheable

    def fingerprint(self) -> str:
        own = getattr(self.dataset, "fingerprint", None)
        text = own() if callable(own) else ""
        return digest(type(self.dataset).__name__, len(self.dataset), text)

    def check(self) -> None:
        if len(self.dataset) == 0:
            raise UsageError(f"read_torch({type(self.dataset).__name__}): the dataset is empty")

    def classes(self) -> list[str] | None:
        """The names that torchvision's datasets have as `classes`, also below a Subset."""
        inner = self.dataset
        while type(inner).__name__ == "Subset":
            inner = inner.dataset
        names = getattr(inner, "classes", None)
        known = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        return list(names) if known and names else None

    def count(self) -> int:
        return len(self.dataset)

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        for index in shard.items:
            rewind = partial(restore_generators, states())
            read = partial(
                read_again, str(index), partial(self.dataset.__getitem__, index), rewind, far=True
            )
            item = read()
            if self.held.created():
                rewind()
                item = read()
            if isinstance(item, BadRecord):
                yield item._replace(name=item_name(self, item.key))
                continue
            if not isinstance(item, dict):
                values = item if isinstance(item, tuple | list) else (item,)
                if len(values) != len(self.columns):
                    raise UsageError(
                        f"read_torch({type(self.dataset).__name__}): item {index} has {len(values)} values,"
                        f" but columns= names {len(self.columns)}: {', '.join(self.columns)}"
                    )
                item = dict(zip(self.columns, values, strict=True))
            if not isinstance(item.get("key", ""), str):
                raise UsageError(
                    f"read_torch({type(self.dataset).__name__}): item {index} has the key {item['key']!r}; a"
                    " key names a record, so make it text, or rename or leave out that column"
                )
            # Hugging Face's Image(decode=False).
            images = {n: v for n, v in item.items() if type(v) is dict and v.keys() == ENCODED}
            encoded = {n: v["bytes"] for n, v in images.items() if isinstance(v["bytes"], bytes)}
            yield {"key": str(index), **item, **encoded}


ENCODED = {"bytes", "path"}


def read_torch(
    dataset: Any, columns: tuple[str, ...] = ("image", "label"), cacheable: bool = False
) -> Source:
    """Read a map-style dataset.

    On resume, datasets are compared by type, length and, if they have that method, `fingerprint()`.

    Args:
        dataset: a `torch.utils.data.Dataset` with `__len__` and `__getitem__`.
        columns: the names of a tuple's parts.
        cacheable: reading an item draws no random numbers, so that `data.cache` may keep it.
    """
    return TorchSource(dataset, columns, cacheable)


def read_range(n: int) -> Source:
    """`n` records with only the column `index`; the chain makes the rest."""
    return RangeSource(n)
