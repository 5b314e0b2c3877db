"""Laptop: CPU time of a GPU host to receive a sample preprocessed elsewhere (κ of the model).

Two Ray nodes with separate object stores run on this machine: one sends prepared rows, the other receives
them through the real coordinator and feed. The measurement is the CPU time of the receiving side's
processes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Any

import psutil

from launcher.advise.size.nodes import ray_nodes
from launcher.advise.size.stream import one_pass
from stoker.config.schema import Config
from stoker.data import read_range
from stoker.hosts.raynode import RayNode

PASS_BYTES = 1024 * 2**20
BLOCKS = (20, 160)
"""Minimum and maximum number of blocks in the pass."""
STORE_MB = 512
WINDOWS = 5
"""Parts of the pass that are measured separately; the first includes process start and imports."""
SMALLEST_SPREAD = 0.1


@dataclass(frozen=True)
class ReceiveProfile:
    """Laptop: the measurement of the receiving side, in CPU-seconds per sample."""

    transfer_s: float
    """The Ray daemon that fetches blocks from another host: κ."""
    feed_s: float
    """The train worker's process and the coordinator, for every sample: h."""
    serial_s: float
    """The train worker's process alone, with its one feed thread: κ₁."""
    task_s: float
    """The CPU host, except for the chain itself: starting tasks, storing and sending blocks."""
    spread: float
    """Half the width of the 95 % interval of their sum, as a share of it."""


class Replay:
    """Chain worker: returns the same few rows for every block, at almost no cost."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        rows = len(batch["index"])
        return {name: np.resize(column, (rows, *column.shape[1:])) for name, column in self.columns.items()}


def measure_receiving(config: Config, columns: dict[str, Any]) -> ReceiveProfile:
    """Laptop: send preprocessed rows between two nodes and measure the receiver's CPU time.

    Args:
        config: provides block and batch sizes.
        columns: preprocessed rows from a ChainProfile.
    """
    import torch

    columns = {name: column for name, column in columns.items() if column.dtype != object}
    size = sum(column[:1].nbytes for column in columns.values())
    block = config.data.block_records
    blocks = max(BLOCKS[0], min(PASS_BYTES // max(size * block, 1), BLOCKS[1]))
    sent = {"preprocess_on": ["cpu"], "shuffle": False, "stall_timeout_s": 600.0}
    data = config.data.model_copy(update=sent)
    config = config.model_copy(update={"data": data})
    marks: list[tuple[int, tuple[float, ...]]] = []
    with ray_nodes(1, STORE_MB) as nodes:
        sender = nodes.add("cpu", 2, STORE_MB)
        source, chain = read_range(blocks * block), [("replay", Replay(columns))]
        with one_pass(config, source, chain, torch.device("cpu")) as stream:
            for _batch in stream:
                if stream.rows >= len(marks) * blocks * block / WINDOWS:
                    marks.append((stream.rows, _cpu(nodes.started[0], sender)))
            marks.append((stream.rows, _cpu(nodes.started[0], sender)))
    found = [
        tuple((later - earlier) / (rows - before) for earlier, later in zip(old, new, strict=True))
        for (before, old), (rows, new) in itertools.pairwise(marks[1:])
        if rows > before
    ]
    own, coordinator, daemons, away = (statistics.fmean(column) for column in zip(*found, strict=True))
    sums = [sum(one[:3]) for one in found]
    error = statistics.stdev(sums) / math.sqrt(len(sums))
    return ReceiveProfile(
        transfer_s=daemons,
        feed_s=own + coordinator,
        serial_s=own,
        task_s=away,
        spread=max(2 * error / statistics.fmean(sums), SMALLEST_SPREAD),
    )


def _cpu(head: RayNode, sender: RayNode) -> tuple[float, float, float, float]:
    """CPU-seconds so far: this process, the head's workers (the coordinator), its daemons, the sender."""
    workers = daemons = 0.0
    for process in head.processes():
        seconds = _seconds(process)
        if _is_worker(process):
            workers += seconds
        else:
            daemons += seconds
    return _seconds(psutil.Process()), workers, daemons, sum(map(_seconds, sender.processes()))


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("ray::") or "default_worker.py" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
