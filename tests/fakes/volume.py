"""A folder that refuses what Unity Catalog volumes refuse: appending, random writes, links, modes and times.

As Databricks' documentation of volumes says ("Work with files", limitations), a file is written from its
beginning to its end. What else volumes refuse is not documented; renaming a folder is refused here, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Volume:
    mount: Path
    below: Path
    """The same files without the limits."""
    log: Path

    def refused(self) -> list[str]:
        return self.log.read_text().splitlines()


@contextlib.contextmanager
def volume(folder: Path, libraries: Path) -> Iterator[Volume]:
    """A mounted volume.

    Args:
        folder: for the mount, the files and the log.
        libraries: has fusepy.
    """
    made = Volume(folder / "Volumes", folder / "files", folder / "refused.log")
    for path in (made.mount, made.below):
        path.mkdir(parents=True)
    made.log.touch()
    command = [sys.executable, __file__, str(made.below), str(made.mount), str(made.log)]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(libraries)})
    try:
        deadline = time.monotonic() + 60
        while not made.mount.is_mount():
            assert server.poll() is None and time.monotonic() < deadline, (
                "the volume was not mounted"
            )
            time.sleep(0.1)
        yield made
    finally:
        subprocess.run(["fusermount", "-uz", str(made.mount)], check=False)
        server.wait(60)


def serve(below: str, mount: str, log: str) -> None:
    from fuse import FUSE, FuseOSError, Operations

    def at(path: str) -> Path:
        return Path(below + path)

    class WholeFiles(Operations):
        def refuse(self, what: str, path: str, code: int = errno.EOPNOTSUPP) -> NoReturn:
            with Path(log).open("a") as file:
                file.write(f"{what} {path}\n")
            raise FuseOSError(code)

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = at(path).lstat()
            names = ("atime", "ctime", "gid", "mode", "mtime", "nlink", "size", "uid")
            return {f"st_{name}": getattr(found, f"st_{name}") for name in names}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *(child.name for child in at(path).iterdir())]

        def mkdir(self, path: str, mode: int) -> None:
            at(path).mkdir()

        def rmdir(self, path: str) -> None:
            at(path).rmdir()

        def unlink(self, path: str) -> None:
            at(path).unlink()

        def rename(self, old: str, new: str) -> None:
            if at(old).is_dir():
                self.refuse("rename a folder", old)
            at(old).rename(at(new))

        def symlink(self, target: str, source: str) -> None:
            self.refuse("link", target)

        link = symlink

        def chmod(self, path: str, mode: int) -> None:
            self.refuse("mode", path, errno.EPERM)

        def chown(self, path: str, uid: int, gid: int) -> None:
            self.refuse("owner", path, errno.EPERM)

        def utimens(self, path: str, times: Any = None) -> None:
            self.refuse("times", path, errno.EPERM)

        def open(self, path: str, flags: int) -> int:
            if flags & os.O_APPEND:
                self.refuse("append", path)
            return os.open(at(path), flags)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            if offset != os.fstat(fh).st_size:
                self.refuse("random write", path)
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            if length:
                self.refuse("truncate", path)
            os.truncate(at(path), 0)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

        def fsync(self, path: str, datasync: bool, fh: int) -> None:
            pass

    FUSE(WholeFiles(), mount, foreground=True, nothreads=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
