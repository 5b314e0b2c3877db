"""CPU host: sends rows of this host's blocks to train workers, directly from its memory."""

from __future__ import annotations

import socket
from typing import Any

from stoker.chain.columns import Ragged
from stoker.errors import SchemaError
from stoker.serve.blocks import wire
from stoker.serve.blocks.folder import NAME, BlockFolder

IDLE_TIMEOUT_S = 3600.0
"""A connection idle for this long is closed; a live train worker reconnects."""


class BlockServer(wire.Listener):
    """One per host and run, in the host's agent."""

    def __init__(self, address: str, secret: bytes, folder: BlockFolder) -> None:
        self._folder = folder
        super().__init__(address, 0, secret)

    def talk(self, connection: socket.socket) -> None:
        wire.set_timeouts(connection, IDLE_TIMEOUT_S)
        latest: tuple[str, dict[str, Any]] = "", {}
        while True:
            request = wire.receive_message(connection, wire.REQUEST_BYTES)
            latest = self._answer(connection, latest, *_checked(request))

    def _answer(
        self,
        connection: socket.socket,
        latest: tuple[str, dict[str, Any]],
        done: list[str],
        take: tuple[str, int, int] | None,
    ) -> tuple[str, dict[str, Any]]:
        """Send rows of a block; returns that block, of which the next request often wants more rows."""
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


def _send(connection: socket.socket, block: str, columns: dict[str, Any], start: int, stop: int) -> None:
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
    """Blocks that may go, and the rows to send."""
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
