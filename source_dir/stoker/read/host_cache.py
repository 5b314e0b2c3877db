"""Chain worker: records cached on a host across epochs, in shared memory or on disk.

The results of the first deterministic stages are stored in one file per record, named by its key, so every
task on the host finds what any of them has cached. Nothing is evicted: a pass reads all records in turn, so
evicting the oldest would evict what is needed next. docs/architecture.md has the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import pickle
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from stoker.errors import CacheError
from stoker.hosts.machine import memory
from stoker.protocol import BadRecord, Record, Shard
from stoker.read.identity import tensor_as_array
from stoker.read.sources import Source, StreamedSource, digest, listing_of, one_by_one

PREFIX = "stoker-cache-"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of the run's own is made there, for its user alone
SPARE_SHARE = 0.1
"""Share of a host's memory or disk that the cache leaves to others."""
UNASKED_SHARE = 0.5
"""Share of the remaining free space that the cache takes if `data.cache_gb` is not set."""
PAGE = 4096
ALIGN = 64
MAPPED_FROM_BYTES = 1024 * 1024
"""Records from this size on are memory-mapped, so that only the pixels that a crop uses are read; for smaller
ones reading is cheaper than mapping."""


class KeptRecord(dict[str, Any]):
    """A record as the deterministic prefix of the chain left it in an earlier pass."""


@dataclass(frozen=True)
class CacheSpec:
    kind: Literal["memory", "disk"]
    run: str
    most_bytes: int | None = None
    """Per host; None: half of its free space."""
    folder: str | None = None
    """For `disk`; None: the host's temporary folder. Ray's own is open to all users of the host."""

    def root(self) -> Path:
        import ray

        node = ray.get_runtime_context().get_node_id()
        disk = Path(self.folder or tempfile.gettempdir())
        parent = SHARED_MEMORY if self.kind == "memory" else disk
        # Several Ray nodes may share a machine.
        return parent / f"{PREFIX}{self.run}-{node[:12]}"


def open_root(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = root.stat().st_uid
    except OSError as error:
        raise CacheError(f"data.cache: {root.parent} cannot be written: {error.strerror}") from None
    if owner != os.getuid():
        raise CacheError(f"data.cache: {root} belongs to another user")


class HostCache:
    def __init__(self, root: Path, key: str, spec: CacheSpec, reserved_bytes: int = 0) -> None:
        open_root(root)
        self._folder = root / key
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._on_disk = spec.kind == "disk"
        self._books = Books(root / "books", lambda: room(root, spec, reserved_bytes))
        self._off = False
        """The folder is gone: the run is about to end, or its cleaner was killed."""

    @property
    def usage(self) -> tuple[int, int]:
        return self._books.read()

    def has(self, key: str) -> bool:
        return self._path(key).exists()

    def load(self, key: str) -> KeptRecord | None:
        content = self._content(self._path(key))
        if content is None:
            return None
        record = KeptRecord(decode(content))
        return record if record["key"] == key else None

    def keep(self, record: Record) -> int:
        """Cache a record; returns the bytes it takes, 0 if there is no room or it is cached already."""
        path = self._path(record["key"])
        if self._off or path.exists():
            return 0
        try:
            parts = encode(record)
        except Exception as error:
            raise CacheError(
                f"data.cache: record {record['key']} cannot be cached: {error}"
            ) from error
        return self._write(path, parts)

    def keep_listing(self, shard: str, keys: list[str]) -> None:
        """Cache the keys of a shard's records in their order, so that the shard need not be read again."""
        self._write(self._path(f"shard:{shard}"), encode({"keys": keys}))

    def listing(self, shard: str) -> list[str] | None:
        content = self._content(self._path(f"shard:{shard}"))
        return None if content is None else list(decode(content)["keys"])

    def _path(self, key: str) -> Path:
        name = blake2b(key.encode(), digest_size=16).hexdigest()
        return self._folder / name[:2] / name[2:]

    def _content(self, path: Path) -> Any:
        import numpy as np

        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            return None
        with file:
            size = os.fstat(file.fileno()).st_size
            if size >= MAPPED_FROM_BYTES:
                with contextlib.suppress(OSError):  # too many maps
                    # Private: a transform may write into its array.
                    pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
                    if self._on_disk:
                        pages.madvise(mmap.MADV_WILLNEED)
                    return pages
            content: Any = np.empty(size, np.uint8)  # not zeroed, unlike a bytearray
            return content if file.readinto(content) == size else None

    def _write(self, path: Path, parts: list[Any]) -> int:
        size = pages_of(parts)
        if not self._books.reserve(size):
            return 0
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with draft.open("wb") as file:
                file.writelines(parts)
            draft.rename(path)
        except OSError:
            self._off = True
            with contextlib.suppress(OSError):
                draft.unlink()
            return 0
        return size


class Books:
    """Bytes cached on a host and their limit, shared by all its processes."""

    _FORM = struct.Struct("<qq")

    def __init__(self, path: Path, bound: Any) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with self._locked():
            if os.fstat(self._file).st_size == 0:
                os.pwrite(self._file, self._FORM.pack(0, bound()), 0)

    def read(self) -> tuple[int, int]:
        taken, allowed = self._FORM.unpack(os.pread(self._file, self._FORM.size, 0))
        return taken, allowed

    def reserve(self, size: int) -> bool:
        with self._locked():
            taken, allowed = self.read()
            if taken + size > allowed:
                return False
            os.pwrite(self._file, self._FORM.pack(taken + size, allowed), 0)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Any:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._file)


def room(root: Path, spec: CacheSpec, reserved_bytes: int) -> int:
    disk = shutil.disk_usage(root)
    left, free = disk.free, disk.free - SPARE_SHARE * disk.total
    if spec.kind == "memory":
        total, available = memory()
        left = min(left, available)
        # Ray's store is in shared memory too, and takes pages only as it fills them.
        free = min(disk.free, available - SPARE_SHARE * total) - reserved_bytes
    asked = UNASKED_SHARE * free if spec.most_bytes is None else spec.most_bytes
    bound = int(min(asked, free))
    if bound < PAGE:
        beside = (
            f", {reserved_bytes >> 20} MB of it for Ray's object store" if reserved_bytes else ""
        )
        other = "disk" if spec.kind == "memory" else "memory"
        raise CacheError(
            f"data.cache: nothing can be cached in {root.parent} on this host: {left >> 20} MB are"
            f" free{beside}; use data.cache {other} or none"
        )
    return bound


def pages_of(parts: list[Any]) -> int:
    """Bytes of a file of these parts, in whole pages."""
    return -(-sum(map(len, parts)) // PAGE) * PAGE


def size_in_cache(record: Record) -> int:
    return pages_of(encode(record))


def encode(record: Record) -> list[Any]:
    """A record as bytes-like parts; arrays come last, as they are in memory."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(dict(record))
    return framed(stream.getvalue(), [buffer.raw() for buffer in buffers])


def decode(content: Any) -> Record:
    """Decode the output of `encode`; arrays are views of `content`."""
    body, *buffers = unframed(content)
    record: Record = pickle.loads(body, buffers=buffers)  # noqa: S301 - from this user's own folder
    return record


def framed(body: bytes, buffers: list[Any]) -> list[Any]:
    """Bytes-like parts of a file: how many and how long, a body, and buffers where arrays may lie."""
    head = struct.pack(f"<{2 + len(buffers)}q", len(buffers), len(body), *map(len, buffers))
    parts: list[Any] = [head, body]
    at = len(head) + len(body)
    for buffer in buffers:
        gap = -at % ALIGN
        parts += [bytes(gap), buffer]
        at += gap + len(buffer)
    return parts


def unframed(content: Any) -> list[memoryview]:
    view = memoryview(content)
    count, length = struct.unpack_from("<2q", view)
    sizes = struct.unpack_from(f"<{count}q", view, 16)
    at = 16 + 8 * count
    found = [view[at : at + length]]
    at += length
    for size in sizes:
        at += -at % ALIGN
        found.append(view[at : at + size])
        at += size
    return found


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, whose memory need not be copied."""

    def reducer_override(self, value: Any) -> Any:
        return tensor_as_array(value)


HOME_RECORDS = 2048
"""Minimum number of records to permute together if each host must find its own again: about the size of a
typical shuffle buffer."""
MOST_HOMES = 64


def homes_of(count: int | None, block_records: int) -> int:
    """Number of parts that a split is divided into, each cached by one host; 0: a small one is permuted as a
    whole, and each host caches the records it encounters."""
    homes = min(MOST_HOMES, (count or 0) // max(HOME_RECORDS, 4 * block_records))
    return homes if homes > 1 else 0


@dataclass
class CachedReader:
    """The records of a shard in the order of `Source.read`, from the cache if possible.

    Records that `caches` leaves out are neither looked for nor stored.
    """

    source: Source
    shard: Shard
    order: Callable[[], Any]
    cache: HostCache
    store: bool
    caches: Callable[[str], bool] = lambda key: True
    refuses: Callable[[str], str] = lambda key: ""
    seen: dict[str, None] = field(default_factory=dict)
    kept: int = 0
    listed: int = 0
    """Records that came from the cache by a listing; `seen` lacks them."""
    asked: str = ""
    """Listed key of the record that is being read."""

    @property
    def name(self) -> str:
        items = f":{digest(self.shard.items)}" if self.shard.items else ""
        return f"{self.shard.path}:{self.shard.start}:{self.shard.stop}{items}"

    def __iter__(self) -> Iterator[Record | BadRecord]:
        listing = listing_of(self.source, self.shard)
        if listing is not None:
            if self.source.far:
                absent = (one.items for key, one in listing if not self.cache.has(key))
                items = tuple(chain.from_iterable(absent))
                self.source.prepare(Shard(self.shard.path, items=items))
            yield from map(
                self._as_listed, one_by_one(self.source, listing, self._load, self.refuses)
            )
            return
        for key in self._whole():
            kept = self.cache.load(key)
            if kept is None:  # its file or the whole folder was removed meanwhile
                break
            yield kept
            self.listed += 1
        else:
            if self.listed:
                return
        for record in islice(self.source.read(self.shard, self.order()), self.listed, None):
            if isinstance(record, BadRecord):
                yield record
                continue
            if record["key"] in self.seen:
                raise CacheError(
                    f"data.cache: two records have the key {record['key']}, so one would be mistaken for the"
                    " other; make keys unique or set data.cache=none"
                )
            self.seen[record["key"]] = None
            kept = self._look(record["key"])
            self.kept += kept is not None
            yield record if kept is None else kept

    def _load(self, key: str) -> Record | None:
        self.asked = key
        return self._look(key)

    def _look(self, key: str) -> KeptRecord | None:
        return self.cache.load(key) if self.caches(key) else None

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
        keys = self.cache.listing(self.name) or []
        return [keys[i] for i in self._arrangement(len(keys)) or ()]

    def _arrangement(self, count: int) -> list[int] | None:
        """The order in which `read` yields so many records; None: the source does not tell."""
        if not isinstance(self.source, StreamedSource):
            return None
        # A user's subclass may override `read` only.
        classes = type(self.source).__mro__
        owners = {next(c for c in classes if name in vars(c)) for name in ("read", "arrangement")}
        return self.source.arrangement(count, self.order()) if len(owners) == 1 else None

    def keep(self, record: Record) -> int:
        if not (self.store and self.caches(record["key"])):
            return 0
        size = self.cache.keep(record)
        self.kept += size > 0
        return size

    def finished(self, whole: bool) -> None:
        if self.listed or not (whole and self.store and self.seen and self.kept == len(self.seen)):
            return
        if (order := self._arrangement(len(self.seen))) is None:
            return
        keys = [""] * len(order)
        for place, key in zip(order, self.seen, strict=True):
            keys[place] = key
        self.cache.keep_listing(self.name, keys)
