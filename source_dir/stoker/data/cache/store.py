"""Chain worker: records that a host keeps across epochs, in shared memory or on its disk.

A file per record, found by the record's key, so that every task of the host finds what any of them has
kept. Nothing is evicted: passes read all records in turn, and where these do not fit, throwing out the
oldest would throw out what is needed soonest. What fits is kept, the rest is preprocessed again.
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
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from stoker.data.messages import Record
from stoker.data.sources.contents import as_array
from stoker.errors import CacheError

PREFIX = "stoker-cache-"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of the run's own is made there, for its user alone
SPARE_SHARE = 0.1
"""Of a host's memory or disk, what the cache leaves to everybody else."""
UNASKED_SHARE = 0.5
"""Of what is free beside that, what the cache takes where `data.cache_gb` says nothing."""
PAGE = 4096
ALIGN = 64
MAPPED_FROM_BYTES = 1024 * 1024
"""Larger records are mapped, so that only the pixels that a crop uses are touched; below it, reading the
whole costs less than a map."""


class KeptRecord(dict[str, Any]):
    """Chain worker: a record as the first, deterministic stages of the chain left it in an earlier pass."""


@dataclass(frozen=True)
class CacheSpec:
    """Head → every host: what is kept, and where."""

    kind: Literal["memory", "disk"]
    run: str
    """Names the run: nothing is shared with another one."""
    most_bytes: int | None = None
    """On each host; None: half of what is free there."""
    folder: str = ""
    """For `disk`."""

    def root(self) -> Path:
        """A host of the cluster: the run's folder on it."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        parent = SHARED_MEMORY if self.kind == "memory" else Path(self.folder)
        # Several nodes of Ray may share a machine.
        return parent / f"{PREFIX}{self.run}-{node[:12]}"


def open_root(root: Path) -> None:
    """A host of the cluster: make the run's folder, for this user alone.

    Raises:
        CacheError: it cannot be made, or is somebody else's.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = root.stat().st_uid
    except OSError as error:
        raise CacheError(f"data.cache: {root.parent} cannot be written: {error.strerror}") from None
    if owner != os.getuid():
        raise CacheError(f"data.cache: {root} belongs to another user")


class HostCache:
    """Chain worker: one per process and split.

    Args:
        root: the run's folder on this host.
        key: names the data and the stages whose results are kept.
        spec: what is kept.
        reserved_bytes: of memory that Ray's object store may still take.

    Raises:
        CacheError: the folder cannot be used, or nothing fits there.
    """

    def __init__(self, root: Path, key: str, spec: CacheSpec, reserved_bytes: int = 0) -> None:
        open_root(root)
        self._folder = root / key
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._on_disk = spec.kind == "disk"
        self._books = Books(root / "books", lambda: room(root, spec, reserved_bytes))
        self._off = False
        """The folder has gone: the run is about to end, or whoever watches over it was killed."""

    @property
    def usage(self) -> tuple[int, int]:
        """Bytes kept on this host by all its tasks, and how many may be."""
        return self._books.read()

    def load(self, key: str) -> KeptRecord | None:
        """What is kept under a record's key."""
        content = self._content(self._path(key))
        if content is None:
            return None
        record = KeptRecord(decode(content))
        return record if record["key"] == key else None

    def keep(self, record: Record) -> int:
        """Keep a record; how many bytes that takes, 0 where there is no room or it is kept already."""
        path = self._path(record["key"])
        if self._off or path.exists():
            return 0
        try:
            parts = encode(record)
        except Exception as error:
            raise CacheError(f"data.cache: record {record['key']} cannot be kept: {error}") from error
        return self._write(path, parts)

    def keep_listing(self, shard: str, keys: list[str]) -> None:
        """Keep the keys of a shard's records, as they lie in it: it need not be read any more."""
        self._write(self._path(f"shard:{shard}"), encode({"keys": keys}))

    def listing(self, shard: str) -> list[str] | None:
        """The keys of a shard all of whose records are kept here."""
        content = self._content(self._path(f"shard:{shard}"))
        return None if content is None else list(decode(content)["keys"])

    def _path(self, key: str) -> Path:
        name = blake2b(key.encode(), digest_size=16).hexdigest()
        return self._folder / name[:2] / name[2:]

    def _content(self, path: Path) -> Any:
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(file).st_size
            if size >= MAPPED_FROM_BYTES:
                with contextlib.suppress(OSError):  # too many maps
                    # Private: a transform may write into its array.
                    pages = mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                    if self._on_disk:
                        pages.madvise(mmap.MADV_WILLNEED)
                    return pages
            content = bytearray(size)
            return content if os.readv(file, [content]) == size else None
        finally:
            os.close(file)

    def _write(self, path: Path, parts: list[Any]) -> int:
        size = -(-sum(map(len, parts)) // PAGE) * PAGE
        if not self._books.reserve(size):
            return 0
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            try:
                self._write_file(draft, parts)
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self._write_file(draft, parts)
            draft.rename(path)
        except OSError:
            self._off = True
            with contextlib.suppress(OSError):
                draft.unlink()
            return 0
        return size

    @staticmethod
    def _write_file(path: Path, parts: list[Any]) -> None:
        with path.open("wb", buffering=0) as file:
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[file.write(left) :]


class Books:
    """Chain worker: how many bytes a host keeps and may keep, counted by all its processes together."""

    _FORM = struct.Struct("<qq")

    def __init__(self, path: Path, bound: Any) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with self._locked():
            if os.fstat(self._file).st_size == 0:
                os.pwrite(self._file, self._FORM.pack(0, bound()), 0)

    def read(self) -> tuple[int, int]:
        """Bytes taken and bytes allowed."""
        taken, allowed = self._FORM.unpack(os.pread(self._file, self._FORM.size, 0))
        return taken, allowed

    def reserve(self, size: int) -> bool:
        """Take so many bytes, where they are left."""
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
    """Chain worker: bytes that this host's cache may take.

    Raises:
        CacheError: next to nothing.
    """
    disk = shutil.disk_usage(root)
    free = disk.free - SPARE_SHARE * disk.total
    if spec.kind == "memory":
        total, available = memory()
        # Ray's store lies in shared memory, too, and takes its pages only when it fills them.
        free = min(disk.free, available - SPARE_SHARE * total) - reserved_bytes
    bound = int(UNASKED_SHARE * free) if spec.most_bytes is None else min(spec.most_bytes, int(free))
    if bound < PAGE:
        beside = f", {reserved_bytes >> 20} MB of it for Ray's object store" if reserved_bytes else ""
        other = "disk" if spec.kind == "memory" else "memory"
        raise CacheError(
            f"data.cache: nothing can be kept in {root.parent} of this host: {disk.free >> 20} MB are"
            f" free{beside}; use data.cache {other} or none"
        )
    return bound


def memory() -> tuple[int, int]:
    """Every host: bytes of memory in all and available, within the container's limit where there is one."""
    import psutil

    whole = psutil.virtual_memory()
    total, available = int(whole.total), int(whole.available)
    for limit_file, used_file, stat_file, idle in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):
            folder = Path("/sys/fs/cgroup")
            limit = int((folder / limit_file).read_text())
            stat = dict(line.split() for line in (folder / stat_file).read_text().splitlines())
            # Files that were read once are counted as used, and given up when somebody needs memory.
            used = int((folder / used_file).read_text()) - int(stat[idle])
            total, available = min(total, limit), min(available, limit - used)
    return total, available


def encode(record: Record) -> list[Any]:
    """Chain worker: a record as bytes-like parts; the arrays come last, as they lie in memory."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(dict(record))
    body = stream.getvalue()
    raw = [buffer.raw() for buffer in buffers]
    head = struct.pack(f"<{2 + len(raw)}q", len(raw), len(body), *map(len, raw))
    parts: list[Any] = [head, body]
    at = len(head) + len(body)
    for buffer in raw:
        gap = -at % ALIGN
        parts += [bytes(gap), buffer]
        at += gap + len(buffer)
    return parts


def decode(content: Any) -> Record:
    """Chain worker: the record in what `encode` gave; its arrays are views of `content`."""
    view = memoryview(content)
    count, length = struct.unpack_from("<2q", view)
    sizes = struct.unpack_from(f"<{count}q", view, 16)
    at = 16 + 8 * count
    body = view[at : at + length]
    at += length
    buffers = []
    for size in sizes:
        at += -at % ALIGN
        buffers.append(view[at : at + size])
        at += size
    record: Record = pickle.loads(body, buffers=buffers)  # noqa: S301 - from this user's own folder
    return record


class _Pickler(pickle.Pickler):
    """Chain worker: tensors go as arrays, whose memory need not be copied."""

    def reducer_override(self, value: Any) -> Any:
        return as_array(value)
