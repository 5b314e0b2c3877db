"""`submit.py check train.py`: measures how long an unchanged script waits for data."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import ScriptError, UsageError, nearest_file
from stoker.events.prices import price_list
from stoker.hosts.raynode import end_with_parent
from stoker_launcher.advise.advice import Advice, Wanted, advise
from stoker_launcher.advise.check import verdict as judging
from stoker_launcher.advise.check import watch
from stoker_launcher.advise.check.timeline import LEAST_STEPS
from stoker_launcher.advise.measuring import measuring
from stoker_launcher.advise.sizing import DEFAULT_CPUS, DEFAULT_GPU, HostOptions

CLOSING_S = 30.0
"""How long the script may take to exit once enough steps are measured or it is interrupted."""


@dataclass(frozen=True)
class CheckOptions(HostOptions):
    arguments: list[str] = field(default_factory=list)
    steps: int | None = None
    timeout: float = 900.0
    as_json: bool = False


def check(script: Path | None, options: CheckOptions) -> int:
    """Print the verdict; 1 if the script failed, 2 if the figures are too uncertain for a verdict."""
    rates = options.rates()
    if options.steps is not None and options.steps < LEAST_STEPS:
        raise UsageError(f"--steps: must be at least {LEAST_STEPS} (got {options.steps})")
    if options.timeout <= 0:
        raise UsageError(f"--timeout: must be more than 0 seconds (got {options.timeout:g})")
    path = existing(script)
    try:
        seen, sums = observe(path, options)
    except ScriptError as error:
        print(f"error: {path.name}: {error}", file=sys.stderr)
        return 1
    loaders = judging.checked(seen, sums, path.name, options.steps)
    advice = advised(loaders[0], seen, rates, options)
    if options.as_json:
        print(json.dumps(as_json(loaders, seen, advice), indent=1))
    else:
        show(loaders, seen, advice)
    return 0 if loaders[0].certain else 2


def existing(script: Path | None) -> Path:
    if script is None:
        raise UsageError("SCRIPT: none given; run: check train.py")
    if script.suffix in (".yaml", ".yml"):
        raise UsageError(
            f"{script}: is a job's configuration; measure it with `size {shlex.quote(str(script))}`"
        )
    if script.is_file():
        return script
    raise UsageError(f"{script}: no such script{nearest_file(script.name, script.parent, '*.py')}")


def observe(path: Path, options: CheckOptions) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the script until enough steps are measured; its output goes to stderr.

    Returns:
        The observations of the loaders, and the time spent by each fetching process.
    """
    steps = "auto" if options.steps is None else str(options.steps)
    with tempfile.TemporaryDirectory(prefix="stoker-check-") as folder:
        command = [
            sys.executable,
            str(watch.__file__),
            folder,
            steps,
            str(path),
            *options.arguments,
        ]
        # Leave no __pycache__ in the user's folder.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        with started(command, environment) as process:
            code = wait(process, Path(folder) / watch.RESULT, options.timeout)
        try:
            seen: dict[str, Any] = json.loads((Path(folder) / watch.RESULT).read_text())
        except OSError:
            if code is None:
                raise ScriptError(f"no result within --timeout {options.timeout:.0f} s") from None
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else "exited without a result"
            )
            raise ScriptError(f"the script {how} before enough steps were measured") from None
        sums = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("fetch-*.json"))]
    if seen["ended"] == "failed":
        before = f"{options.steps} steps" if options.steps else "enough steps"
        raise ScriptError(f"the script failed before {before} were measured: {seen['said']}")
    if code is None and seen["ended"] == "interrupted" and len(seen["takes"]) < 2 * LEAST_STEPS:
        steps_seen = max((loader["batches"] for loader in seen["loaders"]), default=0)
        what = f"only {steps_seen} batches" if steps_seen else "no result"
        raise ScriptError(f"{what} within --timeout {options.timeout:.0f} s")
    return seen, sums


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        with measuring(process):
            try:
                yield process
            except KeyboardInterrupt:
                # The script is outside the terminal's process group, so Ctrl-C must be forwarded.
                with contextlib.suppress(
                    ProcessLookupError, subprocess.TimeoutExpired, KeyboardInterrupt
                ):
                    os.killpg(process.pid, signal.SIGINT)
                    process.wait(CLOSING_S)
                raise
    finally:
        with contextlib.suppress(ProcessLookupError):  # what a killed script has left
            os.killpg(process.pid, signal.SIGKILL)


def wait(process: subprocess.Popen[bytes], result: Path, timeout_s: float) -> int | None:
    """The script's exit code; None if it was interrupted or did not exit."""
    deadline = time.monotonic() + timeout_s
    interrupted = closing = False
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(0.2)
            return None if interrupted else code
        if not closing and result.is_file():
            closing, deadline = True, time.monotonic() + CLOSING_S
        if not closing and not interrupted and time.monotonic() > deadline - 0.4:
            interrupted, deadline = True, time.monotonic() + CLOSING_S
            os.killpg(process.pid, signal.SIGINT)
    return None


def advised(
    one: judging.Checked, seen: dict[str, Any], rates: dict[str, float], options: CheckOptions
) -> Advice | None:
    found = judging.measured(one, rates, seen["gpu"])
    if found is None or not one.certain or not (one.waits or options.gpu or options.cpu):
        return None
    wanted = Wanted(
        gpu_types=tuple(options.gpu or [judging.usual_gpu_host(seen["gpu"], DEFAULT_GPU)]),
        cpu_types=tuple(options.cpu or DEFAULT_CPUS),
        max_cpu_hosts=options.max_cpu_hosts,
        speed=options.cpu_speed,
    )
    return advise(found, wanted, price_list())


def show(loaders: list[judging.Checked], seen: dict[str, Any], advice: Advice | None) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    first = loaders[0]

    def line(text: str, **style: Any) -> None:
        console.print(text, markup=False, soft_wrap=True, **style)

    for text in judging.headline(first):
        line(text, style="bold")
    line(f"  {loader_line(first)}")
    for other in loaders[1:]:
        waits = f", {100 * other.share.value:.0f} % waiting" if other.certain else ""
        line(f"  also {loader_line(other)}{waits}")
    fetched = first.fetched
    if fetched is None:
        line("CPU per sample: not measured; this loader does not fetch in torch's own workers")
    else:
        waiting = f", and {1000 * fetched.blocked_s:.2f} ms waiting (storage, network, a busy CPU)"
        blocked = fetched.blocked_s > judging.BLOCKED * fetched.whole_s
        line(f"CPU per sample: {1000 * fetched.cpu_s:.2f} ms{waiting if blocked else ''}")
    helpful = {
        "what would help on this machine": judging.help_here(first, seen["cpus"], seen["idle"])
    }
    for title, texts in (helpful | {"CPU hosts": advice.lines if advice else []}).items():
        for text in [title, *(f"  {text}" for text in texts)] if texts else []:
            line(text)
    for note in notes(loaders, seen, advice):
        line(f"  {note}", style="dim")


def loader_line(one: judging.Checked) -> str:
    loader = one.loader
    size = f"{one.samples_per_step:.0f} samples"
    if one.bytes_per_step:
        size += f", {one.bytes_per_step / 1000:,.0f} kB"
    return f"{loader.place}: {loader.dataset}, batches of {size}, num_workers={loader.num_workers}"


def notes(loaders: list[judging.Checked], seen: dict[str, Any], advice: Advice | None) -> list[str]:
    first, gpu = loaders[0], seen["gpu"]
    uneven = judging.UNSURE < first.share.spread < judging.UNCERTAIN
    by = (
        f"measured with CUDA events ({gpu})"
        if gpu
        else "time in next() relative to the time between calls"
    )
    said = {
        "the loader is the one iterated most": not first.loader.trains,
        "epochs are short, so the figures include worker start-up": first.whole_epochs,
        "few or uneven steps: a longer run (--steps, more data) gives a more reliable figure": uneven,
        "the script was stopped at --timeout": seen["ended"] == "interrupted",
        "batch_size=None: samples per batch are the rows of its first tensor": not first.loader.batch_size,
        f"waiting: {by}": True,
    }
    return [*(text for text, holds in said.items() if holds), *(advice.notes if advice else [])]


def as_json(
    loaders: list[judging.Checked], seen: dict[str, Any], advice: Advice | None
) -> dict[str, Any]:
    return {
        "loaders": [
            {**asdict(one), "compute_s": one.compute_s, "trains": one.loader.trains}
            for one in loaders
        ],
        "verdict": judging.headline(loaders[0]),
        "help": judging.help_here(loaders[0], seen["cpus"], seen["idle"]),
        "cpus": seen["cpus"],
        "idle": seen["idle"],
        "gpu": seen["gpu"],
        "ended": seen["ended"],
        "candidates": [asdict(one) for one in advice.table] if advice else [],
        "recommended": asdict(advice.best) if advice and advice.best else None,
        "reasons": advice.lines if advice else [],
        "notes": notes(loaders, seen, advice),
        "prices_as_of": advice.prices.as_of if advice else None,
    }
