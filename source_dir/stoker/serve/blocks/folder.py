"""The blocks that chain workers have made on a host: files that outlive the process that wrote them.

A chain worker writes a block and reports its name; the host's block server, and whoever
else runs on this host, maps it. The service decides when it goes. Removing a file never takes memory from a
reader, and a full memory is an error of the writer alone. What shared memory has no room for lies in the
temporary folder.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stoker.chain.columns import block_columns, block_parts
from stoker.read.host_cache import SHARED_MEMORY

PREFIX = "stoker-blocks-"
NAME = re.compile(r"[0-9a-f]{24}")
SHARE = 0.5
"""Share of a host's shared memory that stays free of blocks: for Ray's object store and others."""


def here(run: str) -> BlockFolder:
    import ray

    return BlockFolder(run, ray.get_runtime_context().get_node_id())


class BlockFolder:
    """The blocks of one run on one host.

    Args:
        run: names the run; nobody else can know it, so nobody prepares a folder of that name.
        node: Ray node; several may share a machine.
    """

    def __init__(self, run: str, node: str) -> None:
        self.node = node
        parents = [Path(tempfile.gettempdir())]
        if SHARED_MEMORY.is_dir():
            parents.insert(0, SHARED_MEMORY)
        self.roots = [parent / f"{PREFIX}{run}-{node[:12]}" for parent in parents]

    def write(self, columns: dict[str, Any]) -> str:
        """Store a block; returns its name.

        Raises:
            OSError: there is no room for it.
        """
        name, parts = secrets.token_hex(12), block_parts(columns)
        for root in self.roots[:-1]:
            if _has_room(root.parent, sum(map(len, parts))):
                with contextlib.suppress(OSError):  # another has just taken it
                    return _write(root, name, parts)
        return _write(self.roots[-1], name, parts)

    def columns(self, name: str) -> dict[str, Any]:
        """A block as NumPy columns: views of its file, which stay valid when that is removed.

        Raises:
            FileNotFoundError: it is not here, or no more.
        """
        for root in self.roots:
            with contextlib.suppress(FileNotFoundError), (root / name).open("rb") as file:
                return block_columns(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        raise FileNotFoundError(f"block {name} is not on this host")

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            for root in self.roots:
                with contextlib.suppress(FileNotFoundError):
                    (root / name).unlink()
                    break


def _has_room(parent: Path, size: int) -> bool:
    about = os.statvfs(parent)
    return about.f_bavail * about.f_frsize - size >= SHARE * about.f_blocks * about.f_frsize


def _write(root: Path, name: str, parts: list[Any]) -> str:
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        # Another user who has seen the run's folder in shared memory may have made this one.
        raise PermissionError(f"{root} belongs to another user")
    draft = root / f"{name}.new"
    try:
        # Not mapped: a full memory would be a signal that ends the process.
        with draft.open("wb") as file:
            file.writelines(parts)
        draft.rename(root / name)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return name
