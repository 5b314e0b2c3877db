"""Train worker: fetches rows of blocks over a socket from the host that made them, or through Ray.

Ray's object store transfers whole blocks: the local daemon receives them into shared memory, and they are
copied out again. A host's block server (`server.py`) sends only the rows, and the kernel writes them into
the batch; docs/performance.md has the savings. Whatever it cannot deliver comes through Ray, which also
recomputes lost blocks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.chain.columns import columns_of
from stoker.config.schema import DataConfig
from stoker.messages import BlockSlice, Schema, Server
from stoker.serve.blocks.batches import BatchBuilder
from stoker.serve.blocks.buffers import BufferPool
from stoker.serve.blocks.connections import DirectHosts, Request

KEPT_BLOCKS = 8
"""Number of decoded blocks from Ray's object store to keep, because adjacent batches share blocks."""


@dataclass
class Fetched:
    """Train worker: the rows of a step as columns."""

    columns: dict[str, Any]
    """NumPy arrays, and lists of strings."""
    arrived: float
    """`time.perf_counter()` when the last byte arrived; the rest was slicing and copying."""


class Transport:
    """Train worker: one per process, used by the threads of its feed.

    Args:
        servers: asks the coordinator for (the run's secret, servers by node).
        pinned: batches are copied to a GPU.
        timeout_s: deadline for blocks that come through Ray.
        note: called once when a host is avoided.
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
        """Bytes received "direct" and through "ray"; blocks of this host count as the latter."""

    def fetch(self, parts: Sequence[BlockSlice], schema: Schema) -> Fetched:
        """Train worker: the rows of all parts, in order.

        Raises:
            ray.exceptions.RayError: a block is not available at all.
            SchemaError: a block does not match its report or the columns of its split.
        """
        batch = BatchBuilder(self.buffers, sum(part.stop - part.start for part in parts), schema)
        starts = [sum(p.stop - p.start for p in parts[:i]) for i in range(len(parts))]
        # Send requests to all hosts before reading from the first.
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
        """Train worker: release the blocks of a finished pass."""
        with self._lock:
            self._ray_columns.clear()


def open_transport(coordinator: Any, data: DataConfig, device: Any) -> Transport:
    """Train worker: open the transport of this process for all its passes."""
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
