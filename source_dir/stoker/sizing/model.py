"""Anywhere: the limits model: how fast a cluster can train, what limits it, and what a sample costs. Pure.

A sample is preprocessed on the GPU hosts (rate L) or on CPU hosts and received (rate R), T = L + R:

    T ≤ G                                  the GPUs
    T ≤ 1 / κ₁                             the one thread of a train worker that assembles batches
    L·c + R·κ + T·h ≤ C_g                  CPUs of the GPU hosts
    L·c ≤ η_g·(C_g − reserve)              … those of them that the chain may use
    R·c ≤ η·n·C_c                          CPUs of the CPU hosts
    R·b ≤ B                                network, the slower side

This is a linear programme in two variables whose solution is one of at most three points, so the split
between local and remote work is exact. docs/sizing.md defines the symbols. Pecan (USENIX ATC 2024), Cachew
(ATC 2022) and FastFlow (VLDB 2023) use subsets of these limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Term = Literal["gpu", "cpu", "network", "gpu_host_cpu", "receiver"]

TOLERANCE = 1e-9
MAX_CPU_HOSTS = 100


@dataclass(frozen=True)
class Workload:
    cpu_s: float
    """c: CPU-seconds of the chain per sample, on a vCPU whose neighbours are busy too."""
    gpu_samples_per_s: float
    """G: samples per second that one GPU trains when data is never late; infinite: no limit."""
    receive_s: float = 0.0
    """κ: CPU-seconds of a GPU host to receive one sample preprocessed elsewhere."""
    other_s: float = 0.0
    """h: further CPU-seconds of a GPU host per sample, wherever it is preprocessed."""
    serial_s: float = 0.0
    """κ₁: seconds per sample of the thread that assembles batches, one per train worker; 0: no limit."""
    bytes_per_sample: float = 0.0
    """b: bytes of one preprocessed sample on the network."""


@dataclass(frozen=True)
class ClusterShape:
    gpu_host_cpus: float
    """C_g: vCPUs of one GPU host."""
    cpu_host_cpus: float = 0.0
    """C_c: vCPUs of one CPU host."""
    cpu_hosts: int = 0
    gpu_hosts: int = 1
    gpus_per_host: float = 1
    """Those that train, in the mean."""
    reserved_cpus: float = 0.0
    """vCPUs of a GPU host not available to the chain."""
    gpu_host_bytes_per_s: float = math.inf
    """B of one GPU host."""
    cpu_host_bytes_per_s: float = math.inf
    """B of one CPU host."""
    efficiency: float = 1.0
    """η: share of the CPU hosts' CPU time that the chain gets."""
    gpu_host_efficiency: float = 1.0
    """η_g: the same for the GPU hosts' CPUs."""
    gpu_host_usd_per_hour: float = 0.0
    """P_g: $/h of one GPU host."""
    cpu_host_usd_per_hour: float = 0.0
    """P_c: $/h of one CPU host."""

    def with_cpu_hosts(self, count: int) -> ClusterShape:
        return replace(self, cpu_hosts=count)

    @property
    def usd_per_hour(self) -> float:
        of_gpu_hosts = self.gpu_hosts * self.gpu_host_usd_per_hour
        return of_gpu_hosts + self.cpu_hosts * self.cpu_host_usd_per_hour


@dataclass(frozen=True)
class Prediction:
    samples_per_s: float
    binds: Term
    remote_share: float
    """x: share of the samples preprocessed by CPU hosts, in 0…1."""


def predict(work: Workload, shape: ClusterShape) -> Prediction:
    m, n, c = shape.gpu_hosts, shape.cpu_hosts, work.cpu_s
    workers, gpu_cpus = m * shape.gpus_per_host, m * shape.gpu_host_cpus
    usable = max(shape.gpu_host_cpus - shape.reserved_cpus, 0.0)
    slots = _ratio(m * usable * shape.gpu_host_efficiency, c)
    gpu, receiver = workers * work.gpu_samples_per_s, _ratio(workers, work.serial_s)
    link = min(m * shape.gpu_host_bytes_per_s, n * shape.cpu_host_bytes_per_s)
    network = _ratio(link, work.bytes_per_sample) if n else 0.0
    produced = _ratio(shape.efficiency * n * shape.cpu_host_cpus, c)
    # At the last of these rates, receiving alone saturates the GPU hosts' CPUs.
    most = min(produced, network, _ratio(gpu_cpus, work.receive_s + work.other_s))
    whole = c + work.other_s

    def total(remote: float) -> float:
        """T as a function of R: concave and piecewise linear."""
        of_cpus = _ratio(gpu_cpus + (c - work.receive_s) * remote, whole)
        return max(min(gpu, receiver, of_cpus, slots + remote), 0.0)

    corner = 0.0  # where the two lines of the GPU hosts' CPUs meet
    if whole > 0 and math.isfinite(slots) and whole != c - work.receive_s:
        corner = (gpu_cpus - slots * whole) / (whole - c + work.receive_s)
    rates = [r for r in (0.0, most, min(max(corner, 0.0), most)) if math.isfinite(r)]
    best = max(map(total, rates))
    # Among equals the largest R: CPU hosts work first, as in the placement.
    remote = max(r for r in rates if total(r) >= best * (1 - TOLERANCE))
    rate, near = total(remote), 1 - TOLERANCE
    binds: Term = "cpu" if not n or remote >= produced * near else "gpu_host_cpu"
    if rate >= gpu * near:
        binds = "gpu"
    elif rate >= receiver * near:
        binds = "receiver"
    elif n and remote >= network * near:
        binds = "network"
    share = min(remote / rate, 1.0) if rate > 0 and math.isfinite(rate) else float(remote > 0)
    return Prediction(rate, binds, share)


def usd_per_million_samples(prediction: Prediction, shape: ClusterShape) -> float:
    """$ per 1,000,000 samples: (P_g·m + P_c·n) / (3600·T) · 10⁶."""
    return _ratio(shape.usd_per_hour, 3600 * prediction.samples_per_s) * 1e6


def cheapest_count(work: Workload, shape: ClusterShape, limit: int = MAX_CPU_HOSTS) -> int:
    """The number of CPU hosts with the lowest cost per sample; the smallest among equals."""
    costs = [cost_with(work, shape, count) for count in range(limit + 1)]
    most = min(costs) * (1 + TOLERANCE)
    return next(count for count, cost in enumerate(costs) if cost <= most)


def cost_with(work: Workload, shape: ClusterShape, cpu_hosts: int) -> float:
    shape = shape.with_cpu_hosts(cpu_hosts)
    return usd_per_million_samples(predict(work, shape), shape)


def _ratio(supply: float, demand: float) -> float:
    return supply / demand if demand > 0 else math.inf
