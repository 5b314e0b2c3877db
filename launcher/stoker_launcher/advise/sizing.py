"""`submit.py size`: recommends hosts by the figures of a short run here, or of a finished run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker.config.loading import Resolved, load
from stoker.config.schema import CheckpointConfig, Config, TrackingConfig
from stoker.errors import UsageError, nearest
from stoker.events import kinds, prices
from stoker.events.bottleneck import MIN_STEPS, waiting
from stoker.events.prices import price_list
from stoker.events.summary import Summary, read_summary
from stoker.figures import dollars, duration, table
from stoker_launcher.advise.advice import (
    MAX_CPU_HOSTS,
    PARTS,
    Advice,
    Candidate,
    Measured,
    Wanted,
    advise,
    table_name,
)
from stoker_launcher.advise.measuring import measuring
from stoker_launcher.job import Job, open_job
from stoker_launcher.places.local import environment, started
from stoker_launcher.places.remote import HostGroup, training_group
from stoker_launcher.places.sagemaker.training_job import groups_of
from stoker_launcher.run_directory import PastRun, is_lost

DEFAULT_GPU = "ml.g5.xlarge"
DEFAULT_CPUS = ("ml.c5.xlarge", "ml.c5.2xlarge", "ml.c5.4xlarge", "ml.c5.9xlarge")
RUN_SECONDS = 45.0
"""Seconds of training; with the start of Ray and the end of the run, about a minute."""
LONGEST_S = 900.0
"""For a job whose steps take longer: until there are enough of them."""
CLOSING_S = 120.0
POLL_S = 0.5


@dataclass(frozen=True)
class HostOptions:
    gpu: list[str] = field(default_factory=list)
    cpu: list[str] = field(default_factory=list)
    gpu_samples_per_s: list[str] = field(default_factory=list)
    max_cpu_hosts: int = MAX_CPU_HOSTS
    cpu_speed: float = 1.0

    def rates(self) -> dict[str, float]:
        """Samples/s by GPU name, "" for all; empty if none was given."""
        rates: dict[str, float] = {}
        if problems := list(self._parsed(rates)):
            raise UsageError(*problems)
        return rates

    def _parsed(self, rates: dict[str, float]) -> Iterator[str]:
        """What is wrong; fills the rates."""
        names = {machine.gpu_name for machine in prices.MACHINES.values() if machine.gpu_name}
        for text in self.gpu_samples_per_s:
            name, sign, number = text.rpartition("=")
            if sign and name not in names:
                yield f"--gpu-samples-per-s {text}: no GPU {name!r}; known: {', '.join(sorted(names))}"
                continue
            try:
                rates[name] = float(number)
            except ValueError:
                rates[name] = 0.0
            if not 0 < rates[name] < float("inf"):
                how = "give samples per second of one GPU, such as 400 or A10G=400"
                yield f"--gpu-samples-per-s {text}: {how}"
        for flag, types, with_gpu in (("--gpu", self.gpu, True), ("--cpu", self.cpu, False)):
            for name in types:
                if (known := prices.machine(name)) is None:
                    yield f"{flag} {name}: unknown instance type{nearest(name, prices.MACHINES)}"
                elif bool(known.gpus) != with_gpu:
                    yield f"{flag} {name}: has {'no' if with_gpu else 'a'} GPU"
        if self.max_cpu_hosts < 0:
            yield f"--max-cpu-hosts: must be at least 0 (got {self.max_cpu_hosts})"
        if not 0 < self.cpu_speed <= 10:
            yield f"--cpu-speed: must be between 0 and 10 (got {self.cpu_speed})"


@dataclass(frozen=True)
class SizeOptions(HostOptions):
    from_run: Path | None = None
    source_dir: Path | None = None
    as_json: bool = False


def size(config: Path | None, overrides: list[str], options: SizeOptions) -> int:
    """Print the table and the recommendation; 1 without one, because no GPU's rate is known."""
    rates = options.rates()
    if config is None:
        raise UsageError("CONFIG: no configuration file given; try source_dir/configs/digits.yaml")
    if config.suffix == ".py" or (resolved := load(config, overrides)).config.script is not None:
        raise UsageError("size: needs a recipe; for a script use `check`")
    settings, google = resolved.config.sagemaker, resolved.config.vertex
    wanted = wanted_of(resolved, options)
    # The table knows machines by type; a type's own price goes before its group's.
    types = {group.name: group.type for group in groups_of(resolved.config)}
    own = sorted(settings.prices.items(), key=lambda item: item[0] not in types)
    known = {kind: price for key, price in own if prices.machine(kind := types.get(key, key))}
    if options.from_run is not None:
        measured = from_run(options.from_run, resolved.config, rates)
    else:
        with short_run(open_job(resolved, options.source_dir), not options.as_json) as run_dir:
            measured = from_run(run_dir, resolved.config, rates, here=True)
    if not types and any(hosts.machine_type for _, hosts in prices.google_groups(google)):
        note = "the table has SageMaker's machines and prices alone, not those of vertex in the configuration"
        measured.notes.insert(0, note)
    advice = advise(measured, wanted, price_list(known))
    if options.as_json:
        print(json.dumps(as_json(advice), indent=1))
    else:
        show(advice)
    return 0 if advice.best is not None else 1


def wanted_of(resolved: Resolved, options: SizeOptions) -> Wanted:
    """The instance types to evaluate: requested, else configured, else the defaults."""
    train, others = _configured(resolved.config)
    for group in [
        *([train] if train and not options.gpu else []),
        *(() if options.cpu else others),
    ]:
        if prices.machine(group.type) is None:
            flag = "--gpu" if group is train else "--cpu"
            raise UsageError(
                f"{group.key}.type: {group.type} is not known here; name other types with {flag}"
            )
    cpu = (others[0].type, others[0].count) if others else (None, 0)
    trains = train.name if train else resolved.config.cluster.gpu_group or "gpu"
    listed = set(resolved.config.data.preprocess_on or [trains, "others"])
    if trains not in listed and not options.max_cpu_hosts:
        raise UsageError("data.preprocess_on: no host is left for it with --max-cpu-hosts 0")
    return Wanted(
        gpu_types=tuple(options.gpu or [train.type if train else DEFAULT_GPU]),
        cpu_types=tuple(
            options.cpu or dict.fromkeys([*(group.type for group in others), *DEFAULT_CPUS])
        ),
        gpu_hosts=max(train.count, 1) if train else 1,
        max_cpu_hosts=options.max_cpu_hosts if listed != {trains} else 0,
        # The table has one type of CPU hosts per cluster.
        configured=(train.type, *cpu) if train and len(others) < 2 else None,
        speed=options.cpu_speed,
        train_workers=resolved.config.train.workers,
        gpu_hosts_preprocess=trains in listed,
    )


def _configured(config: Config) -> tuple[HostGroup | None, list[HostGroup]]:
    """The hosts with the GPUs that train, and the others."""
    groups = groups_of(config)
    trains = training_group(config, groups)
    if groups and trains is None:
        names = ", ".join(group.name for group in groups)
        raise UsageError(f"cluster.gpu_group: cannot tell which group trains; name one of {names}")
    train = next((group for group in groups if group.name == trains and group.gpus != 0), None)
    return train, [group for group in groups if group is not train]


@contextmanager
def short_run(job: Job, tell: bool) -> Iterator[Path]:
    """Train the job here for `RUN_SECONDS`; yields its run directory, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="stoker-size-") as scratch:
        run_dir, config = Path(scratch) / job.name, job.resolved.config
        # Nothing of it is kept, or sent elsewhere.
        every = config.tracking.log_every_steps
        changes = {
            "output_dir": scratch,
            "checkpoint": CheckpointConfig(save_top_k=0, keep=1),
            "tracking": TrackingConfig(tensorboard=False, log_every_steps=every),
            "export": [],
            "data": config.data.model_copy(update={"preprocess_on": []}),  # groups are not here
        }
        alone = replace(job.resolved, config=config.model_copy(update=changes))
        replace(job, resolved=alone).stage(run_dir / "code")
        with (Path(scratch) / "screen.txt").open("w+") as screen:
            variables = environment(run_dir)
            process = started(run_dir / "code", variables, stdout=screen, stderr=subprocess.STDOUT)
            with measuring(process):
                stopped = _train(process, run_dir, tell)
            screen.seek(0)
            _refuse_failed(process.returncode, stopped, run_dir, screen.read())
        yield run_dir


def _train(process: subprocess.Popen[bytes], run_dir: Path, tell: bool) -> bool:
    """Wait for enough steps, then end the run; whether it was ended, not by itself."""

    def say(what: str) -> None:
        if tell:
            text = f"measuring: a short run of the job on this machine: {what} …"
            print(text, file=sys.stderr, flush=True)

    run, began, first = PastRun(run_dir), time.monotonic(), 0.0
    say("starting")
    while process.poll() is None:
        now, steps = time.monotonic(), int(run.summary().get("steps") or 0)
        if steps and not first:
            first = now
            say(f"training for {RUN_SECONDS:.0f} s")
        if (first and now > first + RUN_SECONDS and steps >= MIN_STEPS) or now > began + LONGEST_S:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):  # then `measuring` kills it
                process.wait(CLOSING_S)
            return True
        time.sleep(POLL_S)
    return False


def _refuse_failed(code: int, stopped: bool, run_dir: Path, screen: str) -> None:
    errors = [line.removeprefix("error: ") for line in screen.splitlines() if line[:7] == "error: "]
    if code == 2:
        raise UsageError(*errors or ["size: the short run was refused"])
    # While it ends by itself, nothing handles the signal any more.
    if code and not (stopped and code in (143, -signal.SIGTERM)):
        summary = PastRun(run_dir).summary()
        why = str(summary.get("error") or "") or "; ".join(errors) or f"exit code {code}"
        raise UsageError(f"size: the short run failed: {why}")


def from_run(run: Path, config: Config, rates: Mapping[str, float], here: bool = False) -> Measured:
    """The figures of a run, or of a short run `here`.

    `config`: the job to size, provides the epochs. `rates`: G by GPU name, "" for all; others are the run's.
    """
    name = "the short run" if here else f"--from {run}"
    file = run if run.is_file() else run / "summary.json"
    if not file.is_file():
        raise UsageError(f"{name}: no run there (no summary.json)")
    summary = read_summary(file)
    speed = summary.speed
    if (steps := speed.steps or summary.steps) < MIN_STEPS or not speed.steady_samples_per_s:
        elsewhere = "; run the job where it trains faster, or for more epochs, and pass --from RUN"
        raise UsageError(
            f"{name}: too short to judge ({steps} steps; at least {MIN_STEPS} are needed)"
            + (elsewhere if here else "")
        )
    cpu_s = sum(float(stage.get("cpu_ms_per_sample", 0)) for stage in summary.chain) / 1000
    if cpu_s <= 0:
        raise UsageError(f"{name}: its summary.json has no cost of the chain")
    found, note = dict(rates), "samples/s of the GPU: from --gpu-samples-per-s"
    if not rates:
        found, note = rate_of_run(summary, here)
    trained = [row for row in summary.records.epochs if "trained" in row]
    each = sum(row["read"] - row["quarantined"] for row in trained) / max(len(trained), 1)
    source = (
        "chain and bytes: from a short run on this machine, on local data, without waiting for S3; one"
        " vCPU counts as one core here, correct it with --cpu-speed"
        if here
        else f"chain and bytes: from the run {run} on its hosts; correct for other CPUs with --cpu-speed"
    )
    return Measured(
        cpu_s=cpu_s,
        bytes_per_sample=speed.bytes_per_sample,
        gpu_samples_per_s=found,
        stages=list(summary.chain),
        notes=[source, *([note] if note else []), *_caveats(file, summary)],
        # Where steps end the job, its samples depend on the number of GPUs.
        samples=None if config.train.max_steps else round(each) * config.train.epochs or None,
    )


def _caveats(file: Path, summary: Summary) -> Iterator[str]:
    if summary.status == "failed" or is_lost(file.parent):
        yield f"the run failed: {summary.error or 'it ended without a result'}"
    attempts = kinds.json_lines(file.with_name("events.jsonl"), kinds.AttemptStarted)
    plans = [(attempt.get("start") or {}).get("plan") or {} for attempt in attempts]
    # A data plan names a dataset of Ray Data in place of a fingerprint.
    if any(str(plan.get("fingerprint", "")).endswith("Dataset") for plan in plans):
        yield (
            "without the ray.data.Dataset's own operators, whose CPU time no run measures: more CPUs are"
            " needed"
        )


def rate_of_run(summary: Summary, here: bool) -> tuple[dict[str, float], str]:
    """G of one GPU, under its name, and a note; empty if the run had no GPUs."""
    gpus = sum(host.gpus for host in summary.cluster.at_once())
    gpus = min(gpus, summary.train_workers or gpus)
    if not gpus:
        return {}, ""
    rate = summary.speed.steady_samples_per_s / max(1 - waiting(summary), 0.02) / gpus
    if here:
        import torch

        device = torch.cuda.get_device_name(0)
        names, where = {table_name(device)}, f"this machine's {device}"
    else:
        types = {host.type or "unknown type" for host in summary.cluster.hosts if host.gpus}
        names, where = (
            set(map(gpu_of, types)),
            f"a GPU of the run's hosts ({', '.join(sorted(types))})",
        )
    if len(names) == 1 and (name := names.pop()):
        return {name: rate}, f"samples/s of the {name}: {rate:,.0f} on {where}, without waiting"
    instead = "no instance type is known to have this GPU; if one has, --gpu-samples-per-s NAME=RATE says so"
    return {}, f"the training step: {rate:,.0f} samples/s on {where}; {instead}"


def gpu_of(instance_type: str) -> str | None:
    """The price table's name of the GPUs of SageMaker's and Google's machines."""
    known = prices.machine(instance_type)
    accelerator = prices.built_in_accelerator(instance_type) or ""
    return known.gpu_name if known else table_name(accelerator.replace("_", " "))


def show(advice: Advice) -> None:
    if rows := advice.table:
        print("hosts for this job, cheapest per sample first")
        head = ["", "hosts", "samples/s", "binds", "$/h", "$/1M"]
        head += ["time", "$ job"] if rows[0].hours is not None else []
        print(table(head, [_cells(row, advice) for row in rows], left=("hosts",)))
    print("\n".join([*advice.lines, *(f"  {note}" for note in advice.notes)]))


def _cells(one: Candidate, advice: Advice) -> list[str]:
    mark = "▶" if one == advice.best else "now" if advice.is_configured(one) else ""
    cost = [dollars(one.usd_per_hour), dollars(one.usd_per_million_samples)]
    if one.hours is not None and one.usd is not None:
        cost += [duration(3600 * one.hours), dollars(one.usd)]
    return [mark, one.hosts, f"{one.samples_per_s:,.0f}", PARTS[one.binds], *cost]


def as_json(advice: Advice) -> dict[str, Any]:
    return {
        "measured": asdict(advice.measured),
        "candidates": [asdict(one) for one in advice.table],
        "recommended": asdict(advice.best) if advice.best else None,
        "reasons": advice.lines,
        "notes": advice.notes,
        "estimated": True,
    }
