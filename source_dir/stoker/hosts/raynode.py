"""Every host: this host's Ray daemons, started as one process and stopped as a process tree."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import StokerError
from stoker.hosts import machine
from stoker.hosts.forks import SOCKET_VARIABLE, ForkServer
from stoker.hosts.output import say
from stoker.hosts.topology import MOST_TRAIN_WORKERS, TRAIN_RESOURCE
from stoker.ray_compat import COMMAND_LINE, NOT_FORKED
from stoker.storage.checkpoint_store import own

if TYPE_CHECKING:
    import psutil

MIN_STORE_BYTES = 80 * 2**20
SMALL_STORE_BYTES = 512 * 2**20
STORE_SHARE_OF_MEMORY = 0.3
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 20_000
"""Ray's workers use the ports below."""
STARTED, START_TIMEOUT_S = "Ray runtime started", 120.0
"""What `ray start` prints when its daemons run; to ask Ray would cost every host a second of imports."""
STARTS, OWN_DEADLINE_S = 3, 30.0
"""How often to start Ray in all if it gives up at a deadline of its own, not all of which can be set."""
STOP_TIMEOUT_S = 3.0

OPEN_FOLDER = "s"
"""Ray's own folder, for sessions, in the private one."""
PREFIX = "sray-"
LONGEST_TEMP_DIR = 41 - len(f"/{PREFIX}12345678/{OPEN_FOLDER}")
"""Maximum length of the temporary folder's path: a socket's has at most 107 bytes, and Ray adds up to 66."""


def private_folder() -> Path:
    """A new folder of this user alone for Ray, whose sockets need a short path."""
    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_TEMP_DIR or not Path(base).is_absolute():
        base = "/tmp"  # noqa: S108 - what is created in it is private
    Path(base).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    own(folder)
    return folder


class ClusterError(StokerError):
    """The cluster could not be formed or was lost. One line."""


def store_arguments(wanted_mb: int | None, shm: Path = Path("/dev/shm")) -> list[str]:  # noqa: S108 - only measured
    """Arguments for an object store that fits into `/dev/shm`: else Ray uses the disk without a warning."""
    stat = os.statvfs(shm)
    free = int(stat.f_bavail * stat.f_frsize * 0.95)
    wanted = wanted_mb * 2**20 if wanted_mb else int(machine.memory()[0] * STORE_SHARE_OF_MEMORY)
    if free >= MIN_STORE_BYTES or free >= wanted:
        if free < wanted and (wanted_mb is not None or free < SMALL_STORE_BYTES):
            say(
                f"warning: object store limited to {free >> 20} MB by {shm} (wanted {wanted >> 20} MB)"
            )
        return [f"--object-store-memory={min(free, wanted)}"]
    say(f"warning: {shm} has only {free >> 20} MB: the object store is on disk, which is slow")
    size = max(min(wanted, SMALL_STORE_BYTES), MIN_STORE_BYTES)
    return [f"--object-store-memory={size}", f"--plasma-directory={tempfile.gettempdir()}"]


def cpus_to_declare(gpus: int, driver: bool = False) -> int:
    """CPUs for Ray's tasks; one core per GPU is reserved for its train worker, unless a Ray script's own
    trainer claims one."""
    return max(1, machine.cores() - (0 if driver else gpus))


def count_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA devices that this job may use, without loading CUDA."""
    there = len(list(devices.glob("nvidia[0-9]*")))
    # A scheduler whose jobs share hosts sets it.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    listed = itertools.takewhile(
        lambda each: each not in machine.NO_DEVICE, visible.replace(",", " ").split()
    )
    return min(there, len(list(listed)))


def address_of(interface: str) -> str:
    """The IPv4 address of an interface, else of this host's name, else of its default route."""
    import psutil

    for own_address in psutil.net_if_addrs().get(interface, ()):
        if own_address.family == socket.AF_INET:
            return str(own_address.address)
    named = ""
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        # Debian gives a host's own name a loopback address, which other hosts cannot reach.
        if not named.startswith("127."):
            return named
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # only asks for a route: UDP sends nothing here
        return str(probe.getsockname()[0])
    if named:
        return named
    raise ClusterError(
        f"no IPv4 address on {interface or 'any interface'} or for {socket.gethostname()}"
    )


def probe_port(address: str, port: int, key: str) -> None:
    """Head: fail at once if a port is taken; Ray takes 42 s and reports it vaguely."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Ray's GCS binds every interface, so a listener on any of them conflicts.
            probe.bind(("0.0.0.0", port))  # noqa: S104 - a free port for Ray, which binds all
        except OSError:
            raise ClusterError(
                f"{key}: port {port} of the head ({address}) is taken; choose another cluster.port"
            ) from None


def free_port(address: str = "127.0.0.1") -> int:
    """Outside the kernel's ephemeral range, from which any connection could take it before it is opened."""
    try:
        low, high = map(int, EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        low, high = 32_768, 60_999
    range_of = range(LOWEST, low) if low - LOWEST > 1_000 else range(high + 1, 65_536)
    chance = random.SystemRandom()
    for port in [*(chance.choice(range_of) for _ in range(100) if range_of), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    raise OSError("this host has no free port")


class RayNode:
    """`ray start --block` in a separate session; it ends with this process.

    The folder, of this user alone, is for the files of Ray and the output of its start; `forks`, where Ray's
    workers on this host are forked, is stopped with the node.
    """

    def __init__(self, arguments: list[str], folder: Path, forks: ForkServer | None = None) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log = folder / "ray.log"
        # Ray opens it to all users of the host, so it must be inside of a private one.
        self._forks, self._arguments = forks, [*arguments, f"--temp-dir={folder / OPEN_FOLDER}"]
        self._process = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if self._forks is not None:
            environment[SOCKET_VARIABLE] = self._forks.socket
            # Otherwise the first driver waits until as many workers as CPUs run; a fork starts in 0.05 s.
            environment["RAY_prestart_worker_first_driver"] = "0"
        command = [sys.executable, "-c", COMMAND_LINE, "start", *self._arguments]
        with self.log.open("wb") as output:
            # Do not inherit pipes or the terminal: a daemon that holds the container's output keeps the
            # job alive after its end.
            return subprocess.Popen(
                [*command, "--block", "--disable-usage-stats", "--log-style=record"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
                env=environment,
            )

    def wait_started(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the daemons run; on a busy host, Ray may have to be started again."""
        started, starts = time.monotonic(), 1
        while STARTED not in self._output():
            check()
            if time.monotonic() - started > START_TIMEOUT_S:
                self.stop()
                raise ClusterError(
                    f"Ray did not start within {START_TIMEOUT_S:.0f} s: {self._last_words()}"
                )
            if not self.alive:
                if starts == STARTS or time.monotonic() - started < OWN_DEADLINE_S:
                    raise ClusterError(f"Ray did not start: {self._last_words()}")
                self._process, started, starts = self._launch(), time.monotonic(), starts + 1
            time.sleep(0.1)
        for line in self._output().splitlines():
            if line.startswith(NOT_FORKED):
                say(f"warning: {line}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, grace_s: float = STOP_TIMEOUT_S) -> None:
        """Kill what is left after some seconds."""
        import psutil

        tree: list[psutil.Process] = []
        for pid in (self._process.pid, *([self._forks.pid] if self._forks else [])):
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                tree += [root, *root.children(recursive=True)]
        if self.alive and grace_s:
            self._process.terminate()
        if self._forks is not None:
            self._forks.stop()
        for process in still_running(tree, grace_s):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        still_running(tree, STOP_TIMEOUT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_TIMEOUT_S)

    def _output(self) -> str:
        return self.log.read_text(errors="replace")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._output().splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line or "error" in line]
        return (telling or lines or [f"exit code {self._process.returncode}"])[-1][:500]


def still_running(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended after the timeout."""
    deadline = time.monotonic() + timeout_s
    while (
        left := [each for each in processes if machine.runs(each.pid)]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def arguments_for(
    *,
    address: str,
    labels: dict[str, str],
    cpus: int,
    gpus: int | None,
    trains: bool = False,
    prints: bool = False,
) -> list[str]:
    """`prints`: what workers print reaches the drivers, which the job's own does not need."""
    arguments = [
        f"--node-ip-address={address}",
        f"--num-cpus={cpus}",
        f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}",
        f"--include-log-monitor={str(prints).lower()}",
    ]
    if gpus is not None:
        arguments.append(f"--num-gpus={gpus}")
    if trains:
        arguments.append(f"--resources={json.dumps({TRAIN_RESOURCE: MOST_TRAIN_WORKERS})}")
    return arguments


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """In a new process: end it with the thread that started it, even if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
