"""Train worker, script and service: fetches rows of blocks from the hosts that made them.

A block of this host is mapped. That of another comes over a socket from its block server (`folder.py`), which
sends only the rows, and the kernel writes them into the batch; docs/performance.md has the savings. Where no
socket is to be had, the host's agent answers through Ray. If a host is lost, its blocks are made again, and
the service says where.
"""

from __future__ import annotations

import contextlib
import copy
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from stoker.chain.columns import schema_of
from stoker.config.schema import DataConfig
from stoker.errors import DataError, Failure, SchemaError
from stoker.protocol import TEXT, BlockSlice, Column, Directory, Schema, Server
from stoker.serve.blocks import wire
from stoker.serve.blocks.batches import BatchBuilder, BufferPool, refuse_other_block
from stoker.serve.blocks.folder import BlockFolder
from stoker.serve.blocks.packing import PAGE, PAGES, SCHEMA, unpack

KEPT_BLOCKS = 8
"""Number of mapped blocks of this host to keep, because adjacent batches share blocks."""
MAPPED_FROM_BYTES = 2**20
"""A process may have 65,530 mappings, and a script may keep all its batches."""
ASK_AGAIN_S = 5.0
"""Minimum interval between queries for new block servers."""
MOST_DONE = 1000
"""Number of blocks that one request may name as done, so that it is never too long."""
AGENT_S, SERVICE_S = 60.0, 60.0
AGAIN_S = 0.5
CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 20.0
"""A host that sends nothing for this long is avoided."""
AVOID_S = 30.0
"""How long to avoid it; meanwhile its agent answers through Ray."""

Value = TypeVar("Value")
Moved = Callable[[BlockSlice, bool], BlockSlice]
"""Where a block is now, after some seconds at most; DataError if it is lost. The flag says that its host does
not have it."""


@dataclass
class HostLink:
    server: Server
    idle: list[socket.socket] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    avoided_until: float = 0.0


@dataclass
class RowRequest:
    hosts: DirectHosts
    link: HostLink
    connection: socket.socket
    part: BlockSlice
    done: list[str]
    reused: bool
    """Whether the connection was idle before, and so may have ended without anybody's fault."""

    def receive(self, batch: BatchBuilder, at: int) -> int | None:
        """The number of bytes, once the rows are in place; None if they must come another way.

        Raises:
            FileNotFoundError: the host does not have the block.
            SchemaError: they are not the requested ones, so fetching them another way would not help.
        """
        try:
            header = wire.receive_message(self.connection)
            refused = header.get("missing") or header.get("damaged")
            if "error" in header and not refused:
                raise wire.WireError(str(header["error"]))
            size = 0 if refused else self._take(header, batch, at)
        except OSError as error:
            again = self.again(error)
            return again.receive(batch, at) if again is not None else None
        with self.hosts.lock:
            self.link.idle.append(self.connection)
            if self.link.avoided_until < time.monotonic():
                self.link.avoided_until = 0.0
        if refused:
            raise (FileNotFoundError if header.get("missing") else SchemaError)(
                str(header["error"])
            )
        return size

    def again(self, error: OSError) -> RowRequest | None:
        """This request over a new connection, if it failed because an idle one had ended.

        Its host may have got it before: rows are only read, and a block that has gone stays gone.
        """
        self.connection.close()
        if self.reused and isinstance(error, wire.ENDED):
            return self.hosts.send(self.link, self.part, self.done)
        self.hosts.avoid(self.link, error, self.done)
        return None

    def _take(self, header: dict[str, Any], batch: BatchBuilder, at: int) -> int:
        import numpy as np

        rows, size = self.part.stop - self.part.start, 0
        arrays, text = header["columns"], header["text"]
        found = {name: Column(dtype, tuple(shape)) for name, dtype, shape in arrays}
        found |= dict.fromkeys(text, Column(TEXT))
        found |= {name: Column(dtype, (-1, *shape)) for name, dtype, shape, _ in header["ragged"]}
        refuse_other_block(self.part, batch.schema, Schema(found), header["rows"])
        for name, values in text.items():
            if len(values) != rows:
                raise SchemaError(
                    f"received {len(values)} values of column {name!r} for {rows} rows"
                )
            batch.text(name, values, at)
        for name, _, _ in arrays:
            size += self._fill(batch.target(name, at, rows))
        for name, _, _, count in header["ragged"]:
            offsets = np.empty(rows + 1, np.int64)
            size += self._fill(offsets)
            size += self._fill(batch.ragged(name, at, offsets, count))
        for name in found:
            batch.wrote(name, rows)
        return size

    def _fill(self, target: Any) -> int:
        if target.nbytes:
            wire.receive_into(self.connection, memoryview(target.reshape(-1).view("u1")))
        return int(target.nbytes)


class DirectHosts:
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.lock = threading.Lock()
        self._links: dict[str, HostLink] = {}
        self._key = b""

    def update(self, directory: Directory) -> None:
        """Learn the present block servers; one that was started again has another port."""
        self._key = directory.secret
        with self.lock:
            for node, server in directory.servers.items():
                before = self._links.get(node)
                if before is None or before.server != server:
                    self._links[node] = HostLink(server, done=before.done if before else [])

    def knows(self, node: str) -> bool:
        link = self._links.get(node)
        return link is not None and not link.avoided_until

    def ask(self, part: BlockSlice) -> RowRequest | None:
        """Request rows; None if they must come another way."""
        link = self._links.get(part.node)
        if link is None or link.avoided_until > time.monotonic():
            return None
        with self.lock:
            idle = link.idle.pop() if link.idle else None
        return self.send(link, part, self.take_done(part.node), idle)

    def send(
        self, link: HostLink, part: BlockSlice, done: list[str], idle: socket.socket | None = None
    ) -> RowRequest | None:
        try:
            connection = idle or self._connect(link)
        except OSError as error:
            self.avoid(link, error, done)
            return None
        request = RowRequest(self, link, connection, part, done, reused=idle is not None)
        try:
            wire.send_message(
                connection, {"take": [part.block, part.start, part.stop], "done": done}
            )
        except OSError as error:
            return request.again(error)
        return request

    def done(self, node: str, blocks: list[str]) -> None:
        """The next request to their host names them."""
        if (link := self._links.get(node)) is not None:
            with self.lock:
                link.done += blocks

    def take_done(self, node: str) -> list[str]:
        if (link := self._links.get(node)) is None:
            return []
        with self.lock:
            done, link.done = link.done[:MOST_DONE], link.done[MOST_DONE:]
        return done

    def _connect(self, link: HostLink) -> socket.socket:
        address = (link.server.address, link.server.port)
        connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
        try:
            wire.greet_server(connection, wire.run_key(self._key))
            wire.set_timeouts(connection, SILENCE_TIMEOUT_S)
        except OSError:
            connection.close()
            raise
        return connection

    def avoid(self, link: HostLink, error: OSError, done: list[str]) -> None:
        """Avoid a host for a while, because a request failed; a later one names the blocks that are done."""
        with self.lock:
            link.done += done
            first = link.avoided_until == 0
            link.avoided_until = time.monotonic() + AVOID_S
            closing, link.idle = link.idle, []
        for each in closing:
            with contextlib.suppress(OSError):
                each.close()
        if first:
            where = f"{link.server.address}:{link.server.port}"
            reason = error.strerror or str(error)
            self._note(f"block server {where}: {reason}; its blocks come another way")


@dataclass
class Fetched:
    columns: dict[str, Any]
    arrived: float
    """`time.perf_counter()` when the last byte arrived; the rest was slicing and copying."""


class Transport:
    """One per process, used by the threads of its feed.

    Without `direct`, agents of other hosts answer through Ray, not sockets. `note` tells of avoided hosts.
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
        self._timeout_s, self._timeout_key, self._direct = timeout_s, "data.stall_timeout_s", direct
        self._lock = threading.Lock()
        self._known = Directory("", b"", {})
        self._ask_after = 0.0
        self._own: dict[str, dict[str, Any]] = {}
        self.hosts = DirectHosts(note)
        self.bytes_by: Counter[str] = Counter()
        """Bytes received "direct", through "ray", and of this host's "own" blocks."""

    def for_pass(self, timeout_s: float, key: str) -> Transport:
        """One over the same connections, whose memory goes with it; what the user calls its deadline."""
        self.folder()  # so that it knows the run
        own = copy.copy(self)
        own.buffers, own._own = BufferPool(self.buffers.pinned), {}
        own._timeout_s, own._timeout_key = timeout_s, key
        return own

    def fetch(self, parts: Sequence[BlockSlice], schema: Schema) -> Fetched:
        batch = BatchBuilder(self.buffers, sum(part.stop - part.start for part in parts), schema)
        # Send requests to all hosts before reading from the first.
        asked = [self._ask(part) for part in parts]
        at, left = 0, []
        for part, request in zip(parts, asked, strict=True):
            try:
                if not self._receive(request, batch, at):
                    left.append((part, at, False))
            except FileNotFoundError:
                left.append((part, at, True))
            at += part.stop - part.start
        arrived = time.perf_counter()
        for part, at, missing in left:
            if part.node != self._node:
                arrived = 0.0
            self._insist(part, partial(self._bring, batch=batch, at=at), missing)
        return Fetched(batch.finish(), arrived or time.perf_counter())

    def objects(self, block: BlockSlice, alone: bool = True) -> tuple[list[Any], float]:
        """What was packed into a block, and when its last byte arrived; raises as `fetch`.

        If the caller is `alone`, the block's only user, the large buffers of one of this host are not copied,
        unless they must lie in pinned memory.
        """
        size = block.of * PAGE
        if (
            alone
            and block.node == self._node
            and size >= MAPPED_FROM_BYTES
            and not self.buffers.pinned
        ):
            with contextlib.suppress(OSError):  # `fetch` asks where it is
                columns = self.folder().take(block.block)
                refuse_other_block(
                    block, SCHEMA, schema_of(columns), min(map(len, columns.values()))
                )
                self.bytes_by["own"] += size
                return unpack(columns[PAGES], apart=True), time.perf_counter()
        fetched = self.fetch([block], SCHEMA)
        return unpack(fetched.columns[PAGES], apart=True), fetched.arrived

    def rows(self, part: BlockSlice) -> tuple[dict[str, Any], int, int, int]:
        """Columns with the rows of a part, the first of them, the one after the last, the block's length."""
        return self._insist(part, self._rows)

    def drop(self, part: BlockSlice) -> None:
        """Remove a block that only this process knows of."""
        if part.node == self._node:
            self._own.pop(part.block, None)
            self.folder().remove([part.block])
        else:
            self.hosts.done(part.node, [part.block])

    def finish_pass(self) -> None:
        with self._lock:
            self._own.clear()

    def folder(self) -> BlockFolder:
        if not self._known.run:
            self._known = self._directory()
            self.hosts.update(self._known)
        return BlockFolder(self._known.run, self._node)

    def _ask(self, part: BlockSlice) -> RowRequest | None:
        if not self._direct or part.node in ("", self._node):
            return None
        if not self.hosts.knows(part.node):
            self._learn()
        return self.hosts.ask(part)

    def _receive(self, request: RowRequest | None, batch: BatchBuilder, at: int) -> bool:
        """Whether the rows came over a socket."""
        size = request.receive(batch, at) if request is not None else None
        self.bytes_by["direct"] += size or 0
        return size is not None

    def _learn(self) -> None:
        with self._lock:
            due = time.monotonic() >= self._ask_after
            if due:
                self._ask_after = time.monotonic() + ASK_AGAIN_S
        if due:
            self._known = self._directory()
            self.hosts.update(self._known)

    def _insist(
        self, part: BlockSlice, get: Callable[[BlockSlice], Value], missing: bool = False
    ) -> Value:
        deadline = time.monotonic() + self._timeout_s
        if missing:
            part = self._where(part, True, deadline)
        while True:
            try:
                return get(part)
            except FileNotFoundError:
                part = self._where(part, True, deadline)
            except OSError as error:
                part = self._where(part, False, deadline, error)

    def _bring(self, part: BlockSlice, batch: BatchBuilder, at: int) -> None:
        """The rows of a part that did not come over a socket at first."""
        if self._receive(self._ask(part), batch, at):
            return
        columns, start, stop, length = self._rows(part)
        refuse_other_block(part, batch.schema, schema_of(columns), length)
        kind = "own" if part.node == self._node else "ray"
        self.bytes_by[kind] += batch.take(part._replace(start=start, stop=stop), columns, at)

    def _rows(self, part: BlockSlice) -> tuple[dict[str, Any], int, int, int]:
        """As `rows`, once: FileNotFoundError if its host does not have the block, else another OSError."""
        import ray

        if not part.node:
            raise OSError("being made again")
        if part.node == self._node:
            columns = self._mapped(part.block)
            return columns, part.start, part.stop, min(map(len, columns.values()), default=0)
        self._learn()
        if (server := self._known.servers.get(part.node)) is None:
            raise OSError("its host serves no blocks")
        done = self.hosts.take_done(part.node)
        try:
            call = server.agent.rows.remote(part.block, part.start, part.stop, done)
            columns, length = ray.get(call, timeout=AGENT_S)
        except (FileNotFoundError, SchemaError):
            raise
        except ray.exceptions.RayError as error:
            self.hosts.done(part.node, done)
            self._ask_after = 0.0  # it may have been started again
            raise OSError(str(Failure.of(error))) from error
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

    def _where(
        self, part: BlockSlice, missing: bool, deadline: float, cause: BaseException | None = None
    ) -> BlockSlice:
        """Where a block is now; DataError if it does not come."""
        if time.monotonic() > deadline:
            why = f": {cause}" if cause else ""
            raise DataError(
                f"a block did not come within {self._timeout_s:.0f} s ({self._timeout_key}){why}"
            )
        began = time.monotonic()
        found = self._moved(part, missing)
        if found[:1] == part[:1] and found.node == part.node:
            time.sleep(max(0.0, AGAIN_S - (time.monotonic() - began)))
        return found


def open_transport(service: Any, data: DataConfig, device: Any) -> Transport:
    from stoker.events.kinds import Note

    return block_transport(
        service,
        pinned=device.type == "cuda",
        timeout_s=data.stall_timeout_s,
        direct=data.transport == "direct",
        note=lambda text: service.log.remote(Note(text=text)),
    )


def block_transport(service: Any, **options: Any) -> Transport:
    import ray

    def from_service(method: str, *arguments: Any) -> Any:
        return ray.get(getattr(service, method).remote(*arguments), timeout=SERVICE_S)

    node = ray.get_runtime_context().get_node_id()
    servers, moved = partial(from_service, "servers"), partial(from_service, "moved")
    return Transport(servers, moved, node, **options)
