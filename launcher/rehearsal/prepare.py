"""Laptop: write each host's files and the specification for the world."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.rehearsal import plan as planning
from launcher.rehearsal import toolkit

if TYPE_CHECKING:
    from launcher.places.rehearsal import RehearsalRequest

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
    """Laptop: write a host's files and /etc/hosts; returns its specification for the world."""
    config = request.job.resolved.config
    own = folder / host.name
    own.mkdir(exist_ok=True)
    particular = request.shape.prepare(request, host, folder, train is not None)
    names = "".join(f"{h.address} {h.name}\n" for h in request.hosts)
    (own / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
    return {
        "name": host.name,
        "address": host.address,
        "folder": str(own),
        "delay_s": host.delay_s,
        "port": f"v{number}",
        "link": f"h{number}",
        "rate": planning.rate_arguments(config.rehearsal.link_mbps),
        "shm_mb": config.rehearsal.shm_mb,
        "cgroups": cgroups,
        "channels": [{"source": str(c.source), "target": c.path_on_host} for c in request.channels],
        "kept": [str(path) for path in (sys.prefix, sys.base_prefix, toolkit.cache_folder())],
        "masked": planning.masked_folders(request.job),
        **particular,
        "command": particular["command"] or train,
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
