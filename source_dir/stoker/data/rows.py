"""Coordinator and train worker: which rows make a step's batch, and the batch while it is put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stoker.data.buffers import Buffers


class Rows(NamedTuple):
    """Coordinator → train worker: rows start … stop-1 of a block."""

    block: Any
    """Object reference."""
    start: int
    stop: int
    node: str = ""
    """Ray node that holds it; empty: small or unknown, so it comes through Ray."""


class Server(NamedTuple):
    """Coordinator → train worker: the block server of a host."""

    agent: Any
    """Handle of the actor that runs it."""
    address: str
    port: int


class Assembly:
    """Train worker: columns while they are put together from several blocks."""

    def __init__(self, buffers: Buffers, rows: int) -> None:
        self.columns: dict[str, Any] = {}
        self._buffers, self.rows = buffers, rows

    def target(self, name: str, dtype: Any, shape: Sequence[int], at: int) -> Any:
        """Where `shape[0]` rows from row `at` on go; None where the blocks' columns differ in kind."""
        column = self.columns.get(name)
        if column is None:
            column = self._buffers.empty((self.rows, *shape[1:]), dtype)
            self.columns[name] = column
        if column.dtype != dtype or list(column.shape[1:]) != list(shape[1:]):
            return None
        return column[at : at + shape[0]]

    def put(self, name: str, values: Any, at: int) -> None:
        """Copy rows in.

        Raises:
            ValueError: they do not fit to those of other blocks.
        """
        if values.dtype == object:
            column = self.columns.setdefault(name, [None] * self.rows)
            column[at : at + len(values)] = list(values)
            return
        target = self.target(name, values.dtype, values.shape, at)
        if target is None:
            target = self.columns[name][at : at + len(values)]
        target[...] = values
