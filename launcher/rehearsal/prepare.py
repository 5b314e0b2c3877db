"""Laptop: write each host's `/opt/ml` and the specification for the world."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.rehearsal import plan as planning
from launcher.rehearsal import toolkit

if TYPE_CHECKING:
    from launcher.backends.rehearsal import RehearsalRequest

LINGER_S = 30.0
"""How long hosts may outlive the head before the rehearsal kills them and reports it."""
STOP_GRACE_S = 120.0
TOOLKIT_STOP_GRACE_S = 10.0
"""Under the toolkit SIGTERM does not reach train.py, so there is nothing to wait for."""


def prepare_host(
    request: RehearsalRequest,
    host: planning.PlannedHost,
    number: int,
    folder: Path,
    train: list[str] | None,
    cgroups: list[str],
) -> dict[str, Any]:
    """Write a host's `/opt/ml` and /etc/hosts; returns its specification for the world."""
    config = request.job.resolved.config
    own = folder / host.name
    ml = own / "ml"
    for part in ("input/config", "input/data", "model", "output/data", "checkpoints"):
        (ml / part).mkdir(parents=True)
    for checkpoint in request.checkpoints:
        copy: Any = shutil.copytree if checkpoint.is_dir() else shutil.copy2
        copy(checkpoint, ml / "checkpoints" / checkpoint.name)
    settings = {
        "resourceconfig": planning.resource_config(request.hosts, host),
        "hyperparameters": planning.hyperparameters(request.job, request.entry),
        "inputdataconfig": {
            name: {
                "TrainingInputMode": "File",
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
            }
            for name in [planning.CODE_CHANNEL, *(c.parameter for c in request.channels)]
        },
    }
    for name, content in settings.items():
        (ml / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
    code = ml / "input" / "data" / planning.CODE_CHANNEL
    if train is None:
        shutil.copytree(folder / "staged", code)
        command = [str(Path(sys.executable).parent / "python3"), "/opt/ml/input/data/code/train.py"]
    else:
        code.mkdir()
        shutil.copy2(folder / planning.ARCHIVE, code / planning.ARCHIVE)
        command = train
    names = "".join(f"{h.address} {h.name}\n" for h in request.hosts)
    (own / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
    return {
        "name": host.name,
        "address": host.address,
        "folder": str(own),
        "folder_in_host": "/opt/ml",
        "delay_s": host.delay_s,
        "port": f"v{number}",
        "link": f"h{number}",
        "rate": planning.rate_arguments(config.rehearsal.link_mbps),
        "shm_mb": config.rehearsal.shm_mb,
        "cgroups": cgroups,
        "channels": [{"source": str(c.source), "target": c.target} for c in request.channels],
        "kept": [str(path) for path in (sys.prefix, sys.base_prefix, toolkit.cache_folder())],
        "masked": planning.masked_folders(request.job),
        "command": command,
        "environment": planning.environment(request.job, config),
    }


def world_spec(request: RehearsalRequest, hosts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "hosts": hosts,
        "head": request.head,
        "ray_port": request.job.resolved.config.cluster.port,
        "faults": [asdict(fault) for fault in request.faults],
        "linger_s": LINGER_S,
        "timeout_s": request.job.resolved.config.rehearsal.timeout_s,
        "stop_grace_s": STOP_GRACE_S if request.entry == "container" else TOOLKIT_STOP_GRACE_S,
    }
