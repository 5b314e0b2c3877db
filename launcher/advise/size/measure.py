"""Laptop: a job's costs per sample, as a run of it measured them: a finished one, or a short one here."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from launcher.advise.size.candidates import EFFICIENCY, Measured
from launcher.job import COMMAND, Job
from launcher.places.local import environment
from launcher.run_directory import PastRun
from stoker.config.schema import CheckpointConfig, Config, TrackingConfig
from stoker.errors import UsageError
from stoker.events import prices
from stoker.events.advice import MIN_STEPS
from stoker.events.summary import Summary, read_summary
from stoker.hosts.raynode import end_with_parent

RUN_SECONDS = 45.0
"""Of training; with the start of Ray and the end of the run about a minute."""
LONGEST_S = 900.0
"""For a job whose steps take longer: until there are enough of them."""
CLOSING_S = 120.0
POLL_S = 0.5
RECEIVE_S, FEED_S = 0.00002, 0.0003
"""κ and h of a sample of `RECEIVE_BYTES`: docs/performance.md."""
RECEIVE_BYTES = 150_528
ASSUMED_SPREAD = 0.5
RUN_SPREAD = 0.1
"""Of figures from a run: throughput of the same job varies this much between runs."""


@contextmanager
def short_run(job: Job, tell: Callable[[str], None]) -> Iterator[Path]:
    """Train the job here for `RUN_SECONDS`; yields its run directory, which is removed afterwards.

    Nothing of it is kept or sent: no checkpoints, exports or tracking.

    Raises:
        UsageError: the job is wrong or failed, or takes too few steps in `LONGEST_S`.
    """
    with tempfile.TemporaryDirectory(prefix="stoker-size-") as scratch:
        run_dir = Path(scratch) / job.name
        _alone(job, scratch).stage(run_dir / "code")
        with (Path(scratch) / "screen.txt").open("w+") as screen:
            process = subprocess.Popen(
                [sys.executable, *COMMAND[1:]],
                cwd=run_dir / "code",
                env=environment(run_dir),
                stdout=screen,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
            try:
                stopped = _train(process, run_dir, tell)
            finally:
                process.terminate()
                process.wait()
            screen.seek(0)
            _refuse_failed(process.returncode, stopped, run_dir, screen.read())
        yield run_dir


def _alone(job: Job, scratch: str) -> Job:
    """The job without anything that it would keep or send elsewhere."""
    config = job.resolved.config
    changes = {
        "output_dir": scratch,
        "checkpoint": CheckpointConfig(save_top_k=0, keep=1),
        "tracking": TrackingConfig(tensorboard=False, log_every_steps=config.tracking.log_every_steps),
        "export": [],
    }
    return replace(job, resolved=replace(job.resolved, config=config.model_copy(update=changes)))


def _train(process: subprocess.Popen[bytes], run_dir: Path, tell: Callable[[str], None]) -> bool:
    """Wait for enough steps, then end the run; whether it was ended, not by itself."""
    run, began, first = PastRun(run_dir), time.monotonic(), 0.0
    tell("a short run of the job on this machine: starting")
    while process.poll() is None:
        now, steps = time.monotonic(), int(run.summary().get("steps") or 0)
        if steps and not first:
            first = now
            tell(f"a short run of the job on this machine: training for {RUN_SECONDS:.0f} s")
        if (first and now > first + RUN_SECONDS and steps >= MIN_STEPS) or now > began + LONGEST_S:
            process.terminate()
            try:
                process.wait(CLOSING_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return True
        time.sleep(POLL_S)
    return False


def _refuse_failed(code: int, stopped: bool, run_dir: Path, screen: str) -> None:
    errors = [line.removeprefix("error: ") for line in screen.splitlines() if line.startswith("error: ")]
    if code == 2:
        raise UsageError(*errors or ["size: the short run was refused"])
    if code and not (stopped and code == 143):
        summary = PastRun(run_dir).summary()
        why = str(summary.get("error") or "") or "; ".join(errors) or f"exit code {code}"
        raise UsageError(f"size: the short run failed: {why}")


def from_run(run: Path, config: Config, rates: Mapping[str, float], here: bool = False) -> Measured:
    """The figures of a run's summary.json.

    Args:
        run: its directory.
        config: the job to size; provides the epochs.
        rates: G by GPU name, "" for all; others are taken from the run.
        here: whether it was a short run on this machine.

    Raises:
        UsageError: there is no run, it was too short, or its chain was not measured.
    """
    name = "the short run" if here else f"--from {run}"
    file = run if run.is_file() else run / "summary.json"
    if not file.is_file():
        raise UsageError(f"{name}: no run there (no summary.json)")
    summary = read_summary(file)
    speed = summary.speed
    if summary.steps < MIN_STEPS or not speed.steady_samples_per_s:
        raise UsageError(
            f"{name}: too short to judge ({summary.steps} steps; at least {MIN_STEPS} are needed)"
            + (
                "; run the job where it trains faster, or for more epochs, and pass --from RUN"
                if here
                else ""
            )
        )
    cpu_s = sum(float(stage.get("cpu_ms_per_sample", 0)) for stage in summary.chain) / 1000
    if cpu_s <= 0:
        raise UsageError(f"{name}: its summary.json has no cost of the chain")
    found, note = (
        (dict(rates), "samples/s of the GPU: from --gpu-samples-per-s")
        if rates
        else (_rate_here(summary) if here else rate_of_run(summary))
    )
    scale = speed.bytes_per_sample / RECEIVE_BYTES
    records = summary.records
    passes = max(len([e for e in records.epochs if "trained" in e]), 1)
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
            "chain and bytes: from a short run on this machine, on local data, without waiting for S3; one"
            " vCPU counts as one core here, correct it with --cpu-speed"
            if here
            else f"chain and bytes: from the run {run} on its hosts; correct for other CPUs with --cpu-speed",
            f"receiving: assumed {1000 * (RECEIVE_S + FEED_S) * scale:.2f} ms of CPU per sample ± 50 %;"
            " runs do not measure it",
            *([note] if note else []),
            *_uncounted(file),
            efficiency_note(),
        ],
    )


def _uncounted(summary: Path) -> list[str]:
    """A note if the run read a `ray.data.Dataset`, which its data plan names in place of a fingerprint."""
    events = summary.with_name("events.jsonl")
    lines = events.read_text(encoding="utf-8").splitlines() if events.is_file() else []
    attempts = [json.loads(line) for line in lines if '"event": "attempt"' in line]
    plans = [attempt.get("start", {}).get("plan") or {} for attempt in attempts]
    if not any(str(plan.get("fingerprint", "")).endswith("Dataset") for plan in plans):
        return []
    return [
        "without the ray.data.Dataset's own operators, whose CPU time no run measures: more CPUs are needed"
    ]


def rate_of_run(summary: Summary) -> tuple[dict[str, float], str]:
    """G of one GPU, under its name, and a note; empty if the run had no GPUs."""
    gpus = sum(host.gpus for host in summary.cluster.at_once())
    if not gpus:
        return {}, ""
    terms = summary.speed.step_terms_ms
    total = sum(terms.values())
    waits = 1 - terms.get("compute", 0.0) / total if total else summary.speed.input_wait_pct / 100
    rate = summary.speed.steady_samples_per_s / max(1 - waits, 0.02) / gpus
    types = {host.type for host in summary.cluster.hosts if host.gpus}
    known = prices.machine(types.pop() or "") if len(types) == 1 else None
    name = known.gpu_name if known else ""
    return {name: rate}, "samples/s of the GPU: from the run, without its waiting"


def _rate_here(summary: Summary) -> tuple[dict[str, float], str]:
    """As `rate_of_run`, under the name of this machine's GPU."""
    rates = rate_of_run(summary)[0]
    if not rates:
        return {}, ""
    import torch

    device, rate = torch.cuda.get_device_name(0), next(iter(rates.values()))
    if name := table_name(device):
        return {name: rate}, f"samples/s of the GPU: {rate:,.0f} on this machine's {device}, without waiting"
    what = f"{rate:,.0f} samples/s on this machine's {device}"
    return {}, f"the training step: {what}; no instance type in the table has this GPU"


def job_samples(config: Config, records: int | None) -> int | None:
    """Samples of the whole job; None if unknown."""
    limit = config.train.max_steps
    if limit is not None:
        limit *= config.train.batch_size * config.train.accumulate_steps * (config.train.workers or 1)
    if records is None:
        return limit
    whole = records * config.train.epochs
    return whole if limit is None else min(whole, limit)


def efficiency_note() -> str:
    return f"{100 * EFFICIENCY:.0f} % of the CPUs' time reaches the chain (benchmarks/sleeping.py)"


def table_name(device: str) -> str | None:
    """The price table's name of a GPU, from the driver's, such as NVIDIA A100-SXM4-40GB."""
    names = {machine.gpu_name for machine in prices.MACHINES.values() if machine.gpu_name}
    words = device.replace("-", " ").split()
    for name in sorted(names, key=len, reverse=True):
        model, _, memory = name.partition("-")
        if model in words and (not memory or any(word.startswith(memory) for word in words)):
            return name
    return None
