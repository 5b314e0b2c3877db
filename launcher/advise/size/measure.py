"""Laptop: a job's costs per sample, from a short profile on this machine or from a finished run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.advise.size.candidates import EFFICIENCY, Measured
from stoker.config.loading import Resolved
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.events import prices
from stoker.events.bottleneck import MIN_STEPS
from stoker.events.summary import Summary, read_summary
from stoker.hosts import machine

CHAIN_SECONDS = 10.0
GPU_SECONDS = 8.0
RECEIVE_S, FEED_S = 0.00002, 0.0003
"""κ and h of a sample of `RECEIVE_BYTES`, used if not measured: docs/performance.md."""
RECEIVE_BYTES = 150_528
ASSUMED_SPREAD = 0.5
RUN_SPREAD = 0.1
"""Of figures from a run: throughput of the same job varies this much between runs."""


def profile(
    resolved: Resolved,
    rates: Mapping[str, float],
    tell: Callable[[str], None],
    source_dir: Path | None = None,
) -> Measured:
    """Laptop: measure the chain, the receiving side and, with a GPU here, the training step.

    Args:
        resolved: the job.
        rates: G by GPU name, "" for all, if given by the user; then no GPU is needed here.
        tell: receives a line per measurement.
        source_dir: folder of the user's recipes.

    Raises:
        UsageError: a problem in the data or the chain.
    """
    from launcher.advise.size.nodes import prepare

    # Before the first import of Ray.
    prepare()
    from launcher.advise.size.dataset import open_for_profile
    from launcher.advise.size.profile import measure_chain
    from launcher.advise.size.receive import measure_receiving

    if source_dir is not None:
        sys.path.insert(0, str(source_dir))
    tell("opening the data")
    opened = open_for_profile(resolved, CHAIN_SECONDS, tell)
    config, data = opened.config, opened.data
    cores = machine.cores()
    tell(f"the chain on {cores} core{'s' if cores > 1 else ''} at the same time, {CHAIN_SECONDS:.0f} s")
    chain = measure_chain(data, config.data.block_records, CHAIN_SECONDS)
    tell("receiving preprocessed samples from another node")
    receiving = measure_receiving(config, chain.columns)
    notes = [
        f"one vCPU counts as one core of this machine ({cores} here, all busy); correct it with --cpu-speed",
        "chain and receiving: measured here on local data, without waiting for S3",
    ]
    found, spread = dict(rates), 0.0
    if not rates and gpu_here():
        tell(f"the training step on cached batches, {GPU_SECONDS:.0f} s")
        found, spread, note = _gpu_rate(config, chain.columns, source_dir)
        notes.append(note)
    elif rates:
        notes.append("samples/s of the GPU: from --gpu-samples-per-s")
    return Measured(
        cpu_s=opened.cpu_s + chain.cpu_s + receiving.task_s,
        cpu_spread=chain.spread,
        bytes_per_sample=chain.bytes_per_sample,
        receive_s=receiving.transfer_s,
        other_s=receiving.feed_s,
        serial_s=receiving.serial_s,
        receive_spread=receiving.spread,
        gpu_samples_per_s=found,
        gpu_spread=spread,
        stages=[
            *chain.stages,
            *opened.stages,
            {"stage": "task", "cpu_ms_per_sample": round(1000 * receiving.task_s, 4), "bytes_out": 0},
        ],
        samples=job_samples(config, data.totals["train"]),
        notes=[*notes, efficiency_note()],
    )


def from_run(run: Path, config: Config, rates: Mapping[str, float]) -> Measured:
    """Laptop: the same figures from a run's summary.json.

    Args:
        run: its directory.
        config: the job to size; provides the epochs.
        rates: G by GPU name, "" for all; others are taken from the run.

    Raises:
        UsageError: there is no run, it was too short, or its chain was not measured.
    """
    file = run if run.is_file() else run / "summary.json"
    if not file.is_file():
        raise UsageError(f"--from {run}: no run there (no summary.json)")
    summary = read_summary(file)
    speed = summary.speed
    if summary.steps < MIN_STEPS or not speed.steady_samples_per_s:
        raise UsageError(
            f"--from {run}: too short to judge ({summary.steps} steps; at least {MIN_STEPS} are needed)"
        )
    cpu_s = sum(float(stage.get("cpu_ms_per_sample", 0)) for stage in summary.chain) / 1000
    if cpu_s <= 0:
        raise UsageError(f"--from {run}: its summary.json has no cost of the chain")
    found = dict(rates) or rate_of_run(summary)
    scale = speed.bytes_per_sample / RECEIVE_BYTES
    records = summary.records
    passes = max(len([e for e in records.epochs if "trained" in e]), 1)
    note = "samples/s of the GPU: from --gpu-samples-per-s"
    if not rates and found:
        note = "samples/s of the GPU: from the run, without its waiting"
    return Measured(
        cpu_s=cpu_s,
        cpu_spread=RUN_SPREAD,
        bytes_per_sample=speed.bytes_per_sample,
        receive_s=RECEIVE_S * scale,
        other_s=FEED_S * scale,
        serial_s=FEED_S * scale / 3,
        receive_spread=ASSUMED_SPREAD,
        gpu_samples_per_s=found,
        gpu_spread=0.0 if rates else RUN_SPREAD,
        stages=list(summary.chain),
        samples=job_samples(config, round((records.read - records.quarantined) / passes) or None),
        notes=[
            f"chain and bytes: from the run {run} on its hosts; correct for other CPUs with --cpu-speed",
            f"receiving: assumed {1000 * (RECEIVE_S + FEED_S) * scale:.2f} ms of CPU per sample ± 50 %;"
            " runs do not measure it",
            note,
            efficiency_note(),
        ],
    )


def rate_of_run(summary: Summary) -> dict[str, float]:
    """Laptop: G of one GPU from a run, under the GPU's name; empty if the run had no GPUs."""
    gpus = sum(host.gpus for host in summary.cluster.at_once())
    if not gpus:
        return {}
    terms = summary.speed.step_terms_ms
    total = sum(terms.values())
    waits = 1 - terms.get("compute", 0.0) / total if total else summary.speed.input_wait_pct / 100
    rate = summary.speed.steady_samples_per_s / max(1 - waits, 0.02) / gpus
    types = {host.type for host in summary.cluster.hosts if host.gpus}
    known = prices.machine(types.pop() or "") if len(types) == 1 else None
    return {known.gpu_name if known else "": rate}


def job_samples(config: Config, records: int | None) -> int | None:
    """Laptop: samples of the whole job; None if unknown."""
    limit = config.train.max_steps
    if limit is not None:
        limit *= config.train.batch_size * config.train.accumulate_steps * (config.train.workers or 1)
    if records is None:
        return limit
    whole = records * config.train.epochs
    return whole if limit is None else min(whole, limit)


def efficiency_note() -> str:
    """Laptop: the assumption about time between tasks."""
    return f"{100 * EFFICIENCY:.0f} % of the CPUs' time reaches the chain (benchmarks/sleeping.py)"


def gpu_here() -> bool:
    """Laptop: whether PyTorch can use a GPU of this machine."""
    import torch

    return bool(torch.cuda.is_available())


def table_name(device: str) -> str | None:
    """Laptop: the price table's name of a GPU, from the driver's, such as NVIDIA A100-SXM4-40GB."""
    names = {machine.gpu_name for machine in prices.MACHINES.values() if machine.gpu_name}
    words = device.replace("-", " ").split()
    for name in sorted(names, key=len, reverse=True):
        model, _, memory = name.partition("-")
        if model in words and (not memory or any(word.startswith(memory) for word in words)):
            return name
    return None


def _gpu_rate(
    config: Config, columns: dict[str, Any], source_dir: Path | None
) -> tuple[dict[str, float], float, str]:
    """(G by GPU name, its spread, a note)."""
    from launcher.advise.size.gpu_profile import measure_gpu
    from stoker.recipe import SOURCE_FOLDER, load_recipe

    recipe = load_recipe(config.recipe, config.params, source_dir or SOURCE_FOLDER)
    measured = measure_gpu(config, recipe, columns, GPU_SECONDS)
    name = table_name(measured.name)
    what = f"{measured.samples_per_s:,.0f} samples/s on this machine's {measured.name}"
    if name is None:
        return {}, measured.spread, f"the training step: {what}; no instance type in the table has this GPU"
    return {name: measured.samples_per_s}, measured.spread, f"samples/s of the GPU: {what}, cached batches"
