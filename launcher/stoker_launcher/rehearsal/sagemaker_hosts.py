"""Laptop: emulated hosts of a SageMaker training job: a folder `/opt/ml` each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from stoker.errors import UsageError
from stoker.hosts.output import FAILURE_CHARACTERS
from stoker_launcher.job import COMMAND, Job, pack_source
from stoker_launcher.places.sagemaker.training_job import (
    ARCHIVE,
    CODE_FOLDER,
    given_hyperparameters,
)
from stoker_launcher.rehearsal.plan import (
    CODE_CHANNEL,
    PlannedHost,
    RehearsalRequest,
    ServiceShape,
    host_environment,
)
from stoker_launcher.rehearsal.running import merge

TOOLKIT_VERSION = "5.1.4"
TOOLKIT = f"sagemaker-training {TOOLKIT_VERSION}"
START_TOOLKIT = """
import sys
sys.path.append({folder!r})
from sagemaker_training.cli.train import main
main()
"""


def host_names(groups: Sequence[tuple[str, int]]) -> list[str]:
    return [f"algo-{number}" for number in range(1, sum(count for _, count in groups) + 1)]


def resource_config(hosts: tuple[PlannedHost, ...], current: PlannedHost) -> dict[str, Any]:
    """The content of resourceconfig.json in SageMaker's form, with its text-sorted host list."""
    groups = dict.fromkeys(host.group for host in hosts)
    return {
        "current_group_name": current.group,
        "current_host": current.name,
        "current_instance_type": current.instance_type,
        "hosts": sorted(host.name for host in hosts),
        "instance_groups": [
            {
                "hosts": [host.name for host in hosts if host.group == group],
                "instance_group_name": group,
                "instance_type": next(h.instance_type for h in hosts if h.group == group),
            }
            for group in groups
        ],
        "network_interface_name": "eth0",
    }


def hyperparameters(job: Job, entry: str) -> dict[str, str]:
    """The content of hyperparameters.json; every value is a JSON string, as SDKs write it."""
    given = {"config": COMMAND[-1], **given_hyperparameters(job)}
    if entry == "toolkit":
        given |= {
            "sagemaker_program": COMMAND[1],
            "sagemaker_submit_directory": f"{CODE_FOLDER}/{ARCHIVE}",
        }
    return {key: json.dumps(value) for key, value in given.items()}


def prepare(request: RehearsalRequest, host: PlannedHost, folder: Path) -> dict[str, Any]:
    ml, job, config = folder / host.name / "ml", request.job, request.job.resolved.config
    for part in ("input/config", "input/data", "model", "output/data"):
        (ml / part).mkdir(parents=True)
    request.restore(ml / "checkpoints")
    channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
    channel["RecordWrapperType"] = "None"
    settings = {
        "resourceconfig": resource_config(request.hosts, host),
        "hyperparameters": hyperparameters(job, request.entry),
        "inputdataconfig": dict.fromkeys(
            [CODE_CHANNEL, *(c.parameter for c in request.channels)], channel
        ),
    }
    for name, content in settings.items():
        (ml / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
    return {
        "mount": {"source": str(ml), "target": "/opt/ml"},
        "folder_in_host": "/opt/ml",
        "command": _code(request, folder, ml / "input" / "data" / CODE_CHANNEL),
        "environment": {
            **host_environment(config),
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "TRAINING_JOB_NAME": job.name,
            "TRAINING_JOB_ARN": f"arn:aws:sagemaker:us-east-1:000000000000:training-job/{job.name}",
            **config.sagemaker.environment,
        },
    }


def _code(request: RehearsalRequest, folder: Path, channel: Path) -> list[str]:
    if request.entry == "container":
        shutil.copytree(folder / "staged", channel)
        return [str(Path(sys.executable).parent / "python3"), f"{CODE_FOLDER}/{COMMAND[1]}"]
    archive = folder / ARCHIVE
    if not archive.is_file():
        pack_source(folder / "staged", archive)
    channel.mkdir()
    shutil.copy2(archive, channel)
    return [sys.executable, "-c", START_TOOLKIT.format(folder=str(toolkit_folder()))]


def collect(request: RehearsalRequest, folder: Path) -> list[str]:
    hosts = {host.name: folder / host.name / "ml" for host in request.hosts}
    return merge(hosts, outputs(request.run_dir), request.checkpoints)


def outputs(run_dir: Path) -> dict[str, Path]:
    """Folders of `/opt/ml` whose files come back, and where they go."""
    return {
        "output/data": run_dir,
        "model": run_dir / "model",
        "checkpoints": run_dir / "checkpoints",
    }


def failure(request: RehearsalRequest, folder: Path, host: PlannedHost) -> str:
    """What the host wrote to `/opt/ml/output/failure`, truncated as by SageMaker."""
    file = folder / host.name / "ml" / "output" / "failure"
    return file.read_text(errors="replace")[:FAILURE_CHARACTERS] if file.is_file() else ""


SHAPE = ServiceShape(
    service="SageMaker",
    gpu_type="ml.g5.xlarge",
    cpu_type="ml.c5.xlarge",
    most_groups=5,
    host_names=host_names,
    resource=resource_config,
    channel="/opt/ml/input/data/{}",
    prepare=prepare,
    collect=collect,
    failure=failure,
    toolkit=TOOLKIT,
)


def cache_folder() -> Path:
    root = os.environ.get("STOKER_CACHE") or os.environ.get("XDG_CACHE_HOME")
    base = Path(root).expanduser() if root else Path.home() / ".cache"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return base / "stoker" / f"sagemaker-training-{TOOLKIT_VERSION}-{python}"


def toolkit_folder() -> Path:
    with contextlib.suppress(metadata.PackageNotFoundError):
        if metadata.version("sagemaker-training") == TOOLKIT_VERSION:  # the extra `rehearsal`
            return Path(str(metadata.distribution("sagemaker-training").locate_file("")))
    folder = cache_folder()
    if not folder.is_dir():
        _install_toolkit(folder)
    return folder


def _install_toolkit(folder: Path) -> None:
    print(f"installing {TOOLKIT} into {folder} (once)", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = tempfile.mkdtemp(prefix=".stoker-", dir=folder.parent)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--target", draft]
    wanted = f"sagemaker-training=={TOOLKIT_VERSION}"
    done = subprocess.run([*pip, wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(draft)
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(
            f"rehearsal.entry: cannot install {TOOLKIT}: {reason}; rehearsal.entry=container works without it"
        )
    Path(draft).chmod(0o755)
    with contextlib.suppress(OSError):  # another rehearsal has installed it meanwhile
        Path(draft).rename(folder)
