"""A real Ray cluster of several nodes on loopback, with a token; it stops what it started."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from stoker.hosts import forks
from stoker.hosts.raynode import STARTED, STARTS, free_port
from stoker.ray_compat import COMMAND_LINE

LIBRARIES = [name for name in forks.FOR_TRAINING if not name.startswith("stoker")]
"""What workers find imported; Stoker itself comes with each job."""

IN_ITS_PLACE = 'mount --bind "$0" "$1" && shift && exec "$@"'
"""For a process with its own mounts: the first folder in the place of the second. An old Ray, whose
workers are not forked, gives all nodes the head's temporary folder: they unpack one job over each other."""


@dataclass
class RayNodes:
    dashboard: str
    token: str
    gcs: str
    scratch: Path
    cpus: int
    store_mb: int
    environment: dict[str, str]
    started: int = 0
    """How many nodes this cluster has had."""
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Those that this process started."""

    def start(self, group: str, *head: str) -> int:
        index, self.started = self.started, self.started + 1
        alone = forks.SOCKET_VARIABLE not in self.environment
        # Workers of a cluster as users have it import everything anew: tests/fakes/autoscaled.py.
        command = [
            sys.executable, "-c", COMMAND_LINE, "start", "--block",
            "--node-ip-address=127.0.0.1", f"--num-cpus={self.cpus}", "--num-gpus=0",
            f"--labels=stoker-group={group},stoker.host={group}-{index}",
            f"--object-store-memory={self.store_mb * 2**20}",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--temp-dir={self.scratch}/{0 if alone else index}",
            *(head or (f"--address={self.gcs}",)),
        ]  # fmt: skip
        if alone and index:
            own, of_head = self.scratch / str(index), self.scratch / "0"
            own.mkdir()
            command = [
                "unshare",
                "--mount",
                "sh",
                "-c",
                IN_ITS_PLACE,
                str(own),
                str(of_head),
                *command,
            ]
        # Two nodes of one machine that start at once wait for each other for ever.
        self.processes[index] = started(command, self.environment, self.scratch / f"{index}.log")
        return index

    def address(self) -> dict[str, Any]:
        return {
            "dashboard": self.dashboard,
            "gcs": self.gcs,
            "scratch": str(self.scratch),
            "cpus": self.cpus,
            "store_mb": self.store_mb,
            "nodes": self.started,
        }

    @classmethod
    def entered(cls, address: dict[str, Any]) -> RayNodes:
        given = {key: value for key, value in address.items() if key not in ("nodes", "scratch")}
        return cls(
            **given,
            token=os.environ["RAY_AUTH_TOKEN"],
            scratch=Path(address["scratch"]),
            environment=dict(os.environ),
            started=address["nodes"],
        )

    def lose(self, index: int) -> None:
        node = psutil.Process(self.processes[index].pid)
        for process in [*node.children(recursive=True), node]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.processes[index].wait()


@contextlib.contextmanager
def forked_from(environment: dict[str, str], folder: Path) -> Iterator[dict[str, str]]:
    """Variables of nodes whose workers are forked from one process; none on a Ray that cannot fork them."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        server = forks.started(LIBRARIES, folder)
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        yield {forks.SOCKET_VARIABLE: server.socket} if server else {}
    finally:
        if server:
            server.stop()


@contextlib.contextmanager
def ray_nodes(
    groups: tuple[str, ...] = ("gpu", "cpu", "cpu"),
    *,
    cpus: int = 2,
    store_mb: int = 100,
    dashboard: bool = True,
    forked: bool = True,
) -> Iterator[RayNodes]:
    """Start one node per entry, the first one the head; each carries its group as a label.

    Args:
        groups: a node for each.
        cpus: that each node offers.
        store_mb: object store of each node.
        dashboard: with a job server; without one there is less to start.
        forked: from one process for all nodes; otherwise workers are children of their own node's raylet.
    """
    token = secrets.token_hex(32)
    scratch = Path(tempfile.mkdtemp(prefix="rn", dir="/tmp"))  # socket paths must stay short
    gcs_port, dashboard_port = free_port(), free_port()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "240",
        "RAY_raylet_start_wait_time_s": "150",
        # A lost node refuses connections, which Ray sees after five of these instead of after 15 s.
        "RAY_health_check_period_ms": "1000",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    nodes = RayNodes(
        f"http://127.0.0.1:{dashboard_port}",
        token,
        f"127.0.0.1:{gcs_port}",
        scratch,
        cpus,
        store_mb,
        environment,
    )
    stack = contextlib.ExitStack()
    try:
        if forked:
            nodes.environment |= stack.enter_context(forked_from(environment, scratch))
        for index, group in enumerate(groups):
            head = (
                "--head", f"--port={gcs_port}",
                f"--include-dashboard={str(dashboard).lower()}", "--dashboard-host=127.0.0.1",
                f"--dashboard-port={dashboard_port}",
            )  # fmt: skip
            nodes.start(group, *(() if index else head))
        yield nodes
    finally:
        stop_all(list(nodes.processes.values()))
        stack.close()
        shutil.rmtree(scratch, ignore_errors=True)


def started(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process that has started Ray; again where Ray has missed its own deadline on a busy machine."""
    for _ in range(STARTS):
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            if STARTED in log.read_text():
                return process
            time.sleep(0.2)
        if process.poll() is None:
            break
    stop_all([process])
    raise RuntimeError(f"a Ray node did not start:\n{log.read_text()[-3000:]}")


def stop_all(processes: list[subprocess.Popen[bytes]]) -> None:
    family: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            node = psutil.Process(process.pid)
            family += [node, *node.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    for process in processes:
        process.wait()
