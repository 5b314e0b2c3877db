"""Laptop: records/s of GPU and CPU hosts with training skipped, against stock Ray Data.

Ray's own benchmark "heterogenous_fixed_size.skip_training" (ray-project/ray pull request 60458: GPU hosts of
48 CPUs, as many CPU hosts of 16, a train worker that drops its batches) at one eighth of its size: two of
each, with a core of each GPU host reserved for its train worker. Records sleep, which takes no CPU, so the
machine can emulate more CPUs than it has. Both sides run on the same nodes and consumers, interleaved.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Measure
from benchmarks.loaders.work import slope
from benchmarks.nodes import ray_nodes
from benchmarks.sleeping import wake_all_slots
from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.config.loading import load
from stoker.config.schema import Config
from stoker.data import read_range
from stoker.serve.blocks.client import open_transport
from stoker.serve.opening import Data, start_coordinator
from stoker.train.feed import Feed

GPU_HOSTS, GPU_HOST_CPUS = 2, 5
CPU_HOSTS, CPU_HOST_CPUS = 2, 2
SLOTS = GPU_HOSTS * GPU_HOST_CPUS + CPU_HOSTS * CPU_HOST_CPUS
RECORD_S, RECORD_BYTES = 0.05, 4_096
TOTAL, BATCH, BLOCK_RECORDS = 6_400, 32, 16
STOCK_BLOCKS = 200
"""Ray Data's minimum number of blocks (`DataContext.read_op_min_num_blocks`)."""
ROUNDS = 3
WINDOW = (0.25, 0.9)
"""Part of the records that is measured: without the start, and without the last ones, which run alone."""
GOAL = 1.12
Taken = list[tuple[float, list[int]]]
"""The arrival time and records of each batch."""


class Sleep:
    """Chain worker: make a block for Stoker."""

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        rows = len(columns["index"])
        time.sleep(RECORD_S * rows)
        return {**columns, "payload": np.zeros((rows, RECORD_BYTES), dtype=np.uint8)}


def asleep(row: dict[str, Any]) -> dict[str, Any]:
    """Ray Data task: map a record as its benchmark does."""
    time.sleep(RECORD_S)
    return {"index": row["id"], "payload": np.zeros(RECORD_BYTES, dtype=np.uint8)}


class TrainWorker:
    """GPU host: consumes batches as fast as they arrive."""

    def stock(self, shard: Any) -> Taken:
        """Consume batches of Ray Data."""
        return [
            (time.time(), batch["index"].tolist())
            for batch in shard.iter_torch_batches(batch_size=BATCH)
        ]

    def ours(self, coordinator: Any, rank: int, config: Config) -> Taken:
        """Consume batches of Stoker."""
        device = torch.device("cpu")
        feed = Feed(
            coordinator=coordinator,
            attempt=0,
            rank=rank,
            device=device,
            transport=open_transport(coordinator, config.data, device),
            data=config.data,
        )
        return [(time.time(), batch["index"].tolist()) for batch in feed]


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    found: dict[str, list[float]] = {"Stoker": [], "stock": []}
    with ray_nodes(GPU_HOST_CPUS) as nodes:
        for group, cpus in [("gpu", GPU_HOST_CPUS)] * (GPU_HOSTS - 1) + [
            ("cpu", CPU_HOST_CPUS)
        ] * CPU_HOSTS:
            nodes.add(group, cpus)
        wake_all_slots(SLOTS, sys.modules[__name__])
        for number in range(ROUNDS):
            for name, rates in found.items():
                rates.append(measure(stoker if name == "Stoker" else stock))
                print(f"round {number + 1}: {name}: {rates[-1]:.1f} records/s", flush=True)
    ours, theirs = (statistics.median(rates) for rates in found.values())
    ratio = statistics.median(a / b for a, b in zip(*found.values(), strict=True))
    name, ideal = "GPU and CPU hosts, training skipped", SLOTS / RECORD_S
    return [
        Measure(name, ours, theirs, "stock Ray Data", ratio, GOAL, ratio >= GOAL, "records/s"),
        Measure(
            f"{name}: the ideal", ours, ideal, "the ideal", ours / ideal, None, None, "records/s"
        ),
    ]


def measure(loader: Any) -> float:
    """Records/s of all train workers in the window.

    Raises:
        RuntimeError: records are missing or repeated.
    """
    import ray

    # Hosts declare their CPUs without the train worker's core.
    workers = [
        ray.remote(TrainWorker)
        .options(num_cpus=0, label_selector={"stoker.host": f"gpu-{host}"})
        .remote()
        for host in range(GPU_HOSTS)
    ]  # fmt: skip
    try:
        taken: list[Taken] = loader(workers)
    finally:
        for worker in workers:
            ray.kill(worker)
    batches = sorted((batch for one in taken for batch in one), key=lambda batch: batch[0])
    indices = [index for _, some in batches for index in some]
    if sorted(indices) != list(range(TOTAL)):
        raise RuntimeError(
            f"{len(indices)} of {TOTAL} records, {len(set(indices))} of them distinct"
        )
    sums = np.cumsum([len(some) for _, some in batches]).tolist()
    return slope([(at, rows) for (at, _), rows in zip(batches, sums, strict=True)], TOTAL, WINDOW)


def stoker(workers: list[Any]) -> list[Taken]:
    """Run the real coordinator, chain workers and feeds."""
    import ray

    config = load(
        None,
        [
            f"data.block_records={BLOCK_RECORDS}",
            f"train.batch_size={BATCH}",
            "train.epochs=1",
            "data.stall_timeout_s=150",
        ],
    ).config
    chain = Chain(as_stages([("sleep", Sleep())]), config.seed)
    data = Data({"train": read_range(TOTAL)}, {"train": chain}, {"train": TOTAL})
    coordinator = start_coordinator(config, data, workers=len(workers))
    try:
        calls = [w.ours.remote(coordinator, rank, config) for rank, w in enumerate(workers)]
        taken: list[Taken] = ray.get(calls, timeout=180)
    finally:
        ray.kill(coordinator)
    return taken


def stock(workers: list[Any]) -> list[Taken]:
    """Run Ray Data, split among the train workers as TorchTrainer does."""
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.range(TOTAL, override_num_blocks=STOCK_BLOCKS).map(asleep)
    shards = dataset.streaming_split(len(workers), equal=True)
    calls = [w.stock.remote(shard) for w, shard in zip(workers, shards, strict=True)]
    taken: list[Taken] = ray.get(calls, timeout=180)
    return taken
