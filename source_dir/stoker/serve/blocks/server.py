"""CPU host: sends rows of this host's blocks to train workers, directly from shared memory."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from typing import Any

from stoker.chain.columns import Ragged
from stoker.errors import SchemaError
from stoker.serve.blocks import wire

IDLE_TIMEOUT_S = 3600.0
"""A connection idle for this long is closed; a live train worker reconnects."""
MOST_GREETINGS = 128
"""Handshakes in progress at the same time; further connections wait until one of them ends."""
BLOCK_TIMEOUT_S = 15.0
"""How long to wait for a block: a request may arrive before Ray delivers its reference."""


class BlockServer:
    """CPU host: one per host and run, in the host's agent; one thread per connection."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._key = wire.run_key(secret)
        self._changed = threading.Condition()
        self._blocks: dict[tuple[bytes, str], dict[str, Any]] = {}
        """Columns by (train worker, block): views of shared memory, which pin the block there."""
        self._connections: Counter[bytes] = Counter()
        self._greetings = threading.Semaphore(MOST_GREETINGS)
        self._socket = socket.create_server((address, 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="block-server", daemon=True).start()

    def hold(self, worker: bytes, block: str, columns: dict[str, Any]) -> None:
        """CPU host: serve a block to a train worker until the worker releases it."""
        with self._changed:
            self._blocks[worker, block] = columns
            self._changed.notify_all()

    def held(self) -> int:
        """CPU host: number of held blocks."""
        with self._changed:
            return len(self._blocks)

    def close(self) -> None:
        """CPU host: stop accepting connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            self._greetings.acquire()
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="blocks", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                worker = wire.greet_client(connection, self._key)
            except OSError:
                return
            finally:
                self._greetings.release()
            wire.set_timeouts(connection, IDLE_TIMEOUT_S)
            with self._changed:
                self._connections[worker] += 1
            try:
                while True:
                    request = wire.receive_message(connection, wire.REQUEST_BYTES)
                    self._answer(connection, worker, *_checked(request))
            except OSError:
                pass
            finally:
                self._leave(worker)

    def _leave(self, worker: bytes) -> None:
        with self._changed:
            self._connections[worker] -= 1
            if not self._connections[worker]:
                del self._connections[worker]
                for key in [key for key in self._blocks if key[0] == worker]:
                    del self._blocks[key]

    def _answer(
        self, connection: socket.socket, worker: bytes, done: list[str], take: tuple[str, int, int] | None
    ) -> None:
        with self._changed:
            for each in done:
                self._blocks.pop((worker, each), None)
        if take is None:
            return
        block, start, stop = take
        columns = self._find(worker, block)
        if columns is None:
            wire.send_message(connection, {"error": f"block {block} did not come here"})
            return
        try:
            arrays, ragged, text = pick(columns, start, stop)
        except SchemaError as error:
            wire.send_message(connection, {"error": f"block {block}: {error}"})
            return
        layout = [[name, array.dtype.name, list(array.shape[1:])] for name, array in arrays.items()]
        rows = min(map(len, columns.values()), default=0)
        lists = [[n, c.dtype.name, list(c.shape[2:]), len(c.values)] for n, c in ragged.items()]
        header = {"rows": rows, "columns": layout, "ragged": lists, "text": text}
        wire.send_message(connection, header, more=bool(arrays or ragged))
        parts = [part for column in ragged.values() for part in (column.offsets, column.values)]
        for array in (*arrays.values(), *parts):
            if array.nbytes:
                connection.sendall(memoryview(array.reshape(-1).view("u1")))

    def _find(self, worker: bytes, block: str) -> dict[str, Any] | None:
        deadline = time.monotonic() + BLOCK_TIMEOUT_S
        with self._changed:
            while (worker, block) not in self._blocks:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            return self._blocks[worker, block]


def _checked(request: dict[str, Any]) -> tuple[list[str], tuple[str, int, int] | None]:
    """Blocks that may go, and the rows to send.

    Raises:
        WireError: the request is not part of the protocol.
    """
    done, take = request.get("done", []), request.get("take")
    if isinstance(done, list) and all(isinstance(block, str) for block in done):
        if take is None:
            return done, None
        if isinstance(take, list) and list(map(type, take)) == [str, int, int] and 0 <= take[1] <= take[2]:
            return done, (take[0], take[1], take[2])
    raise wire.WireError("sent an invalid request")


def pick(
    columns: dict[str, Any], start: int, stop: int
) -> tuple[dict[str, Any], dict[str, Ragged], dict[str, list[str]]]:
    """CPU host: rows of a block as contiguous arrays, variable-length rows, and lists of strings.

    Raises:
        SchemaError: invalid row offsets.
    """
    import numpy as np

    arrays: dict[str, Any] = {}
    ragged: dict[str, Ragged] = {}
    text: dict[str, list[str]] = {}
    for name, column in columns.items():
        rows = column[start:stop]
        if isinstance(rows, Ragged):
            ragged[name] = rows
        elif rows.dtype == object:
            text[name] = list(rows)
        else:
            arrays[name] = np.ascontiguousarray(rows)
    return arrays, ragged, text
