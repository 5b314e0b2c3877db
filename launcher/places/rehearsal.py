"""Laptop: `--on rehearsal`: run the job on emulated hosts of a cloud on this machine, at no cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import launcher
from launcher import run_directory
from launcher.job import Job
from launcher.places import Place
from launcher.places.sagemaker import training_job
from launcher.rehearsal import isolation, running, sagemaker_hosts, world
from launcher.rehearsal import plan as planning
from launcher.rehearsal.plan import Shape, shape_of
from launcher.rehearsal.running import Display, RehearsalRun
from launcher.source import pack, stage
from stoker.errors import UsageError

CODE_CHANNEL = "code"
LINGER_S = 30.0
"""How long hosts may outlive the head before the rehearsal kills them and reports it."""
STOP_GRACE_S = 120.0
TOOLKIT_STOP_GRACE_S = 10.0
"""Under the toolkit SIGTERM does not reach train.py, so there is nothing to wait for."""


@dataclass(frozen=True)
class RehearsalRequest:
    """The hosts, channels and faults of one rehearsal."""

    job: Job
    hosts: tuple[planning.PlannedHost, ...]
    channels: tuple[planning.PlannedChannel, ...]
    faults: tuple[world.Fault, ...]
    head: str
    run_dir: Path
    checkpoints: tuple[Path, ...] = ()
    """Checkpoint folders to place on the hosts, as SageMaker restores them after a restart."""

    @property
    def shape(self) -> Shape:
        """The service whose hosts are emulated."""
        return shape_of(self.job.resolved.config)

    @property
    def entry(self) -> str:
        return self.job.resolved.config.rehearsal.entry if self.shape.toolkit else "container"

    def render(self) -> str:
        """The request as shown by `--dry-run`."""
        settings = self.job.resolved.config.rehearsal
        starter = {
            "toolkit": f"sagemaker-training {sagemaker_hosts.TOOLKIT_VERSION} starts train.py",
            "container": f"train.py is process 1, as on {self.shape.service}",
        }[self.entry]
        rate = f"{settings.link_mbps:g} Mbit/s" if settings.link_mbps else "unlimited"
        quota = f"{settings.cpu_quota:g} cores" if settings.cpu_quota else "none"
        lines = [f"rehearsal of {self.job.name}: {len(self.hosts)} emulated hosts on this machine"]
        for host in self.hosts:
            role = "head" if host.name == self.head else "worker"
            late = f"{host.delay_s:g} s late" if host.delay_s else ""
            late = "never comes" if host.delay_s == float("inf") else late
            columns = (host.name, host.group, host.instance_type, host.address, role, late)
            lines.append("  " + "".join(f"{column:<16}  " for column in columns).rstrip())
        lines += [f"  entry      {starter}", f"  link       {rate}; cpu quota {quota} per host"]
        lines += [f"  channel    {c.parameter}: {c.source} → {c.path_on_host}" for c in self.channels]
        lines += [f"  checkpoint {path}" for path in self.checkpoints]
        lines += [f"  fault      {text}" for text in settings.faults]
        lines.append(f"  results    {self.run_dir}")
        return "\n".join(lines)


def plan(job: Job, checkpoints: tuple[Path, ...] = ()) -> RehearsalRequest:
    """Plan the rehearsal and check everything that does not require starting a host.

    Args:
        job: what to rehearse.
        checkpoints: checkpoints of an earlier run to resume from.

    Raises:
        UsageError: every problem found in the `rehearsal` section.
    """
    config = job.resolved.config
    hosts = planning.plan_hosts(config)
    planned_faults = planning.plan_faults(config, hosts)
    topology = planning.plan_topology(config, hosts)
    where = shape_of(config).channel
    channels = tuple(
        planning.PlannedChannel(parameter, Path(source), where.format(parameter))
        for parameter, source in job.data.items()
    )
    if any(channel.parameter == CODE_CHANNEL for channel in channels):
        raise UsageError("params.code: the channel `code` carries the source; rename the parameter")
    run_dir = run_directory.new_run_dir(job)
    return RehearsalRequest(job, hosts, channels, planned_faults, topology.head, run_dir, checkpoints)


def submit(request: RehearsalRequest, show: bool = True) -> RehearsalRun:
    """Build the upload, create the hosts and start them.

    Args:
        request: the result of `plan`.
        show: whether `wait` prints the hosts' output and the closing table.

    Raises:
        UsageError: this machine cannot emulate hosts, or the toolkit cannot be installed.
    """
    unshare = isolation.unshare_command()
    train = sagemaker_hosts.toolkit_command() if request.entry == "toolkit" else None
    try:
        request.run_dir.mkdir(parents=True)
    except FileExistsError:  # another rehearsal started in the same second
        other = request.run_dir.with_name(f"{request.run_dir.name}-{os.getpid()}-{time.monotonic_ns()}")
        request = replace(request, run_dir=other)
        other.mkdir()
    run_dir = request.run_dir
    (run_dir / "logs").mkdir()
    run_directory.point_latest(run_dir)
    folder = run_dir / "hosts"
    folder.mkdir(mode=0o700)
    cgroups: list[str] = []
    try:
        staged = folder / "staged"
        stage(request.job, staged, {c.parameter: c.path_on_host for c in request.channels})
        if train is not None:
            pack(staged, folder / training_job.ARCHIVE)
        specs = []
        for number, host in enumerate(request.hosts, start=1):
            made = isolation.make_cgroups(
                f"stoker-{os.getpid()}-{run_dir.name[-20:]}-{host.name}",
                request.job.resolved.config.rehearsal.cpu_quota,
            )
            cgroups += made
            specs.append(_host_spec(request, host, number, folder, train, made))
        spec = folder / "world.json"
        spec.write_text(json.dumps(_world_spec(request, specs)))
        process = subprocess.Popen(
            [*unshare, sys.executable, "-m", "launcher.rehearsal.world", str(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, not for the hosts
            env={**os.environ, "PYTHONPATH": str(Path(launcher.__file__).parent.parent)},
        )
    except BaseException:
        isolation.remove_cgroups(cgroups)
        running.remove(folder)
        raise
    return RehearsalRun(request, process, cgroups, Display(request.hosts) if show else None)


def _host_spec(
    request: RehearsalRequest,
    host: planning.PlannedHost,
    number: int,
    folder: Path,
    train: list[str] | None,
    cgroups: list[str],
) -> dict[str, Any]:
    """Write a host's files and /etc/hosts; returns its specification for the world."""
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
        "kept": [str(path) for path in (sys.prefix, sys.base_prefix, sagemaker_hosts.cache_folder())],
        "masked": planning.masked_folders(request.job),
        **particular,
        "command": particular["command"] or train,
    }


def _world_spec(request: RehearsalRequest, hosts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "hosts": hosts,
        "head": request.head,
        "ray_port": request.job.resolved.config.cluster.port,
        "faults": [asdict(fault) for fault in request.faults],
        "linger_s": LINGER_S,
        "timeout_s": request.job.resolved.config.rehearsal.timeout_s,
        "stop_grace_s": STOP_GRACE_S if request.entry == "container" else TOOLKIT_STOP_GRACE_S,
    }


PLACE = Place(
    name="rehearsal",
    plan=lambda job, options, resume: plan(job, resume.checkpoints),
    submit=submit,
    attach=run_directory.attach,
    checkpoints="copies",
)
