"""A Slurm cluster on this machine: a login node and three compute nodes, real daemons in private namespaces.

Each node has its own network, host name and slurmd; the files are shared, as on a cluster. All of it ends
with the process that holds the world's standard input, because the world has a PID namespace of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGIN, BRIDGE = "10.78.0.1", "slurm0"
NODES = {"gpu-1": "10.78.0.11", "cpu-1": "10.78.0.21", "cpu-2": "10.78.0.22"}
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter")
READY_S = 120
# Hosts share this machine's /tmp, also with clusters of other tests, so job ids begin somewhere.
# Most clusters track processes by cgroup: signals reach the task alone. That needs this machine's cgroups;
# by process group, they do not reach Ray's daemons either, which have sessions of their own.
CONFIGURATION = f"""
ClusterName=test
SlurmctldHost=login({LOGIN})
AuthInfo=socket={{folder}}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={{folder}}/state
SlurmdSpoolDir={{folder}}/spool-%n
SlurmctldPidFile={{folder}}/slurmctld.pid
SlurmdPidFile={{folder}}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_min_interval=0
ReturnToService=2
KillWait=90
GresTypes=gpu
FirstJobId={{first_job}}
NodeName=gpu-1 NodeAddr={NODES["gpu-1"]} CPUs=2 Gres=gpu:1
NodeName=cpu-[1-2] NodeAddr=10.78.0.[21-22] CPUs=2
PartitionName=gpu Nodes=gpu-1 Default=YES
PartitionName=cpu Nodes=cpu-[1-2] MaxTime=60
PartitionName=closed Nodes=cpu-1 State=DOWN
"""
GRES = "NodeName=gpu-1 Name=gpu File=/dev/null\n"


def absent() -> str:
    """Why no cluster can be started here; "" if it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster on one machine needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (make setup, as root on Debian)" if missing else ""


class SlurmCluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        namespaces = (
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        )
        with (folder / "world.log").open("wb") as log:
            self._world = subprocess.Popen(
                [
                    "unshare",
                    *namespaces,
                    "--propagation",
                    "private",
                    sys.executable,
                    __file__,
                    str(folder),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        self._wait_until_nodes_are_idle()

    def command(self, *words: str, cwd: Path = ROOT) -> list[str]:
        children = (
            Path(f"/proc/{self._world.pid}/task/{self._world.pid}/children").read_text().split()
        )
        enter = [
            "nsenter",
            "--target",
            children[0],
            "--net",
            "--uts",
            "--mount",
            "--pid",
            f"--wd={cwd}",
        ]
        return [*enter, "env", f"SLURM_CONF={self.folder}/slurm.conf", *words]

    def run(self, *words: str) -> str:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        parts = [
            f"--- {path.name}\n{path.read_text()[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        ]
        return "\n".join(parts)

    def close(self) -> None:
        assert self._world.stdin is not None
        self._world.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._world.wait(timeout=20)
        self._world.kill()
        self._world.wait(timeout=20)

    def _wait_until_nodes_are_idle(self) -> None:
        deadline = time.monotonic() + READY_S
        states: list[str] = []
        while time.monotonic() < deadline and self._world.poll() is None:
            if (self.folder / "ready").exists():
                with contextlib.suppress(AssertionError):
                    states = self.run("sinfo", "--noheader", "--Node", "--format=%T").split()
                if states and states.count("idle") >= len(NODES):
                    return
            time.sleep(0.2)
        logs = self.logs()
        self.close()
        raise RuntimeError(f"the Slurm cluster did not start: {states}\n{logs}")


def world(folder: Path) -> None:
    """Process 1 of the namespaces: the login node, with the controller and the network of all nodes."""
    address = ("ip", "address", "add")
    run("hostname", "login")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run(*address, f"{LOGIN}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    names = "".join(f"{ip} {name}\n" for name, ip in {"login": LOGIN, **NODES}.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(folder=folder, first_job=random.randint(1_000, 60_000_000))
    )
    (folder / "gres.conf").write_text(GRES)
    start_munge(folder / "munge")
    configuration = ("-f", str(folder / "slurm.conf"))
    (folder / "state").mkdir()
    start(folder / "slurmctld.log", "slurmctld", "-D", "-i", *configuration)
    for number, (name, ip) in enumerate(NODES.items()):
        (folder / f"spool-{name}").mkdir()
        inside = (
            f"hostname {name}; ip link set lo up; while ! ip link set in{number} name eth0; do sleep 0.1;"
            f" done; ip address add {ip}/16 dev eth0; ip link set eth0 up;"
            f" exec slurmd -D -N {name} -f {folder}/slurm.conf"
        )
        node = start(
            folder / f"{name}.log", "unshare", "--net", "--uts", "--propagation", "private", "--mount",
            "bash", "-c", inside,
        )  # fmt: skip
        wait_for(lambda pid=node.pid: own_network(pid), f"the namespaces of {name}")
        run("ip", "link", "add", f"out{number}", "type", "veth", "peer", "name", f"in{number}")
        run("ip", "link", "set", f"out{number}", "master", BRIDGE, "up")
        run("ip", "link", "set", f"in{number}", "netns", str(node.pid))
    # Process 1 must reap orphans: slurmd waits for the end of every process of a job.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    (folder / "ready").touch()
    sys.stdin.read()


def own_network(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def start_munge(folder: Path) -> None:
    folder.mkdir()
    key, socket = folder / "key", folder / "socket"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    # --force: the folder may lie below one that others can write to, such as /tmp.
    options = [
        f"--socket={socket}",
        f"--key-file={key}",
        f"--pid-file={folder}/pid",
        "--force",
        "--foreground",
    ]
    options += [f"--seed-file={folder}/seed", f"--log-file={folder}/log"]
    start(folder / "out.log", "munged", *options)
    wait_for(socket.exists, "munge's socket")


def wait_for(condition, name: str, timeout_s: float = 60) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{name}: not there after {timeout_s:.0f} s")
        time.sleep(0.05)


def start(log: Path, *command: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    world(Path(sys.argv[1]))
