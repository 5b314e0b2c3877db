"""Train worker: connections to the block servers of other hosts."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.errors import SchemaError
from stoker.messages import TEXT, BlockSlice, Column, Directory, Schema, Server
from stoker.serve.blocks import wire
from stoker.serve.blocks.batches import BatchBuilder

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 20.0
"""A host that sends nothing for this long is avoided."""
AVOID_S = 30.0
"""How long to avoid it; meanwhile its agent answers through Ray."""


@dataclass
class HostLink:
    """Train worker: client state of one host's block server."""

    server: Server
    idle: list[socket.socket] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    """Blocks that the server may remove."""
    avoided_until: float = 0.0


@dataclass
class Request:
    """Train worker: requested rows that are in flight."""

    hosts: DirectHosts
    link: HostLink
    connection: socket.socket
    part: BlockSlice

    def receive(self, batch: BatchBuilder, at: int) -> int:
        """Receive the rows in place; returns the number of bytes.

        Raises:
            FileNotFoundError: the host does not have the block.
            OSError: they did not arrive.
            SchemaError: they are not the requested ones, so fetching them another way would not help.
        """
        header = wire.receive_message(self.connection)
        if header.get("missing"):
            self.hosts.release(self)
            raise FileNotFoundError(str(header["error"]))
        if header.get("damaged"):
            self.hosts.release(self)
            raise SchemaError(str(header["error"]))
        if "error" in header:
            raise wire.WireError(str(header["error"]))
        rows, size = self.part.stop - self.part.start, 0
        arrays, text = header["columns"], header["text"]
        found = {name: Column(dtype, tuple(shape)) for name, dtype, shape in arrays}
        found |= dict.fromkeys(text, Column(TEXT))
        for name, dtype, shape, _ in header["ragged"]:
            found[name] = Column(dtype, (-1, *shape))
        batch.check(self.part, Schema(found), header["rows"])
        for name, values in text.items():
            if len(values) != rows:
                raise SchemaError(f"received {len(values)} values of column {name!r} for {rows} rows")
            batch.text(name, values, at)
        for name, _, _ in arrays:
            target = batch.target(name, at, rows)
            if target.nbytes:
                wire.receive_into(self.connection, memoryview(target.reshape(-1).view("u1")))
            size += target.nbytes
        for name, _, _, count in header["ragged"]:
            size += self._receive_ragged(batch, name, at, count)
        for name in found:
            batch.wrote(name, rows)
        self.hosts.release(self)
        return size

    def _receive_ragged(self, batch: BatchBuilder, name: str, at: int, values: int) -> int:
        import numpy as np

        offsets = np.empty(self.part.stop - self.part.start + 1, np.int64)
        wire.receive_into(self.connection, offsets.view("u1").data)
        target = batch.ragged(name, at, offsets, values)
        if target.nbytes:
            wire.receive_into(self.connection, memoryview(target.reshape(-1).view("u1")))
        return int(offsets.nbytes + target.nbytes)

    def failed(self, error: OSError) -> None:
        """Give up on this connection; the rows must come another way."""
        self.hosts.fail(self, error)


class DirectHosts:
    """Train worker: connections to the block servers of other hosts."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._name = secrets.token_bytes(wire.NONCE_BYTES)
        self._lock = threading.Lock()
        self._links: dict[str, HostLink] = {}
        self._key = b""

    def update(self, directory: Directory) -> None:
        """Learn the present block servers; one that was started again has another port."""
        self._key = directory.secret
        with self._lock:
            for node, server in directory.servers.items():
                if node not in self._links or self._links[node].server != server:
                    self._links[node] = HostLink(server)

    def knows(self, node: str) -> bool:
        """Whether the host's server is known and answers."""
        link = self._links.get(node)
        return link is not None and not link.avoided_until

    def ask(self, part: BlockSlice) -> Request | None:
        """Request rows; None if they must come another way."""
        link = self._links.get(part.node)
        if link is None or link.avoided_until > time.monotonic():
            return None
        connection = None
        try:
            connection = self._connect(link)
            with self._lock:
                done, link.done = link.done, []
            wire.send_message(connection, {"take": [part.block, part.start, part.stop], "done": done})
        except OSError as error:
            self._avoid(link, error, connection)
            return None
        return Request(self, link, connection, part)

    def done(self, part: BlockSlice) -> None:
        """A block that only this process knows of may go."""
        if (link := self._links.get(part.node)) is not None:
            with self._lock:
                link.done.append(part.block)

    def release(self, request: Request) -> None:
        """The answer has arrived: free the connection."""
        with self._lock:
            request.link.idle.append(request.connection)

    def fail(self, request: Request, error: OSError) -> None:
        """The rows did not arrive."""
        self._avoid(request.link, error, request.connection)

    def _connect(self, link: HostLink) -> socket.socket:
        with self._lock:
            if link.idle:
                return link.idle.pop()
        address = (link.server.address, link.server.port)
        connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
        try:
            wire.greet_server(connection, wire.run_key(self._key), self._name)
            wire.set_timeouts(connection, SILENCE_TIMEOUT_S)
        except OSError:
            connection.close()
            raise
        return connection

    def _avoid(self, link: HostLink, error: OSError, connection: socket.socket | None) -> None:
        """Avoid a failed host for a while."""
        with self._lock:
            first = link.avoided_until == 0
            link.avoided_until = time.monotonic() + AVOID_S
            closing = [*link.idle, *([connection] if connection else [])]
            link.idle.clear()
        for each in closing:
            with contextlib.suppress(OSError):
                each.close()
        if first:
            where = f"{link.server.address}:{link.server.port}"
            reason = error.strerror or str(error)
            self._note(f"block server {where}: {reason}; its blocks come another way")
