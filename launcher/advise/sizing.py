"""Laptop: `submit.py size`: recommends host types and counts, and estimates the cost of a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.advise.size import measure
from launcher.advise.size.advice_table import Advice, advise
from launcher.advise.size.candidates import MAX_CPU_HOSTS, Candidate, Measured, Wanted
from launcher.job import open_job
from stoker.config.loading import Resolved, load
from stoker.errors import UsageError, nearest
from stoker.events import prices
from stoker.events.prices import price_list
from stoker.figures import duration

DEFAULT_GPU = "ml.g5.xlarge"
DEFAULT_CPUS = ("ml.c5.xlarge", "ml.c5.2xlarge", "ml.c5.4xlarge", "ml.c5.9xlarge")
SHOWN = 14


@dataclass(frozen=True)
class HostOptions:
    """Laptop: the command-line options that name candidate hosts."""

    gpu: list[str] = field(default_factory=list)
    cpu: list[str] = field(default_factory=list)
    gpu_samples_per_s: list[str] = field(default_factory=list)
    max_cpu_hosts: int = MAX_CPU_HOSTS
    cpu_speed: float = 1.0

    def rates(self) -> dict[str, float]:
        """Samples/s by GPU name, "" for all; empty if none was given.

        Raises:
            UsageError: an option is wrong.
        """
        rates, problems = parse_rates(self.gpu_samples_per_s)
        problems += list(_type_problems(self))
        if self.max_cpu_hosts < 0:
            problems.append(f"--max-cpu-hosts: must be at least 0 (got {self.max_cpu_hosts})")
        if not 0 < self.cpu_speed <= 10:
            problems.append(f"--cpu-speed: must be between 0 and 10 (got {self.cpu_speed})")
        if problems:
            raise UsageError(*problems)
        return rates


@dataclass(frozen=True)
class SizeOptions(HostOptions):
    """Laptop: the command-line options of `size`."""

    from_run: Path | None = None
    source_dir: Path | None = None
    write: bool = False
    as_json: bool = False


def size(config: Path | None, overrides: list[str], options: SizeOptions) -> int:
    """Laptop: measure the job, evaluate the candidates, and print the table and the recommendation.

    Returns:
        0, or 1 without a recommendation because no GPU's rate is known.

    Raises:
        UsageError: the request, the data or the chain is wrong.
    """
    rates = options.rates()
    if config is None:
        raise UsageError("no configuration file given; try source_dir/configs/digits.yaml")
    if config.suffix == ".py" or (resolved := load(config, overrides)).config.script is not None:
        raise UsageError("size: needs a recipe; for a script use `check`")
    settings = resolved.config.sagemaker
    wanted = wanted_of(resolved, options)
    if options.write and settings.groups:
        raise UsageError("--write: the job names its hosts in sagemaker.groups; edit them there")
    with told(options.as_json) as tell:
        measured = measure_job(resolved, options, rates, tell)
    advice = advise(measured, wanted, price_list(settings.prices))
    if options.as_json:
        print(json.dumps(as_json(advice), indent=1))
    else:
        show(advice)
    if options.write and advice.best is not None:
        write(config, advice.best)
    return 0 if advice.best is not None else 1


def measure_job(
    resolved: Resolved, options: SizeOptions, rates: dict[str, float], tell: Callable[[str], None]
) -> Measured:
    """The measurements of a run: the given one, or a short one on this machine."""
    if options.from_run is not None:
        return measure.from_run(options.from_run, resolved.config, rates)
    with measure.short_run(open_job(resolved, options.source_dir), tell) as run_dir:
        return measure.from_run(run_dir, resolved.config, rates, here=True)


def parse_rates(texts: list[str]) -> tuple[dict[str, float], list[str]]:
    """Laptop: parse `400` or `A10G=400` into samples/s by GPU name, and list the problems."""
    names = {machine.gpu_name for machine in prices.MACHINES.values() if machine.gpu_name}
    rates: dict[str, float] = {}
    problems = []
    for text in texts:
        name, sign, number = text.rpartition("=")
        if sign and name not in names:
            problems.append(f"--gpu-samples-per-s {text}: no GPU {name!r}; known: {', '.join(sorted(names))}")
            continue
        try:
            rates[name] = float(number)
        except ValueError:
            rates[name] = 0.0
        if not 0 < rates[name] < float("inf"):
            problems.append(
                f"--gpu-samples-per-s {text}: give samples per second of one GPU, such as 400 or A10G=400"
            )
    return rates, problems


def _type_problems(options: HostOptions) -> Iterator[str]:
    for flag, names, with_gpu in (("--gpu", options.gpu, True), ("--cpu", options.cpu, False)):
        for name in names:
            if prices.machine(name) is None:
                families = sorted({known.rpartition(".")[0] for known in prices.MACHINES})
                hint = nearest(name, prices.MACHINES, f"known are sizes of {', '.join(families)}")
                yield f"{flag} {name}: unknown instance type{hint}"
            elif prices.has_gpu(name) != with_gpu:
                yield f"{flag} {name}: has {'no' if with_gpu else 'a'} GPU"


def wanted_of(resolved: Resolved, options: SizeOptions) -> Wanted:
    """Laptop: the instance types to evaluate: requested, else configured, else the defaults."""
    settings = resolved.config.sagemaker
    own_gpu, own_cpu = settings.gpu.type, settings.cpu.type
    gpus = options.gpu or [own_gpu if own_gpu and prices.machine(own_gpu) else DEFAULT_GPU]
    cpus = options.cpu or list(dict.fromkeys([*([own_cpu] if own_cpu else []), *DEFAULT_CPUS]))
    return Wanted(
        gpu_types=tuple(gpus),
        cpu_types=tuple(cpus),
        gpu_hosts=max(settings.gpu.count, 1) if own_gpu else 1,
        max_cpu_hosts=options.max_cpu_hosts,
        configured=(own_gpu, own_cpu, settings.cpu.count if own_cpu else 0) if own_gpu else None,
        speed=options.cpu_speed,
    )


@contextmanager
def told(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Laptop: report progress on stderr, with a spinner on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None if quiet else print(f"measuring: {text} …", file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("measuring …") as status:
        yield lambda text: status.update(f"measuring: {text} …")


def show(advice: Advice) -> None:
    """Laptop: print the table, the recommendation, other remedies and the assumptions."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table(box=None, padding=(0, 1), title=advice.title, title_justify="left")
    for name, side in (("", "left"), ("hosts", "left"), ("samples/s", "right"), ("binds", "left")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for name in ("$/h", "$/1M", *(("time", "$ job") if advice.measured.samples else ())):
        table.add_column(name, justify="right")
    for one in advice.shown(SHOWN):
        table.add_row(*_cells(one, advice))
    console.print(table)
    for line in advice.lines:
        console.print(line, markup=False, soft_wrap=True)
    for note in advice.notes:
        console.print(f"  {note}", style="dim", markup=False, soft_wrap=True)


def _cells(one: Candidate, advice: Advice) -> list[str]:
    mark = "▶" if one == advice.best else "now" if advice.is_configured(one) else ""
    spread = max(one.high - one.samples_per_s, one.samples_per_s - one.low) / one.samples_per_s
    cells = [mark, one.hosts, f"{one.samples_per_s:,.0f} ±{100 * spread:.0f} %", advice.binds(one)]
    cells += [f"{one.usd_per_hour:.2f}", f"{one.usd_per_million_samples:.2f}"]
    if one.hours is not None and one.usd is not None:
        cells += [duration(3600 * one.hours), f"{one.usd:.2f}"]
    return cells


def as_json(advice: Advice) -> dict[str, Any]:
    """Laptop: the advice for programs."""
    measured = asdict(advice.measured)
    return {
        "measured": measured,
        "candidates": [asdict(one) for one in advice.table],
        "recommended": asdict(advice.best) if advice.best else None,
        "reasons": advice.lines,
        "notes": advice.notes,
        "prices_as_of": advice.prices.as_of,
        "estimated": True,
    }


def write(config: Path, best: Candidate) -> None:
    """Laptop: write the recommended hosts to the configuration and change nothing else."""
    from launcher.yaml_edit import with_values

    changes: dict[str, Any] = {
        "sagemaker.gpu.type": best.gpu_type,
        "sagemaker.gpu.count": best.gpu_hosts,
        "sagemaker.cpu.type": best.cpu_type,
        "sagemaker.cpu.count": max(best.cpu_hosts, 1),
    }
    if best.cpu_type is None:
        del changes["sagemaker.cpu.count"]
    before = config.read_text(encoding="utf-8")
    after = with_values(before, changes)
    draft = config.with_name(f".{config.name}.draft")
    draft.write_text(after, encoding="utf-8")
    load(draft)
    draft.replace(config)
    print(f"{config}: sagemaker.gpu and sagemaker.cpu set to {best.hosts}")
