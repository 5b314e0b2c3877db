"""Train worker: connections to the block servers of other hosts."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.errors import SchemaError
from stoker.messages import TEXT, BlockSlice, Column, Schema, Server
from stoker.serve.blocks import wire
from stoker.serve.blocks.batches import BatchBuilder

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 20.0
"""A host that sends nothing for this long is avoided."""
AVOID_S = 30.0
"""How long to avoid it; meanwhile its blocks come through Ray."""
ASK_AGAIN_S = 5.0
"""Minimum interval between queries for new block servers."""


@dataclass
class HostLink:
    """Train worker: client state of one host's block server."""

    server: Server
    idle: list[socket.socket] = field(default_factory=list)
    uses: Counter[str] = field(default_factory=Counter)
    """Blocks that the server holds for this process, and the number of requests that need them."""
    done: list[str] = field(default_factory=list)
    """Blocks that the server may release."""
    latest: str = ""
    """The last requested block, which the next batch probably needs too."""
    avoided_until: float = 0.0


@dataclass
class Request:
    """Train worker: requested rows that are in flight."""

    hosts: DirectHosts
    link: HostLink
    connection: socket.socket
    block: str
    part: BlockSlice

    def receive(self, batch: BatchBuilder, at: int) -> int:
        """Receive the rows in place; returns the number of bytes.

        Raises:
            OSError: they did not arrive.
            SchemaError: they are not the requested ones, so fetching them through Ray would not help.
        """
        header = wire.receive_message(self.connection)
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
        """Give up on this connection; the rows must come through Ray."""
        self.hosts.fail(self, error)


class DirectHosts:
    """Train worker: connections to the block servers of other hosts."""

    def __init__(
        self, servers: Callable[[], tuple[bytes, dict[str, Server]]], note: Callable[[str], None]
    ) -> None:
        self._servers, self._note = servers, note
        self._name = secrets.token_bytes(wire.NONCE_BYTES)
        self._lock = threading.Lock()
        self._links: dict[str, HostLink] = {}
        self._key = b""
        self._ask_after = 0.0
        self._own_node: str | None = None

    def ask(self, part: BlockSlice) -> Request | None:
        """Request rows; None if they must come through Ray."""
        link = self._link(part.node)
        if link is None:
            return None
        connection, block = None, part.block.hex()
        try:
            connection = self._connect(link)
            with self._lock:
                new = block not in link.uses
                link.uses[block] += 1
                link.latest = block
                done, link.done = [b for b in link.done if b != block], []
            if new:
                link.server.agent.hold.remote(self._name, [part.block])
            wire.send_message(connection, {"take": [block, part.start, part.stop], "done": done})
        except OSError as error:
            self._avoid(link, error, connection)
            return None
        return Request(self, link, connection, block, part)

    def release(self, request: Request) -> None:
        """The rows have arrived: free the connection and release older blocks."""
        link = request.link
        with self._lock:
            link.idle.append(request.connection)
            link.uses[request.block] -= 1
            for block in [b for b, n in link.uses.items() if n <= 0 and b != link.latest]:
                del link.uses[block]
                link.done.append(block)

    def fail(self, request: Request, error: OSError) -> None:
        """The rows did not arrive."""
        self._avoid(request.link, error, request.connection)

    def _link(self, node: str) -> HostLink | None:
        if not node or node == self._node():
            return None
        now = time.monotonic()
        with self._lock:
            link = self._links.get(node)
            # A failed server may have been restarted at another port.
            if (link is None or link.avoided_until) and now >= self._ask_after:
                self._ask_after = now + ASK_AGAIN_S
                ask = True
            else:
                ask = False
        if ask:
            self._key, servers = self._servers()
            with self._lock:
                for name, server in servers.items():
                    known = self._links.get(name)
                    if known is None or known.server != server:
                        self._links[name] = HostLink(server)
                link = self._links.get(node)
        return link if link is not None and link.avoided_until <= now else None

    def _node(self) -> str:
        if self._own_node is None:
            import ray

            self._own_node = str(ray.get_runtime_context().get_node_id())
        return self._own_node

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
        """Avoid a failed host for a while; without connections it releases our blocks."""
        with self._lock:
            first = link.avoided_until == 0
            link.avoided_until = time.monotonic() + AVOID_S
            closing = [*link.idle, *([connection] if connection else [])]
            link.idle.clear()
            link.uses.clear()
            link.done.clear()
        for each in closing:
            with contextlib.suppress(OSError):
                each.close()
        if first:
            where = f"{link.server.address}:{link.server.port}"
            reason = error.strerror or str(error)
            self._note(f"block server {where}: {reason}; its blocks come through Ray's object store")
