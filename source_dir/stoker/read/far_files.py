"""Chain worker: whole files of an object store, each requested before it is needed.

An object of 100 kB takes 30 ms to come and 3 to arrive. Read one after the other, a process would get 3 MB/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from itertools import islice
from typing import Any

from stoker.protocol import BadRecord
from stoker.read.sources import read_again
from stoker.storage.filesystems import filesystem_of
from stoker.storage.s3 import Objects, objects_of

READS = 32
"""Requests in flight, and so connections, of a chain worker; 32 bring 85 MB/s of such objects."""
AHEAD_BYTES = 32 * 2**20
"""About so much is held ready: of larger files, fewer are in flight."""


class FarFiles:
    """The files below a folder. One thread calls; of what it does not ask for in turn, nothing is kept."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._expected: dict[str, Future[bytes | BadRecord] | None] = {}
        """Paths in the order in which they will be read; the first ones are being fetched."""
        self._bytes = AHEAD_BYTES // 4
        """Size of the latest file."""

    def __reduce__(self) -> Any:
        return FarFiles, (self.folder,)

    def expect(self, paths: list[str]) -> None:
        for path in paths:
            self._expected.setdefault(path, None)
        self._ask()

    def read(self, paths: list[str]) -> Iterator[bytes | BadRecord]:
        if paths and paths[0] not in self._expected:
            self._drop_before(None)
        self.expect(paths)
        for path in paths:
            yield self._take(path)

    def _take(self, path: str) -> bytes | BadRecord:
        self._drop_before(path)
        coming = self._expected.pop(path, None) or self._submit(path)
        self._ask()
        content = coming.result()
        if not isinstance(content, BadRecord):
            self._bytes = max(len(content), 1)
        return content

    def _drop_before(self, path: str | None) -> None:
        while self._expected and (first := next(iter(self._expected))) != path:
            if (coming := self._expected.pop(first)) is not None:
                coming.cancel()

    def _ask(self) -> None:
        for path in islice(self._expected, max(2, min(READS, AHEAD_BYTES // self._bytes))):
            if self._expected[path] is None:
                self._expected[path] = self._submit(path)

    def _submit(self, path: str) -> Future[bytes | BadRecord]:
        return self._threads.submit(read_again, path, partial(self._content, path), far=True)

    def _content(self, path: str) -> bytes:
        whole = f"{self._root}/{path}"
        content = self._objects.read(whole.partition("/")[2]) if self._objects else None
        return content_of(self._filesystem, whole) if content is None else content

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(READS, thread_name_prefix="read-ahead")

    @cached_property
    def _filesystem(self) -> Any:
        return filesystem_of(self.folder)[0]

    @cached_property
    def _root(self) -> str:
        return filesystem_of(self.folder)[1]

    @cached_property
    def _objects(self) -> Objects | None:
        return objects_of(self._root.partition("/")[0]) if self.folder.startswith("s3://") else None


def content_of(filesystem: Any, path: str) -> bytes:
    with filesystem.open_input_file(path) as file:
        content: bytes = file.readall()
    return content
