"""Train worker, script and service: fetches rows of blocks from the hosts that made them.

A block of this host is mapped. That of another comes over a socket from its block server (`server.py`), which
sends only the rows, and the kernel writes them into the batch; docs/performance.md has the savings. Where no
socket is to be had, the host's agent answers through Ray. If a host is lost, its blocks are made again, and
the service says where.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.chain.columns import schema_of
from stoker.config.schema import DataConfig
from stoker.errors import DataError, SchemaError, where_raised
from stoker.messages import BlockSlice, Directory, Schema
from stoker.serve.blocks.batches import BatchBuilder, refuse_other_block
from stoker.serve.blocks.buffers import BufferPool
from stoker.serve.blocks.connections import DirectHosts, Request
from stoker.serve.blocks.folder import BlockFolder

KEPT_BLOCKS = 8
"""Number of mapped blocks of this host to keep, because adjacent batches share blocks."""
ASK_AGAIN_S = 5.0
"""Minimum interval between queries for new block servers."""
AGENT_S, SERVICE_S = 60.0, 60.0
AGAIN_S = 0.5

Moved = Callable[[BlockSlice, bool], BlockSlice | str]
"""Where a block is now, after some seconds at most, or why it will not come. The flag tells that its host
does not have it."""


@dataclass
class Fetched:
    """The rows of a step as columns."""

    columns: dict[str, Any]
    """NumPy arrays, and lists of strings."""
    arrived: float
    """`time.perf_counter()` when the last byte arrived; the rest was slicing and copying."""


class Transport:
    """One per process, used by the threads of its feed.

    Args:
        directory: asks the service for the block servers.
        moved: asks the service where a block is that could not be had.
        node: Ray node of this process.
        pinned: batches are copied to a GPU.
        timeout_s: deadline for a block.
        direct: whether to use sockets; otherwise the agents of other hosts answer through Ray.
        note: called once when a host is avoided.
    """

    def __init__(
        self,
        directory: Callable[[], Directory],
        moved: Moved,
        node: str,
        pinned: bool,
        timeout_s: float,
        direct: bool = True,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.buffers = BufferPool(pinned)
        self._directory, self._moved, self._node = directory, moved, node
        self._timeout_s, self._direct = timeout_s, direct
        self._lock = threading.Lock()
        self._known = Directory("", b"", {})
        self._ask_after = 0.0
        self._own: dict[str, dict[str, Any]] = {}
        self.hosts = DirectHosts(note)
        self.bytes_by: Counter[str] = Counter()
        """Bytes received "direct", through "ray", and of this host's "own" blocks."""

    def fetch(self, parts: Sequence[BlockSlice], schema: Schema) -> Fetched:
        """The rows of all parts, in order.

        Raises:
            DataError: a block is not available.
            SchemaError: a block does not match its report or the columns of its split.
        """
        batch = BatchBuilder(self.buffers, sum(part.stop - part.start for part in parts), schema)
        starts = [sum(p.stop - p.start for p in parts[:i]) for i in range(len(parts))]
        # Send requests to all hosts before reading from the first.
        asked = [self._ask(part) for part in parts]
        left = []
        for part, at, request in zip(parts, starts, asked, strict=True):
            missing = False
            if request is not None:
                try:
                    self._receive(request, batch, at)
                    continue
                except FileNotFoundError:
                    missing = True
                except OSError as error:
                    request.failed(error)
            left.append((part, at, missing))
        arrived = time.perf_counter()
        for part, at, missing in left:
            if part.node != self._node:
                arrived = 0.0
            self._bring(part, batch, at, missing)
        return Fetched(batch.finish(), arrived or time.perf_counter())

    def rows(self, part: BlockSlice) -> tuple[dict[str, Any], int, int, int]:
        """Columns with the rows of a part, the first of them, the one after the last, the block's length.

        Raises:
            DataError: the block is not available.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._rows(part)
            except FileNotFoundError:
                part = self._where(part, True, deadline)
            except OSError as error:
                part = self._where(part, False, deadline, error)

    def drop(self, part: BlockSlice) -> None:
        """Remove a block that only this process knows of."""
        if part.node == self._node:
            self._own.pop(part.block, None)
            self.folder().remove([part.block])
        else:
            self.hosts.done(part)

    def finish_pass(self) -> None:
        """Release the blocks of a finished pass."""
        with self._lock:
            self._own.clear()

    def _ask(self, part: BlockSlice) -> Request | None:
        if not self._direct or part.node in ("", self._node):
            return None
        if not self.hosts.knows(part.node):
            self._learn()
        return self.hosts.ask(part)

    def _learn(self) -> None:
        """Ask for the block servers, but not all the time."""
        with self._lock:
            due = time.monotonic() >= self._ask_after
            if due:
                self._ask_after = time.monotonic() + ASK_AGAIN_S
        if due:
            self._known = self._directory()
            self.hosts.update(self._known)

    def _receive(self, request: Request, batch: BatchBuilder, at: int) -> None:
        self.bytes_by["direct"] += request.receive(batch, at)

    def _bring(self, part: BlockSlice, batch: BatchBuilder, at: int, missing: bool) -> None:
        """The rows of a part that did not come over a socket."""
        deadline = time.monotonic() + self._timeout_s
        if missing:
            part = self._where(part, True, deadline)
        while True:
            try:
                if (request := self._ask(part)) is not None:
                    try:
                        self._receive(request, batch, at)
                        return
                    except FileNotFoundError:
                        raise
                    except OSError as error:
                        request.failed(error)
                columns, start, stop, length = self._rows(part)
                refuse_other_block(part, batch.schema, schema_of(columns), length)
                own = part._replace(start=start, stop=stop, of=min(map(len, columns.values()), default=0))
                kind = "own" if part.node == self._node else "ray"
                self.bytes_by[kind] += batch.take(own, columns, at)
                return
            except FileNotFoundError:
                part = self._where(part, True, deadline)
            except OSError as error:
                part = self._where(part, False, deadline, error)

    def _rows(self, part: BlockSlice) -> tuple[dict[str, Any], int, int, int]:
        """As `rows`, once.

        Raises:
            FileNotFoundError: its host does not have the block.
            OSError: its host is not to be had.
        """
        import ray

        if not part.node:
            raise OSError("being made again")
        if part.node == self._node:
            columns = self._mapped(part.block)
            return columns, part.start, part.stop, min(map(len, columns.values()), default=0)
        self._learn()
        if (server := self._known.servers.get(part.node)) is None:
            raise OSError("its host serves no blocks")
        try:
            call = server.agent.rows.remote(part.block, part.start, part.stop)
            columns, length = ray.get(call, timeout=AGENT_S)
        except (FileNotFoundError, SchemaError):
            raise
        except ray.exceptions.RayError as error:
            self._ask_after = 0.0  # it may have been started again
            raise OSError(where_raised(error)) from error
        return columns, 0, part.stop - part.start, length

    def _mapped(self, name: str) -> dict[str, Any]:
        with self._lock:
            columns = self._own.pop(name, None)
        columns = self.folder().columns(name) if columns is None else columns
        with self._lock:
            self._own[name] = columns
            for oldest in list(self._own)[:-KEPT_BLOCKS]:
                del self._own[oldest]
        return columns

    def folder(self) -> BlockFolder:
        if not self._known.run:
            self._known = self._directory()
            self.hosts.update(self._known)
        return BlockFolder(self._known.run, self._node)

    def _where(
        self, part: BlockSlice, missing: bool, deadline: float, cause: BaseException | None = None
    ) -> BlockSlice:
        """Where a block is now.

        Raises:
            DataError: it does not come.
        """
        if time.monotonic() > deadline:
            why = f": {cause}" if cause else ""
            raise DataError(
                f"a block did not come within {self._timeout_s:.0f} s (data.stall_timeout_s){why}"
            )
        began = time.monotonic()
        found = self._moved(part, missing)
        if isinstance(found, str):
            raise DataError(found)
        if found[:1] == part[:1] and found.node == part.node:
            time.sleep(max(0.0, AGAIN_S - (time.monotonic() - began)))
        return found


def open_transport(service: Any, data: DataConfig, device: Any) -> Transport:
    """Open the transport of a train worker for all its passes."""
    return connect(
        service,
        pinned=device.type == "cuda",
        timeout_s=data.stall_timeout_s,
        direct=data.transport == "direct",
        note=lambda text: service.log.remote("note", {"text": text}),
    )


def connect(service: Any, **options: Any) -> Transport:
    """The transport of a process that gets its blocks by the actor `service`."""
    import ray

    def directory() -> Directory:
        answer: Directory = ray.get(service.servers.remote(), timeout=SERVICE_S)
        return answer

    def moved(part: BlockSlice, missing: bool) -> BlockSlice | str:
        answer: BlockSlice | str = ray.get(service.moved.remote(part, missing), timeout=SERVICE_S)
        return answer

    return Transport(directory, moved, ray.get_runtime_context().get_node_id(), **options)
