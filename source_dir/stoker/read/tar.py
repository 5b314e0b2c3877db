"""Chain worker and head: a tar reader that finds damage where `tarfile` alone stops silently.

`tarfile` parses headers: ustar, GNU and PAX. An archive must end with two zero blocks, followed only by zeros.
Names beyond a header's 100 characters and the contents of members have no checksum in a tar.
"""

from __future__ import annotations

import io
import tarfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from stoker.errors import UsageError

BLOCK = 512
CHUNK_BYTES = 4 * 2**20
"""Size of one read: every read of a stream on S3 is a request."""
CHUNKS_AHEAD = 2
"""Requests in flight while one chunk is used, to hide latency behind transfer."""
CHUNKS_PREPARED = 16
"""Chunks to fetch of a shard while the one before it is still in use; bounds the memory that this takes."""
MOST_ZEROS = 64 * 1024
"""Maximum number of zeros at the end of an archive. Tools pad to 10 KiB; a partly written file has more."""


class Member(NamedTuple):
    name: str
    content: bytes


def members(
    file: Any, path: str, contents: Callable[[str], bool] = lambda name: True
) -> Iterator[Member]:
    tar = _Stream(file, path)
    for header in _headers(tar):
        name = header.name
        if header.issparse():
            raise tar.refused(name, "a sparse file")
        if header.isreg():
            raw = name.encode(errors="surrogateescape")
            if raw.decode(errors="replace") != name:
                raise UsageError(
                    f"{path}: the name {raw!r} is not UTF-8; write the shard with other names"
                )
            if contents(name):
                yield Member(name, tar.content(header.size))
            else:
                tar.skip(header.size)
                yield Member(name, b"")
        elif header.type != tarfile.DIRTYPE:
            link = header.islnk() or header.issym()
            raise tar.refused(name, "a link" if link else f"of the type {header.type!r}")
    tar.end()


def _headers(tar: _Stream) -> Iterator[tarfile.TarInfo]:
    """The headers before the first zero block; `TarFile.next` would also stop at a damaged one."""
    try:
        archive = tarfile.TarFile(fileobj=tar, encoding="utf-8")  # type: ignore[arg-type]
        header = archive.next()
        while header is not None:
            yield header
            tar.start = tar.at
            header = tarfile.TarInfo.fromtarfile(archive)
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
        return
    except (tarfile.TarError, ValueError, IndexError) as error:
        raise tar.damaged(tar.start, str(error)) from None


class _Stream:
    """A file that is read from its beginning to its end, of which no byte may be missing."""

    def __init__(self, file: Any, path: str) -> None:
        self.file, self.path = file, path
        self.start = self.at = 0
        """Offsets of the last header and of the next byte to read."""

    def tell(self) -> int:
        return self.at

    def read(self, size: int) -> bytes:
        if size < 0:
            raise self.damaged(self.start, f"its header gives a size of {size} bytes")
        content: bytes = self.file.read(size)
        self.at += len(content)
        if len(content) < size:
            raise self.damaged(self.start, f"cut short after {self.at} bytes")
        return content

    def content(self, size: int) -> bytes:
        content = self.read(size)
        self.read(-size % BLOCK)
        return content

    def skip(self, size: int) -> None:
        """Skip the contents of a member; the next header proves that they were present."""
        if size < 0:
            self.read(size)
        self.at += size + -size % BLOCK
        self.file.seek(self.at)

    def end(self) -> None:
        zeros = BLOCK
        while chunk := self.file.read(CHUNK_BYTES):
            if rest := chunk.lstrip(b"\0"):
                at = self.start + zeros + len(chunk) - len(rest)
                raise UsageError(
                    f"{self.path}: the archive ends at byte {self.start}, but more follows at byte {at}:"
                    " damaged, or shards that were joined by cat; keep them apart, or join them with"
                    " tar --concatenate"
                )
            zeros += len(chunk)
        if zeros < 2 * BLOCK:
            raise self.damaged(self.start, "the end of the archive is missing")
        if zeros > MOST_ZEROS:
            raise self.damaged(
                self.start, f"{zeros} zeros at its end, as in a file that was partly written"
            )

    def damaged(self, at: int, why: str) -> UsageError:
        return UsageError(
            f"{self.path}: damaged tar shard, byte {at}: {why}; copy or write it again"
        )

    def refused(self, name: str, kind: str) -> UsageError:
        return UsageError(
            f"{self.path}: {name} (byte {self.start}) is {kind}; a shard must hold regular files only:"
            " write it again as one archive with tar --dereference --hard-dereference"
        )


def streamed(file: Any) -> io.BufferedReader:
    return io.BufferedReader(file, CHUNK_BYTES)


class Ahead(io.RawIOBase):
    """Fetches the next chunks of a file in threads, as the kernel does for local files."""

    def __init__(self, file: Any, chunks: int = CHUNKS_AHEAD) -> None:
        self._file, self._size = file, file.size()
        self._threads = ThreadPoolExecutor(CHUNKS_AHEAD, thread_name_prefix="read-ahead")
        self._asked = 0
        self._coming: deque[Future[memoryview]] = deque()
        self._chunk = memoryview(b"")
        self._ask(chunks)

    def readable(self) -> bool:
        return True

    def _ask(self, chunks: int = CHUNKS_AHEAD) -> None:
        while self._asked < self._size and len(self._coming) < chunks:
            self._coming.append(self._threads.submit(self._read, self._asked))
            self._asked += CHUNK_BYTES

    def _read(self, at: int) -> memoryview:
        wanted = min(CHUNK_BYTES, self._size - at)
        chunk = self._file.read_at(wanted, at)
        if len(chunk) != wanted:
            raise OSError(f"{len(chunk)} of {wanted} bytes came from byte {at} on")
        return memoryview(chunk)

    def readinto(self, buffer: Any) -> int:
        if not self._chunk and self._coming:
            # A failed chunk stays at the front, so that a second read raises the same error.
            self._chunk = self._coming[0].result()
            self._coming.popleft()
            self._ask()
        count = min(len(buffer), len(self._chunk))
        buffer[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        return count

    def close(self) -> None:
        """Wait for what is being read: nobody may close the file meanwhile."""
        self._threads.shutdown(cancel_futures=True)
        self._file.close()
        super().close()
