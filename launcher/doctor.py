"""Laptop: `submit.py doctor [JOB]`: checks this machine and the job's AWS account. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from launcher import runs
from launcher.job import examples_root
from launcher.scripts import as_overrides
from stoker import figures
from stoker.config.loading import load
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.hosts import requirements

LEAST_SHM_BYTES = 512 * 2**20
"""With less, as in a container with default settings, Ray spills its object store to disk."""
LEAST_DISK_BYTES = 2 * 2**30
FULLEST = 0.95
"""Ray does not write objects to a fuller disk."""
PORTS = 64
"""About the number of ports that a small one-machine cluster uses."""
DRIVER_TIMEOUT_S = 5.0
Mark = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """Laptop: the result of one check; a `FAIL` makes the exit code 1."""

    mark: Mark
    what: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        return f"{self.mark:<5} {self.what:<14} {self.found}{f': {self.remedy}' if self.remedy else ''}"


def doctor(job: Path | None, overrides: list[str]) -> int:
    """Laptop: run the checks and print each finding as it arrives.

    Args:
        job: a configuration, whose folders and instance types are also checked.
        overrides: `key=value` overrides of the configuration.

    Returns:
        0, or 1 if something must be fixed first.

    Raises:
        UsageError: the configuration is wrong.
    """
    file, own = as_overrides(job, None)
    config = load(file, [*own, *overrides]).config
    failed = False
    for check in CHECKS:
        for finding in check(config):
            print(finding.line(), flush=True)
            failed |= finding.mark == "FAIL"
    return int(failed)


def python(config: Config) -> Iterator[Finding]:
    """Laptop: the Python version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if "{}.{}".format(*sys.version_info) in requirements.PYTHONS:
        yield Finding("ok", "Python", version)
    else:
        remedy = f"install {requirements.SUPPORTED_PYTHONS} and recreate the environment"
        yield Finding("FAIL", "Python", version, remedy)


def packages(config: Config) -> Iterator[Finding]:
    """Laptop: the required packages."""
    absent = requirements.unsatisfied("\n".join(needed_here()))
    ray = [line for line in absent if requirements.canonical(line).startswith("ray")]
    version = requirements.image_pins().get("ray", "absent")
    if ray:
        yield Finding(
            "FAIL", "Ray", version, f"pip install '{ray[0]}'; all hosts of a job need the same version"
        )
    else:
        yield Finding("ok", "Ray", version)
    others = [line for line in absent if line not in ray]
    if others:
        install = " ".join(f"'{line}'" for line in others)
        yield Finding("FAIL", "packages", f"{len(others)} missing or too old", f"pip install {install}")


def needed_here() -> list[str]:
    """Laptop: the requirements of the installed package, without extras."""
    try:
        lines = metadata.requires("stoker") or []
    except metadata.PackageNotFoundError:  # an uninstalled checkout
        lines = (examples_root() / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "extra ==" not in line]


def torch(config: Config) -> Iterator[Finding]:
    """Laptop: whether torch and torchvision were built for each other."""
    pins = requirements.image_pins()
    if not {"torch", "torchvision"} <= pins.keys():
        return  # reported by `packages`
    pair = f"{pins['torch']} with torchvision {pins['torchvision']}"
    wants = [line for line in metadata.requires("torchvision") or [] if re.match(r"torch\b(?!-)", line)]
    builds = {pins[name].partition("+")[2] for name in ("torch", "torchvision")} - {""}
    if wrong := requirements.unsatisfied("\n".join(wants)):
        yield Finding("FAIL", "torch", pair, f"torchvision needs {wrong[0]}; install both in one command")
    elif len(builds) > 1:
        yield Finding("FAIL", "torch", pair, "two builds; install both from one index in one command")
    else:
        yield Finding("ok", "torch", pair)


def cuda_of_torch() -> str | None:
    """Laptop: the CUDA version of torch, read from a file because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    cuda: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    return cuda


def gpus(config: Config, built_for: Callable[[], str | None] = cuda_of_torch) -> Iterator[Finding]:
    """Laptop: NVIDIA GPUs, and whether the driver supports this build of torch."""
    if shutil.which("nvidia-smi") is None:
        if Path("/dev/nvidiactl").exists():
            yield Finding("FAIL", "GPU", "found, but nvidia-smi is missing", "install the driver's utilities")
        else:
            yield Finding(
                "note", "GPU", "none", "local jobs train on the CPU; for GPUs use --on ray or sagemaker"
            )
        return
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        names, whole = (
            subprocess.run(
                command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=True
            ).stdout
            for command in (query, query[:1])
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", "") or str(error)
        yield Finding(
            "FAIL", "GPU", f"nvidia-smi: {said.strip().splitlines()[0]}", "reinstall the NVIDIA driver"
        )
        return
    found = [line.strip() for line in names.splitlines() if line.strip()]
    about = f"{len(found)} × {found[0].replace(', ', ', driver ')}" if found else "none"
    runs_up_to = re.search(r"CUDA (?:\w+ )?Version:\s*(\d+)", whole)
    cuda = built_for()
    if not found:
        yield Finding("note", "GPU", "nvidia-smi lists none", "start the container with --gpus all")
    elif cuda is None:
        yield Finding("FAIL", "GPU", f"{about}; torch is built without CUDA", "install a CUDA build of torch")
    elif runs_up_to and int(runs_up_to[1]) < int(cuda.partition(".")[0]):
        remedy = f"update the driver, or install torch for CUDA {runs_up_to[1]}"
        yield Finding("FAIL", "GPU", f"{about}; torch is built for CUDA {cuda}", remedy)
    else:
        yield Finding("ok", "GPU", f"{about}, torch for CUDA {cuda}")


def shared_memory(config: Config, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108 - only measured
    """Laptop: the size of shared memory, which holds Ray's object store on Linux."""
    if not folder.is_dir():
        return
    size = shutil.disk_usage(folder).total
    mark: Mark = "ok" if size >= LEAST_SHM_BYTES else "FAIL"
    remedy = "" if mark == "ok" else "start the container with --shm-size=2g or more"
    yield Finding(mark, str(folder), figures.size(size), remedy)


def disk(config: Config) -> Iterator[Finding]:
    """Laptop: free space and write permission for runs and for Ray's files."""
    output = Path(config.output_dir).resolve()
    ray = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    for what, key, folder in (("results", "output_dir=…", output), ("Ray's files", "RAY_TMPDIR", ray)):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        usage = shutil.disk_usage(there)
        free = f"{figures.size(usage.free)} free in {folder}"
        try:
            runs.refuse_unwritable(folder)
        except UsageError as error:
            yield Finding(
                "FAIL", what, str(error).removeprefix("output_dir: "), f"choose another folder with {key}"
            )
            continue
        if usage.free < LEAST_DISK_BYTES or usage.used > FULLEST * (usage.used + usage.free):
            yield Finding("FAIL", what, free, f"free up space, or choose another disk with {key}")
        else:
            yield Finding("ok", what, free)


def ports(config: Config) -> Iterator[Finding]:
    """Laptop: free ports on loopback."""
    try:
        with ExitStack() as sockets:
            for _ in range(PORTS):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", 0))
    except OSError as error:
        remedy = "stop the processes that hold them (ss -tlnp), or raise `ulimit -n`"
        yield Finding("FAIL", "ports", f"fewer than {PORTS} free on 127.0.0.1 ({error.strerror})", remedy)
    else:
        yield Finding("ok", "ports", "free on 127.0.0.1")


def namespaces(config: Config) -> Iterator[Finding]:
    """Laptop: the namespaces that `--on rehearsal` needs to emulate hosts."""
    from launcher.rehearsal.isolation import unshare_command

    try:
        yield Finding(
            "ok", "rehearsal", f"namespaces {'as a user' if '--user' in unshare_command() else 'as root'}"
        )
    except UsageError as error:
        yield Finding(
            "note", "rehearsal", str(error).partition("; ")[0], "run as root, or allow user namespaces"
        )


def aws(config: Config) -> Iterator[Finding]:
    """Laptop: AWS identity and quotas, if the job names instance types or credentials exist."""
    from launcher.places.sagemaker import aws

    yield from (Finding(*row) for row in aws.findings(config))


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    python,
    packages,
    torch,
    gpus,
    shared_memory,
    disk,
    ports,
    namespaces,
    aws,
)
