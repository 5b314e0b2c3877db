"""Laptop: training jobs whose GPUs wait, as their owners published them, without and with CPU hosts.

A case keeps what was published: CPU seconds per sample, samples per second of the GPU, vCPUs of its host. Both
times are scaled alike, so that a sample sleeps 0.1 s on a virtual CPU: sleeping takes no CPU, and this
machine can emulate the hosts. The limits model, which `size` uses, says how many CPU hosts the GPU needs.
`python -m benchmarks field` runs all cases, `python -m benchmarks.field nnunet` one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import inf

from benchmarks.harness import Measure, publish
from benchmarks.nodes import ray_nodes
from benchmarks.sleeping import Case, Found, measure, show, wake_all_slots
from stoker.sizing import model

SLEEP_S = 0.1
HOST_CPUS, CPU_HOST_USD = 8, 0.408
"""A CPU host of 8 vCPUs: ml.c5.2xlarge."""
GPU_HOST_USD = 1.408
"""The same for all cases: ml.g5.xlarge."""
MAX_HOSTS = 4
BUSY, WITHIN = 0.97, 0.05


@dataclass(frozen=True)
class Published:
    """Times in seconds and rates as published, or derived from what was, as `how` says."""

    thread: str
    how: str
    cpu_s: float
    """CPU seconds per sample."""
    gpu_per_s: float
    """Samples per second of the GPU; infinite: training is skipped."""
    cpus: int
    """vCPUs of the GPU host that preprocess."""
    busy: float | None = None
    """Share of the time that the GPU was busy, published or what the published times come to."""
    serial_s: float = 0.0
    """Seconds per sample of the one thread that receives them."""
    hosts: int | None = None
    """CPU hosts of the published remedy; None: as many as keep the GPU busy."""
    host_cpus: int = HOST_CPUS


CASES = {
    "nnunet": Published(
        "github.com/MIC-DKFZ/nnUNet/issues/3063",
        "step 130.7 ms for 2 samples; 302 ms per iteration are 7 vCPUs",
        cpu_s=1.0229, gpu_per_s=2 / 0.1307, cpus=7, busy=0.399,
    ),
    "driving": Published(
        "github.com/autowarefoundation/auto_e2e/issues/30",
        "0.37 samples/s with 4 workers; the GPU's 2 samples/s, and so its use, are assumed",
        cpu_s=9.7, gpu_per_s=2.0, cpus=4, busy=0.37 / 2,
    ),
    "vla": Published(
        "github.com/CladernyJorn/VLM4VLA/issues/9",
        "6 to 7 of 8 s of a forward pass are images; 4 vCPUs and 8 samples per step are assumed",
        cpu_s=8.0 * 4 / 8, gpu_per_s=8 / 1.5, cpus=4, busy=1.5 / 8,
    ),
    "geti": Published(
        "github.com/open-edge-platform/geti/pull/5958",
        "waits 217 ms, trains 100 ms, 2 workers; 4 vCPUs and 8 samples per step are assumed",
        cpu_s=0.317 * 4 / 8, gpu_per_s=8 / 0.1, cpus=4, busy=0.1 / 0.317,
    ),
    "lerobot": Published(
        "github.com/huggingface/lerobot/issues/1623",
        "waits 1 s, trains 0.7 s, 10 workers; 4 vCPUs and 8 samples per step are assumed",
        cpu_s=1.7 * 4 / 8, gpu_per_s=8 / 0.7, cpus=4, busy=0.7 / 1.7,
    ),
    "dense": Published(
        "github.com/cellarium-ai/cellarium-ml/pull/387",
        "an epoch of 30 min, 12 once sent sparse: taken as the receiver's time; the rest is assumed",
        cpu_s=0.05, gpu_per_s=41.0, cpus=4, busy=0.4, serial_s=1 / 16, hosts=0,
    ),
    "sparse": Published(
        "github.com/cellarium-ai/cellarium-ml/pull/387",
        "the same, sent sparse",
        cpu_s=0.05, gpu_per_s=41.0, cpus=4, busy=1.0, serial_s=1 / 40, hosts=0,
    ),
    "collate": Published(
        "docs.ray.io/en/latest/train/user-guides/scaling-collation-functions.html",
        "3,437 rows/s on 48 vCPUs, training skipped; hosts at 1:8, so 6 vCPUs, and 2 more of 4 each",
        cpu_s=48 / 3437, gpu_per_s=inf, cpus=6, hosts=2, host_cpus=4,
    ),
}  # fmt: skip


def case_of(name: str, hosts: int) -> Case:
    """A published case as it is slept."""
    of, scale = CASES[name], SLEEP_S / CASES[name].cpu_s
    rate = of.gpu_per_s / scale
    return Case(
        f"{name}, {hosts} CPU hosts",
        hosts,
        SLEEP_S,
        gpu_samples_per_s=min(rate, 1e6),
        serial_s=of.serial_s * scale,
        block_records=16 if hosts else 8,  # of a step, or a wave of blocks, little is lost
        head_cpus=of.cpus,
        host_cpus=of.host_cpus,
        usd=(GPU_HOST_USD, CPU_HOST_USD),
    )


def needed(name: str) -> int:
    """The fewest CPU hosts with which the GPU does not wait, as the limits model predicts."""
    cases = (case_of(name, count) for count in range(MAX_HOSTS + 1))
    return next(c.hosts for c in cases if model.predict(c.work, c.shape).binds == "gpu")


def run(names: list[str] | None = None) -> list[Measure]:
    """Run the benchmark and return its rows."""
    if unknown := {*(names or ())} - {*CASES}:
        sys.exit(f"error: no case {', '.join(sorted(unknown))}; choose from: {', '.join(CASES)}")
    rows: list[Measure] = []
    for name in names or CASES:
        of, alone = CASES[name], case_of(name, 0)
        count = needed(name) if of.hosts is None else of.hosts
        with ray_nodes(of.cpus) as nodes:
            wake_all_slots(of.cpus)
            found = [measure(alone)]
            show(found[-1])
            for _ in range(count):
                nodes.add("cpu", of.host_cpus)
            wake_all_slots(of.cpus + count * of.host_cpus)
            if count:
                found.append(measure(case_of(name, count)))
                show(found[-1])
        rows += rows_of(name, found)
    return rows


def rows_of(name: str, found: list[Found]) -> list[Measure]:
    """Prediction, GPU use and cost of a case, in the rates that were published."""
    of, rows = CASES[name], list[Measure]()
    scale = SLEEP_S / of.cpu_s
    for one in found:
        rate, ideal = one.samples_per_s * scale, one.predicted.samples_per_s * scale
        text = f"{one.case.name}: measured against `size`"
        near = abs(one.ratio - 1) <= WITHIN
        rows.append(Measure(text, rate, ideal, "size", one.ratio, None, near, "samples/s"))
    last = found[-1]
    if of.gpu_per_s < inf:
        busy = last.samples_per_s / last.case.gpu_samples_per_s
        goal = BUSY if last.predicted.binds == "gpu" else None
        text = f"{last.case.name}: GPU busy, before {of.busy:.0%}"
        rows.append(
            Measure(
                text, busy, of.busy, "before", busy / (of.busy or 1), None,
                busy >= goal if goal else None, "of the time",
            )
        )  # fmt: skip
    dollars = [
        one.case.shape.usd_per_hour / (one.samples_per_s * scale) / 3600 * 1e6 for one in found
    ]
    text = f"{last.case.name}: cost of a million samples"
    ratio = dollars[0] / dollars[-1]
    rows.append(Measure(text, dollars[-1], dollars[0], "no CPU hosts", ratio, None, None, "$"))
    return rows


if __name__ == "__main__":
    publish(run(sys.argv[1:]))
