"""The blocks that chain workers have made on a host: files that outlive the process that wrote them, and the
server that sends rows of them to train workers on other hosts.

A chain worker writes a block and reports its name; the server, and whoever else runs on this host, maps it.
The service decides when it goes. Removing a file never takes memory from a reader, and a full memory is an
error of the writer alone. What shared memory has no room for lies in the temporary folder.

Memory that is written again costs half of what new memory does, so the files of large blocks that nobody uses
any more stay as spares for the next ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import re
import secrets
import socket
import tempfile
import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stoker.chain.columns import Ragged, block_columns, block_parts
from stoker.errors import SchemaError
from stoker.hosts import machine
from stoker.read.host_cache import SHARED_MEMORY
from stoker.serve.blocks import wire

PREFIX = "stoker-blocks-"
NAME = re.compile(r"[0-9a-f]{24}")
SHARE = 0.5
"""Share of a host's shared memory that stays free of blocks: for Ray's object store and others."""
IDLE_TIMEOUT_S = 3600.0
"""A connection idle for this long is closed; a live train worker reconnects."""
SPARE, SPARE_FROM_BYTES = ".spare", 2**20
TAKEN, MOST_TAKEN = ".taken", 128
_taken: set[Path] = set()
_forks: list[None] = []
"""One for each fork of this process."""
os.register_at_fork(
    after_in_parent=lambda: _forks.append(None), after_in_child=lambda: _forks.append(None)
)


def digest_of(columns: dict[str, Any]) -> int:
    return functools.reduce(lambda sum_, part: zlib.crc32(part, sum_), block_parts(columns), 0)


def here(run: str) -> BlockFolder:
    import ray

    return BlockFolder(run, ray.get_runtime_context().get_node_id())


class BlockFolder:
    """The blocks of one run on one Ray node. Nobody else can know `run`, so nobody prepares such a folder."""

    def __init__(self, run: str, node: str) -> None:
        self.node = node
        parents = [Path(tempfile.gettempdir())]
        if SHARED_MEMORY.is_dir():
            parents.insert(0, SHARED_MEMORY)
        self.roots = [parent / f"{PREFIX}{run}-{node[:12]}" for parent in parents]

    def write(self, columns: dict[str, Any]) -> str:
        name, parts = secrets.token_hex(12), block_parts(columns)
        size = sum(map(len, parts))
        for root in self.roots[:-1]:
            draft = root / f"{name}.new"
            spares = self._spares(root) if size >= SPARE_FROM_BYTES else []
            for spare, has in spares:
                with contextlib.suppress(OSError):  # another has just taken it
                    if size <= has <= 2 * size:
                        spare.rename(draft)
                        return _write(draft, parts, "r+b")
            if not _has_room(root.parent, size):
                for spare, _ in spares:
                    spare.unlink(missing_ok=True)
            if _has_room(root.parent, size):
                with contextlib.suppress(OSError):  # another has just taken it
                    return _write(draft, parts)
        return _write(self.roots[-1] / f"{name}.new", parts)

    def columns(self, name: str) -> dict[str, Any]:
        """A block as NumPy columns: views of its file, which stay valid when that is removed."""
        for root in self.roots:
            with contextlib.suppress(FileNotFoundError):
                return block_columns(_mapped(root / name, mmap.ACCESS_READ))
        raise FileNotFoundError(f"block {name} is not on this host")

    def take(self, name: str) -> dict[str, Any]:
        """Like `columns`, for the only user of a block, who may write into it: a page written to is copied.

        Its file is a spare when the last view is gone. OSError: it is not in shared memory, or too many are
        mapped.
        """
        if len(_taken) >= MOST_TAKEN:
            raise OSError("too many mapped blocks: each has a file descriptor")
        for root in self.roots[:-1]:
            with contextlib.suppress(FileNotFoundError):
                content = _mapped(root / name, mmap.ACCESS_COPY)
                taken = root / f"{name}.{os.getpid()}{TAKEN}"
                (root / name).rename(taken)
                _taken.add(taken)
                weakref.finalize(content, self._give_back, taken, len(_forks)).atexit = False
                return block_columns(content)
        raise FileNotFoundError(f"block {name} is not in shared memory")

    def _give_back(self, taken: Path, forks: int) -> None:
        _taken.discard(taken)
        with contextlib.suppress(OSError):  # the run is over
            # A fork may still use what this process does not, or the other way round.
            if len(_forks) > forks:
                taken.unlink()
            else:
                self._spare(taken)

    def shared(self, name: str, content: Any) -> mmap.mmap:
        """What the processes of this host have once; the first that asks for `name` writes `content`.

        A page that one of them writes to is copied.
        """
        _make(self.roots[0])
        lock = os.open(self.roots[0], os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for each in self.roots:
                with contextlib.suppress(FileNotFoundError):
                    return _mapped(each / name, mmap.ACCESS_COPY)
            has_room = _has_room(self.roots[0].parent, memoryview(content).nbytes)
            root = self.roots[0] if has_room else self.roots[-1]
            return _mapped(root / _write(root / f"{name}.new", [content]), mmap.ACCESS_COPY)
        finally:
            os.close(lock)

    def recycle(self, names: Iterable[str]) -> None:
        """Keep the files of blocks that nobody reads any more as spares, or remove them."""
        for name in names:
            for root in self.roots:
                with contextlib.suppress(FileNotFoundError):
                    self._spare(root / name)
                    break

    def _spare(self, file: Path) -> None:
        fits = file.stat().st_size >= SPARE_FROM_BYTES and file.parent != self.roots[-1]
        name = file.name.partition(".")[0]
        if NAME.fullmatch(name) and fits and len(self._spares(file.parent)) < 2 * machine.cores():
            file.rename(file.with_name(name + SPARE))
        else:
            file.unlink()

    def _spares(self, root: Path) -> list[tuple[Path, int]]:
        """Spare files and their sizes; removes what ended processes had taken."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(root) as files:
            for each in files:
                taken = each.name.endswith(TAKEN)
                if taken and not Path("/proc", each.name.split(".")[1]).exists():
                    Path(each.path).unlink(missing_ok=True)
                if each.name.endswith(SPARE):
                    with contextlib.suppress(FileNotFoundError):  # another has just taken it
                        found.append((Path(each.path), each.stat().st_size))
        return found

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            for root in self.roots:
                with contextlib.suppress(FileNotFoundError):
                    (root / name).unlink()
                    break


def _mapped(file: Path, access: int) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=access)


def _has_room(parent: Path, size: int) -> bool:
    about = os.statvfs(parent)
    return about.f_bavail * about.f_frsize - size >= SHARE * about.f_blocks * about.f_frsize


def _make(root: Path) -> None:
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        # Another user who has seen the run's folder in shared memory may have made this one.
        raise PermissionError(f"{root} belongs to another user")


def _write(draft: Path, parts: list[Any], mode: str = "wb") -> str:
    """Write a file, with mode r+b into its memory; returns its name, without the draft's suffix."""
    _make(draft.parent)
    try:
        # Not mapped: a full memory would be a signal that ends the process. A spare may stay longer than its
        # content, which knows its length.
        with draft.open(mode) as file:
            file.writelines(parts)
        draft.rename(draft.with_suffix(""))
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return draft.stem


NamedBlock = tuple[str, dict[str, Any]]
"""Its name and columns."""


class BlockServer(wire.Listener):
    """One per host and run, in the host's agent; the head's in the data service."""

    def __init__(self, address: str, secret: bytes, folder: BlockFolder) -> None:
        self._folder = folder
        super().__init__(address, 0, secret)

    def talk(self, connection: socket.socket) -> None:
        wire.set_timeouts(connection, IDLE_TIMEOUT_S)
        latest: NamedBlock = "", {}
        while True:
            request = wire.receive_message(connection, wire.REQUEST_BYTES)
            latest = self._answer(connection, latest, request)

    def _answer(
        self, connection: socket.socket, latest: NamedBlock, request: dict[str, Any]
    ) -> NamedBlock:
        """Send rows of a block; returns that block, of which the next request often wants more rows."""
        done, take = _checked(request)
        self._folder.remove(done)
        if take is None:
            return "", {}
        block, start, stop = take
        try:
            columns = latest[1] if block == latest[0] else self._folder.columns(block)
        except FileNotFoundError as error:
            wire.send_message(connection, {"error": str(error), "missing": True})
            return "", {}
        _send(connection, block, columns, start, stop)
        return block, columns


def _send(
    connection: socket.socket, block: str, columns: dict[str, Any], start: int, stop: int
) -> None:
    import numpy as np

    text: dict[str, list[str]] = {}
    layout, lists, dense, varying = [], [], [], []
    try:
        for name, column in columns.items():
            rows = column[start:stop]
            if isinstance(rows, Ragged):
                values = rows.values
                lists.append([name, rows.dtype.name, list(rows.shape[2:]), len(values)])
                varying += [rows.offsets, values]
            elif rows.dtype == object:
                text[name] = list(rows)
            else:
                layout.append([name, rows.dtype.name, list(rows.shape[1:])])
                dense.append(np.ascontiguousarray(rows))
    except SchemaError as error:  # invalid row offsets
        wire.send_message(connection, {"error": f"block {block}: {error}", "damaged": True})
        return
    length = min(map(len, columns.values()), default=0)
    header = {"rows": length, "columns": layout, "ragged": lists, "text": text}
    wire.send_message(connection, header, more=bool(dense or varying))
    for part in (*dense, *varying):
        if part.nbytes:
            connection.sendall(memoryview(part.reshape(-1).view("u1")))


def _checked(request: dict[str, Any]) -> tuple[list[str], tuple[str, int, int] | None]:
    done, take = request.get("done", []), request.get("take")
    if isinstance(done, list) and all(_is_name(block) for block in done):
        if take is None:
            return done, None
        whole = isinstance(take, list) and list(map(type, take)) == [str, int, int]
        if whole and _is_name(take[0]) and 0 <= take[1] <= take[2]:
            return done, (take[0], take[1], take[2])
    raise wire.WireError("sent an invalid request")


def _is_name(block: Any) -> bool:
    """Whether it is the name of a block; anything else could lead out of the folder."""
    return isinstance(block, str) and NAME.fullmatch(block) is not None
