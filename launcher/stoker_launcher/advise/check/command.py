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
from dataclasses import dataclass, field
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
        print(json.dumps(judging.as_json(loaders, seen, advice), indent=1))
    else:
        print("\n".join(judging.lines_of(loaders, seen, advice)))
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
    with tempfile.TemporaryDirectory(prefix="stoker-check-") as name:
        folder = Path(name)
        result = folder / watch.RESULT
        command = [sys.executable, str(watch.__file__), name, steps, str(path), *options.arguments]
        process = subprocess.Popen(
            command,
            env=os.environ
            | {"PYTHONDONTWRITEBYTECODE": "1"},  # no __pycache__ in the user's folder
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            with measuring(process):
                wait(process, result, options.timeout)
                code = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):  # what a killed script has left
                os.killpg(process.pid, signal.SIGKILL)
        if not result.is_file():
            if code is None:
                raise ScriptError(f"no result within --timeout {options.timeout:.0f} s")
            killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else "exited"
            raise ScriptError(f"the script {killed} before enough steps were measured")
        seen: dict[str, Any] = json.loads(result.read_text())
        sums = [json.loads(file.read_text()) for file in sorted(folder.glob("fetch-*.json"))]
    if seen["ended"] == "failed":
        before = f"{options.steps} steps" if options.steps else "enough steps"
        raise ScriptError(f"the script failed before {before} were measured: {seen['said']}")
    if seen["ended"] == "interrupted" and len(seen["takes"]) < 2 * LEAST_STEPS:
        raise ScriptError(f"too few batches within --timeout {options.timeout:.0f} s")
    return seen, sums


def wait(process: subprocess.Popen[bytes], result: Path, timeout_s: float) -> None:
    """Until the script has exited; after the timeout, it is interrupted, and writes what it has."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and not result.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    if process.poll() is None and not result.is_file():
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSING_S)


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
