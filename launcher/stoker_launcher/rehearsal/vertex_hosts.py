"""Laptop: emulated hosts of a Vertex AI custom job: `rehearsal.like=vertex`.

The hosts of a job share one folder, which stands for a bucket and is mounted at `/gcs`. Groups become worker
pools in their order, so `rehearsal.hosts=cpu=1,gpu=1` puts the host that trains into the second pool.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.events import prices
from stoker.hosts.services import vertex as service
from stoker_launcher.job import pack_source
from stoker_launcher.places.vertex.custom_job import (
    ARCHIVE,
    container_command,
    pools_variable,
    replicas_by_pool,
)
from stoker_launcher.rehearsal.plan import (
    PlannedHost,
    RehearsalRequest,
    ServiceShape,
    host_environment,
)
from stoker_launcher.rehearsal.running import merge

BUCKET = "rehearsal"
JOB_NUMBER = "1234567890123456789"
_HASH = "4c1d6d97d0"


def host_names(groups: Sequence[tuple[str, int]]) -> list[str]:
    pools = replicas_by_pool(groups)
    return [
        f"cmle-training-workerpool{number}-{_HASH}-{index}"
        for number, (_, replicas) in enumerate(pools)
        for index in range(replicas)
    ]


def variables(hosts: tuple[PlannedHost, ...], current: PlannedHost, base: str) -> dict[str, str]:
    """What Vertex AI and the launcher tell a host: its pools, and where its outputs go."""
    cluster: dict[str, list[str]] = {}
    for host in hosts:
        cluster.setdefault(_pool(host), []).append(f"{host.name}:2222")
    machines = {_pool(host): host for host in hosts}.values()
    told = [
        (host.group, host.instance_type, prices.built_in_gpus(host.instance_type))
        for host in machines
    ]
    task = {
        "type": _pool(current),
        "index": [address.partition(":")[0] for address in cluster[_pool(current)]].index(
            current.name
        ),
    }
    spec = {
        "cluster": cluster,
        "environment": "cloud",
        "task": task,
        # Real hosts see no more of the job's specification.
        "job": json.dumps({"python_module": "", "package_uris": [], "job_args": []}),
    }
    return {
        service.CLUSTER_VARIABLE: json.dumps(spec),
        service.JOB_VARIABLE: JOB_NUMBER,
        service.MODEL_VARIABLE: f"{base}/model/",
        service.CHECKPOINT_VARIABLE: f"{base}/checkpoints/",
        service.TENSORBOARD_VARIABLE: f"{base}/logs/",
        **pools_variable(told),
    }


def resource(hosts: tuple[PlannedHost, ...], current: PlannedHost) -> dict[str, Any]:
    return dict(service.resource_of(variables(hosts, current, f"gs://{BUCKET}")) or {})


def prepare(request: RehearsalRequest, host: PlannedHost, folder: Path) -> dict[str, Any]:
    """Put the code into the bucket, once; returns what the world needs for this host."""
    base = folder / "gcs" / BUCKET / request.run_dir.name
    if not base.is_dir():
        base.mkdir(parents=True)
        pack_source(folder / "staged", base / ARCHIVE)
        if request.checkpoints:
            request.restore(base / "checkpoints")
    config = request.job.resolved.config
    base_uri = f"gs://{BUCKET}/{request.run_dir.name}"
    return {
        "mount": {"source": str(folder / "gcs"), "target": str(service.MOUNTS)},
        "folder_in_host": "/",
        "command": container_command(f"{base_uri}/{ARCHIVE}"),
        "environment": {
            **host_environment(config),
            **variables(request.hosts, host, base_uri),
            **config.vertex.environment,
        },
    }


def collect(request: RehearsalRequest, folder: Path) -> list[str]:
    base = folder / "gcs" / BUCKET / request.run_dir.name
    return merge(
        {"the job": base},
        {
            service.RUN_FOLDER: request.run_dir,
            "logs": request.run_dir / "tensorboard",
            "model": request.run_dir / "model",
            "checkpoints": request.run_dir / "checkpoints",
        },
    )


def failure(request: RehearsalRequest, folder: Path, host: PlannedHost) -> str:
    names = [h.name for h in request.hosts if _pool(h) == _pool(host)]
    replica = f"{_pool(host)}-{names.index(host.name)}"
    files = sorted(
        (folder / "gcs" / BUCKET / request.run_dir.name / service.FAILURES).glob(f"*-{replica}")
    )
    return files[-1].read_text(errors="replace") if files else ""


def _pool(host: PlannedHost) -> str:
    return host.name.removeprefix("cmle-training-").partition("-")[0]


SHAPE = ServiceShape(
    service="Vertex AI",
    gpu_type="g2-standard-8",
    cpu_type="c2-standard-8",
    most_groups=4,
    host_names=host_names,
    resource=resource,
    channel=f"{service.MOUNTS}/{BUCKET}/data/{{}}",
    prepare=prepare,
    collect=collect,
    failure=failure,
)
