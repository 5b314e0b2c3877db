"""Laptop: `submit.py doctor [JOB]`: checks this machine and the job's AWS account. Starts nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from stoker import figures
from stoker.config.loading import load
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.hosts import requirements
from stoker_launcher.job import as_overrides, examples_root
from stoker_launcher.run_directory import refuse_unwritable

LEAST_SHM_BYTES = 512 * 2**20
"""With less, as in a container with default settings, Ray spills its object store to disk."""
LEAST_DISK_BYTES = 2 * 2**30
FULLEST = 0.95
"""Ray does not write objects to a fuller disk."""


class Finding(NamedTuple):
    mark: Literal["ok", "note", "FAIL"]
    what: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        return f"{self.mark:<5} {self.what:<14} {self.found}{f': {self.remedy}' if self.remedy else ''}"


def finding_of(what: str, found: str, remedy: str = "") -> Finding:
    """A failure if there is something to do about it."""
    return Finding("FAIL" if remedy else "ok", what, found, remedy)


def doctor(job: Path | None, overrides: list[str]) -> int:
    """Run the checks and print each finding as it arrives; 1 if something must be fixed first."""
    file, own = as_overrides(job, None)
    config = load(file, [*own, *overrides]).config
    failed = False
    for check in CHECKS:
        for finding in check(config):
            print(finding.line(), flush=True)
            failed |= finding.mark == "FAIL"
    return int(failed)


def python(config: Config) -> Iterator[Finding]:
    known = "{}.{}".format(*sys.version_info) in requirements.PYTHONS
    remedy = f"install {requirements.SUPPORTED_PYTHONS} and recreate the environment"
    yield finding_of("Python", ".".join(map(str, sys.version_info[:3])), "" if known else remedy)


def packages(config: Config) -> Iterator[Finding]:
    try:
        lines = metadata.requires("stoker") or []
    except metadata.PackageNotFoundError:  # an uninstalled checkout
        lines = (examples_root() / "requirements.txt").read_text(encoding="utf-8").splitlines()
    ours = (line.split(";")[0] for line in lines if "extra ==" not in line or "'train'" in line)
    absent = requirements.unsatisfied("\n".join(ours))
    ray = [line for line in absent if requirements.canonical(line).startswith("ray")]
    remedy = f"pip install '{ray[0]}'; all hosts of a job need the same version" if ray else ""
    yield finding_of("Ray", requirements.image_pins().get("ray", "absent"), remedy)
    if others := [line for line in absent if line not in ray]:
        install = " ".join(f"'{line}'" for line in others)
        yield finding_of("packages", f"{len(others)} missing or too old", f"pip install {install}")


def torch(config: Config) -> Iterator[Finding]:
    """Whether torch and torchvision were built for each other, and can use the GPUs: by trying it."""
    if not {"torch", "torchvision"} <= requirements.image_pins().keys():
        return  # reported by `packages`
    command = [sys.executable, "-W", "ignore", "-c", USE_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines() or ["no answer"]
    remedy = (
        "install both in one command, from one index, for a CUDA version that the driver supports"
    )
    yield finding_of("torch", said[-1], remedy if done.returncode else "")


USE_TORCH = """
import os, shutil, torch, torchvision
torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
gpus = "no GPU: local jobs train on the CPU"
if shutil.which("nvidia-smi") or os.path.exists("/dev/nvidiactl"):
    torch.zeros(1, device="cuda")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    gpus = f"{torch.cuda.device_count()} × {', '.join(names)}, CUDA {torch.version.cuda}"
print(f"{torch.__version__} with torchvision {torchvision.__version__}, {gpus}")
"""


def shared_memory(config: Config, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:  # noqa: S108 - only measured
    """Its size on Linux, where it holds Ray's object store."""
    if folder.is_dir():
        size = shutil.disk_usage(folder).total
        remedy = "" if size >= LEAST_SHM_BYTES else "start the container with --shm-size=2g or more"
        yield finding_of(str(folder), figures.size(size), remedy)


def disk(config: Config) -> Iterator[Finding]:
    output = Path(config.output_dir).resolve()
    ray = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    for what, key, folder in (
        ("results", "output_dir=…", output),
        ("Ray's files", "RAY_TMPDIR", ray),
    ):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        usage = shutil.disk_usage(there)
        found, remedy = f"{figures.size(usage.free)} free in {folder}", ""
        try:
            refuse_unwritable(folder)
        except UsageError as error:
            found, remedy = error.problems[0].rest, f"choose another folder with {key}"
        else:
            if usage.free < LEAST_DISK_BYTES or usage.used > FULLEST * (usage.used + usage.free):
                remedy = f"free up space, or choose another disk with {key}"
        yield finding_of(what, found, remedy)


def namespaces(config: Config) -> Iterator[Finding]:
    from stoker_launcher.rehearsal.running import unshare_command

    try:
        yield finding_of(
            "rehearsal", f"namespaces {'as a user' if '--user' in unshare_command() else 'as root'}"
        )
    except UsageError as error:
        yield Finding("note", "rehearsal", str(error))


def aws(config: Config) -> Iterator[Finding]:
    from stoker_launcher.places.sagemaker import aws

    yield from (Finding(*row) for row in aws.findings(config))


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    *(python, packages, torch, shared_memory, disk, namespaces, aws),
)
