"""Laptop: `--on rehearsal`: run the job on emulated hosts of a cloud on this machine, at no cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import stoker_launcher
from stoker_launcher import run_directory
from stoker_launcher.job import stage
from stoker_launcher.places import Place
from stoker_launcher.rehearsal import running, sagemaker_hosts
from stoker_launcher.rehearsal.plan import (
    PlannedHost,
    RehearsalRequest,
    masked_folders,
    plan,
    rate_arguments,
)
from stoker_launcher.rehearsal.running import RehearsalRun

LINGER_S = 30.0
"""How long hosts may outlive the head before the rehearsal kills them and reports it."""
STOP_GRACE_S = 120.0
TOOLKIT_STOP_GRACE_S = 10.0
"""Under the toolkit SIGTERM does not reach train.py, so there is nothing to wait for."""


def submit(request: RehearsalRequest, show: bool = True) -> RehearsalRun:
    unshare = running.unshare_command()
    if request.entry == "toolkit":
        sagemaker_hosts.toolkit_folder()  # installed before the rehearsal leaves anything
    request = replace(request, run_dir=run_directory.create(request.run_dir))
    (request.run_dir / "logs").mkdir()
    run_directory.point_latest(request.run_dir)
    folder = request.run_dir / "hosts"
    folder.mkdir(mode=0o700)
    try:
        spec, config, staged = folder / "world.json", request.job.resolved.config, folder / "staged"
        stage(request.job, staged, {c.parameter: c.path_on_host for c in request.channels})
        content = {
            "hosts": [
                _host_spec(request, host, nth, folder)
                for nth, host in enumerate(request.hosts, start=1)
            ],
            "head": request.head,
            "ray_port": config.cluster.port,
            "faults": [asdict(fault) for fault in request.faults],
            "linger_s": LINGER_S,
            "timeout_s": config.rehearsal.timeout_s,
            "stop_grace_s": STOP_GRACE_S if request.entry == "container" else TOOLKIT_STOP_GRACE_S,
        }
        spec.write_text(json.dumps(content))
        process = subprocess.Popen(
            [*unshare, sys.executable, "-m", "stoker_launcher.rehearsal.world", str(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, not for the hosts
            env={**os.environ, "PYTHONPATH": str(Path(stoker_launcher.__file__).parent.parent)},
        )
    except BaseException:
        running.remove(folder)
        raise
    return RehearsalRun(request, process, show)


def _host_spec(
    request: RehearsalRequest, host: PlannedHost, number: int, folder: Path
) -> dict[str, Any]:
    config, own = request.job.resolved.config, folder / host.name
    own.mkdir(exist_ok=True)
    names = "".join(f"{h.address} {h.name}\n" for h in request.hosts)
    (own / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
    return {
        "name": host.name,
        "address": host.address,
        "folder": str(own),
        "delay_s": host.delay_s,
        "port": f"v{number}",
        "link": f"h{number}",
        "rate": rate_arguments(config.rehearsal.link_mbps),
        "shm_mb": config.rehearsal.shm_mb,
        "channels": [{"source": str(c.source), "target": c.path_on_host} for c in request.channels],
        # A .pth file may name the packages of another environment.
        "kept": [
            *map(str, (sys.prefix, sys.base_prefix, sagemaker_hosts.cache_folder())),
            *(path for path in sys.path if Path(path).name == "site-packages"),
        ],
        "masked": masked_folders(request.job),
        **request.shape.prepare(request, host, folder),
    }


PLACE = Place(
    name="rehearsal",
    plan=lambda job, options, resume: plan(job, resume.checkpoints),
    submit=submit,
    attach=run_directory.attach,
    checkpoints="copies",
)
