"""Laptop: emulated hosts of a SageMaker training job: a folder `/opt/ml` each."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.job import COMMAND, Job
from launcher.places.sagemaker.training_job import CODE_FOLDER
from launcher.rehearsal.plan import (
    CODE_CHANNEL,
    PlannedHost,
    RehearsalRequest,
    ServiceShape,
    host_environment,
)
from launcher.rehearsal.running import merge
from stoker.config.schema import Config
from stoker.hosts.output import FAILURE_CHARACTERS


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


def hyperparameters(job: Job) -> dict[str, str]:
    """The content of hyperparameters.json; every value is a JSON string, as SDKs write it."""
    given = {"config": COMMAND[-1], **job.resolved.config.sagemaker.hyperparameters}
    return {key: json.dumps(value) for key, value in given.items()}


def environment(job: Job, config: Config) -> dict[str, str]:
    return {
        **host_environment(config),
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "TRAINING_JOB_NAME": job.name,
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:us-east-1:000000000000:training-job/{job.name}",
        **config.sagemaker.environment,
    }


def prepare(request: RehearsalRequest, host: PlannedHost, folder: Path) -> dict[str, Any]:
    ml = folder / host.name / "ml"
    for part in ("input/config", "input/data", "model", "output/data", "checkpoints"):
        (ml / part).mkdir(parents=True)
    for checkpoint in request.checkpoints:
        copy: Any = shutil.copytree if checkpoint.is_dir() else shutil.copy2
        copy(checkpoint, ml / "checkpoints" / checkpoint.name)
    channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
    channel["RecordWrapperType"] = "None"
    settings = {
        "resourceconfig": resource_config(request.hosts, host),
        "hyperparameters": hyperparameters(request.job),
        "inputdataconfig": dict.fromkeys([CODE_CHANNEL, *(c.parameter for c in request.channels)], channel),
    }
    for name, content in settings.items():
        (ml / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
    code = ml / "input" / "data" / CODE_CHANNEL
    shutil.copytree(folder / "staged", code)
    return {
        "mount": {"source": str(ml), "target": "/opt/ml"},
        "folder_in_host": "/opt/ml",
        "command": [str(Path(sys.executable).parent / "python3"), f"{CODE_FOLDER}/{COMMAND[1]}"],
        "environment": environment(request.job, request.job.resolved.config),
    }


def collect(request: RehearsalRequest, folder: Path) -> list[str]:
    hosts = {host.name: folder / host.name / "ml" for host in request.hosts}
    return merge(hosts, outputs(request.run_dir), request.checkpoints)


def outputs(run_dir: Path) -> dict[str, Path]:
    """Folders of `/opt/ml` whose files come back, and where they go."""
    return {"output/data": run_dir, "model": run_dir / "model", "checkpoints": run_dir / "checkpoints"}


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
)
