"""Train worker: how rows of blocks get here: over a socket from the host that made them, or through Ray.

Ray's object store brings whole blocks: its daemon on this host receives them, puts them into shared memory,
and they are copied out again. The block server of a host (`serving.py`) sends just the rows, and the kernel
puts them where the batch is built; docs/performance.md has what that saves. What it cannot bring, for
whatever reason, comes through Ray, which also makes lost blocks again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.data.messages import BlockSlice, Schema, Server
from stoker.data.preprocessing.blocks import columns_of
from stoker.data.transport.batches import BatchBuilder
from stoker.data.transport.buffers import BufferPool
from stoker.data.transport.connections import DirectHosts, Request
from stoker.schema import DataConfig

KEPT_BLOCKS = 8
"""Blocks of Ray's object store whose columns stay at hand: neighbouring batches lie in the same ones."""


@dataclass
class Fetched:
    """Train worker: the rows of a step as columns."""

    columns: dict[str, Any]
    """NumPy arrays, and lists of strings."""
    arrived: float
    """`time.perf_counter()` when the last byte was here; what came after was cutting and copying."""


class Transport:
    """Train worker: one per process, used by the threads of its feed.

    Args:
        servers: asks the coordinator for (the run's secret, servers by node).
        pinned: batches are copied to a GPU.
        timeout_s: deadline of what comes through Ray.
        note: told once when a host is avoided.
    """

    def __init__(
        self,
        servers: Callable[[], tuple[bytes, dict[str, Server]]] | None,
        pinned: bool,
        timeout_s: float,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.buffers = BufferPool(pinned)
        self._timeout_s = timeout_s
        self._ray_columns: dict[Any, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self.direct = DirectHosts(servers, note) if servers else None
        self.bytes_by: Counter[str] = Counter()
        """Bytes that came "direct" and through "ray"; those of this host's own blocks count as the latter."""

    def fetch(self, parts: Sequence[BlockSlice], schema: Schema) -> Fetched:
        """Train worker: the rows of all parts, one after the other.

        Raises:
            ray.exceptions.RayError: a block cannot be had at all.
            SchemaError: a block is not as it was reported, or has other columns than its split.
        """
        batch = BatchBuilder(self.buffers, sum(part.stop - part.start for part in parts), schema)
        starts = [sum(p.stop - p.start for p in parts[:i]) for i in range(len(parts))]
        # Ask all hosts before reading from the first one.
        asked = [self.direct.ask(part) if self.direct else None for part in parts]
        left = []
        for part, at, request in zip(parts, starts, asked, strict=True):
            if request is None or not self._receive(request, batch, at):
                left.append((part, at))
        blocks = self._through_ray([part.block for part, _ in left]) if left else []
        arrived = time.perf_counter()
        for (part, at), columns in zip(left, blocks, strict=True):
            self.bytes_by["ray"] += batch.take(part, columns, at)
        return Fetched(batch.finish(), arrived)

    def _receive(self, request: Request, batch: BatchBuilder, at: int) -> bool:
        try:
            count = request.receive(batch, at)
        except OSError as error:
            request.failed(error)
            return False
        self.bytes_by["direct"] += count
        return True

    def _through_ray(self, references: list[Any]) -> list[dict[str, Any]]:
        import ray

        with self._lock:
            found = {r: self._ray_columns[r] for r in references if r in self._ray_columns}
        missing = [r for r in dict.fromkeys(references) if r not in found]
        for reference, block in zip(missing, ray.get(missing, timeout=self._timeout_s), strict=True):
            found[reference] = columns_of(block)
        with self._lock:
            for reference in found:
                self._ray_columns.pop(reference, None)
            self._ray_columns |= found
            for reference in list(self._ray_columns)[:-KEPT_BLOCKS]:
                del self._ray_columns[reference]
        return [found[r] for r in references]

    def finish_pass(self) -> None:
        """Train worker: let go of the blocks of a pass that is over."""
        with self._lock:
            self._ray_columns.clear()


def open_transport(coordinator: Any, data: DataConfig, device: Any) -> Transport:
    """Train worker: the way that blocks take to this process, for all its passes."""
    import ray

    def servers() -> tuple[bytes, dict[str, Server]]:
        answer: tuple[bytes, dict[str, Server]] = ray.get(coordinator.servers.remote(), timeout=60)
        return answer

    return Transport(
        servers if data.transport == "direct" else None,
        pinned=device.type == "cuda",
        timeout_s=data.stall_timeout_s,
        note=lambda text: coordinator.log.remote("note", {"text": text}),
    )
