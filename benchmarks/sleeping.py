"""Laptop: predicted against measured samples/s with a sleeping chain and a sleeping GPU.

Sleeping takes no CPU, so this machine can emulate more CPUs than it has, on real Ray nodes with real tasks,
blocks, coordinator and feed. The gap to the model is the pipeline's loss between tasks and batches. A run
aborts if its own CPU use could distort the measurement.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import psutil

from benchmarks.harness import Measure
from benchmarks.nodes import ray_nodes
from benchmarks.stream import one_pass
from stoker.config.loading import load
from stoker.config.schema import Config
from stoker.data import read_range
from stoker.sizing import model
from stoker.train import feed

HEAD_CPUS, HOST_CPUS, MAX_HOSTS = 2, 3, 6
MAX_REAL_CPUS = 1.2
"""Above this use of the machine's real cores, sleeping tasks wake late."""
SECONDS = 14.0
WINDOW = (0.25, 0.9)
"""The measured part of the rows, without the start and the last tasks, which run alone."""
GPU_HOST_USD, CPU_HOST_USD = 1.408, 0.204


@dataclass(frozen=True)
class Case:
    """A shape: a workload and a number of CPU hosts."""

    name: str
    hosts: int
    cpu_s: float
    gpu_samples_per_s: float = 1e6
    serial_s: float = 0.0
    bytes_per_sample: int = 1000
    block_records: int = 32
    head_cpus: int = HEAD_CPUS
    host_cpus: int = HOST_CPUS
    usd: tuple[float, float] = (GPU_HOST_USD, CPU_HOST_USD)
    """Per hour of the GPU host and of a CPU host."""

    @property
    def work(self) -> model.Workload:
        return model.Workload(self.cpu_s, self.gpu_samples_per_s, serial_s=self.serial_s)

    @property
    def shape(self) -> model.ClusterShape:
        return model.ClusterShape(
            gpu_host_cpus=self.head_cpus,
            cpu_host_cpus=self.host_cpus,
            cpu_hosts=self.hosts,
            gpu_host_usd_per_hour=self.usd[0],
            cpu_host_usd_per_hour=self.usd[1],
        )


SWEEP = [Case(f"n = {n}", n, cpu_s=0.05, gpu_samples_per_s=290) for n in range(MAX_HOSTS + 1)]
"""CPU-bound up to 4 hosts, GPU-bound from 5 on."""
SHAPES = [
    Case("GPU-bound, no CPU host", 0, cpu_s=0.02, gpu_samples_per_s=70),
    Case("GPU-bound, 1 host", 1, cpu_s=0.03, gpu_samples_per_s=120),
    Case("GPU-bound, 4 hosts", 4, cpu_s=0.04, gpu_samples_per_s=250),
    Case("CPU-bound, no CPU host", 0, cpu_s=0.02),
    Case("CPU-bound, 1 host, slow chain", 1, cpu_s=0.1, block_records=16),
    Case("CPU-bound, 3 hosts", 3, cpu_s=0.04),
    Case("CPU-bound, 6 hosts", 6, cpu_s=0.06),
    Case("receiver-bound, 2 hosts", 2, cpu_s=0.03, serial_s=0.005),
    Case("receiver-bound, 5 hosts", 5, cpu_s=0.04, serial_s=0.004),
]


@dataclass(frozen=True)
class Found:
    """The measurement of a case."""

    case: Case
    samples_per_s: float
    times: dict[str, float]
    real_cpus: float

    @property
    def predicted(self) -> model.Prediction:
        return model.predict(self.case.work, self.case.shape)

    @property
    def ratio(self) -> float:
        return self.samples_per_s / self.predicted.samples_per_s


class Sleep:
    """Chain worker: a stage that sleeps `cpu_s` per record and emits a given number of bytes."""

    def __init__(self, cpu_s: float, size: int) -> None:
        self.cpu_s, self.size = cpu_s, size

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        rows = len(columns["index"])
        time.sleep(self.cpu_s * rows)
        return {**columns, "payload": np.zeros((rows, self.size), dtype=np.uint8)}


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    found: list[Found] = []
    with ray_nodes(HEAD_CPUS) as nodes:
        for count in range(MAX_HOSTS + 1):
            if count:
                nodes.add("cpu", HOST_CPUS)
            wake_all_slots(HEAD_CPUS + count * HOST_CPUS)
            for case in [*SWEEP, *SHAPES]:
                if case.hosts == count:
                    found.append(measure(case))
                    show(found[-1])
    return rows(found)


def rows(found: list[Found]) -> list[Measure]:
    """Measured against predicted, and the cost of the model's choice against the best measured one."""
    measures = []
    for one in found:
        goal = 0.95 if one.case in SWEEP else 0.9
        name = f"cluster by sleeping, {one.case.name}"
        met = one.ratio >= goal and one.ratio <= 1.1
        binds = one.predicted.binds
        measures.append(
            Measure(
                name,
                one.samples_per_s,
                one.predicted.samples_per_s,
                f"model, {binds} binds",
                one.ratio,
                goal,
                met,
                "samples/s",
            )
        )
    sweep = {one.case.hosts: one for one in found if one.case in SWEEP}
    cost = {
        n: one.case.shape.usd_per_hour / one.samples_per_s / 3600 * 1e6 for n, one in sweep.items()
    }
    chosen = model.cheapest_count(SWEEP[0].work, SWEEP[0].shape, MAX_HOSTS)
    best = min(cost, key=lambda n: cost[n])
    ratio = cost[best] / cost[chosen]
    name = f"cost of the chosen n = {chosen}, best measured n = {best}"
    measures.append(
        Measure(
            name,
            cost[chosen],
            cost[best],
            "brute force",
            ratio,
            0.95,
            ratio >= 0.95,
            "$/1M samples",
        )
    )
    return measures


def show(one: Found) -> None:
    """Print one line per case."""
    print(
        f"{one.case.name:<32} n={one.case.hosts} measured {one.samples_per_s:7.1f} model"
        f" {one.predicted.samples_per_s:7.1f} = {one.ratio:5.3f}  {one.predicted.binds:<10}"
        f" real CPUs {one.real_cpus:.2f}",
        flush=True,
    )


def measure(case: Case) -> Found:
    """Run a case on the current nodes.

    Raises:
        RuntimeError: the benchmark itself used too much CPU.
    """
    import torch

    expected = model.predict(case.work, case.shape).samples_per_s
    blocks = max(
        round(expected * SECONDS / case.block_records),
        4 * (case.head_cpus + case.hosts * case.host_cpus),
    )
    total = blocks * case.block_records
    config = config_of(case)
    arrivals: list[tuple[float, int]] = []
    chain = [("sleep", Sleep(case.cpu_s, case.bytes_per_sample))]
    with (
        slow_receiving(case.serial_s),
        one_pass(config, read_range(total), chain, torch.device("cpu")) as stream,
    ):
        before, began = {}, 0.0
        times: list[dict[str, float]] = []
        free_at = time.perf_counter()
        for batch in stream:
            count = len(batch["index"])
            now = time.perf_counter()
            arrivals.append((now, stream.rows))
            if stream.rows > WINDOW[len(times) % 2] * total and len(times) < 2:
                times.append(stream.times.figures())
            if not before and stream.rows > WINDOW[0] * total:
                before, began = real_cpu_seconds(), now
            # Do not accumulate oversleep of the operating system.
            free_at = max(free_at, now) + count / case.gpu_samples_per_s
            time.sleep(max(free_at - time.perf_counter(), 0))
    used = sum(seconds - before.get(pid, 0.0) for pid, seconds in real_cpu_seconds().items())
    real = used / (time.perf_counter() - began)
    if real > MAX_REAL_CPUS:
        raise RuntimeError(
            f"{case.name}: {real:.2f} real CPUs in use, more than {MAX_REAL_CPUS}; sleep longer"
        )
    first, last = (
        next(i for i, (_, n) in enumerate(arrivals) if n >= part * total) for part in WINDOW
    )
    rate = (arrivals[last][1] - arrivals[first][1]) / (arrivals[last][0] - arrivals[first][0])
    # Measure the same window as the rate: chain workers start before it.
    inside = {
        name: value - times[0][name] for name, value in times[-1].items() if name != "first_wait_s"
    }
    return Found(case, rate, inside, real)


def config_of(case: Case) -> Config:
    """The job's configuration: unshuffled records, batches of half a block."""
    return load(
        None,
        [
            "data.shuffle=false",
            f"data.block_records={case.block_records}",
            f"train.batch_size={case.block_records // 2}",
            "data.stall_timeout_s=60",
        ],
    ).config


@contextmanager
def slow_receiving(seconds_per_row: float) -> Iterator[None]:
    """Emulate a receiver at its limit: cutting a batch sleeps per row, one batch at a time."""
    cut, one_at_a_time = feed.as_tensors, threading.Lock()

    def slow(columns: dict[str, Any]) -> Any:
        with one_at_a_time:
            time.sleep(seconds_per_row * len(columns["index"]))
        return cut(columns)

    with mock.patch.object(feed, "as_tensors", slow):
        yield


def wake_all_slots(slots: int, benchmark: ModuleType | None = None) -> None:
    """Start one worker process per virtual CPU, to exclude start-up from the measurement.

    Args:
        slots: virtual CPUs of all nodes.
        benchmark: another module whose classes are sent to them.
    """
    import ray
    from ray import cloudpickle

    # Worker processes cannot import these modules by name.
    for module in filter(None, (sys.modules[__name__], benchmark)):
        cloudpickle.register_pickle_by_value(module)

    @ray.remote(num_cpus=1)
    def wake() -> None:
        import pyarrow  # noqa: F401
        import ray.data  # noqa: F401

        time.sleep(1.0)

    ray.get([wake.remote() for _ in range(slots)], timeout=300)


def real_cpu_seconds() -> dict[int, float]:
    """CPU seconds used by this process and those of all nodes, by process."""
    found = {}
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found
