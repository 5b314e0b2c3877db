"""Every host: fork Ray's worker processes from a process that has already imported their modules.

Importing Ray, Ray Data and PyTorch takes three to five seconds of CPU per process, and a small job has a
dozen processes. Here a single process imports them while Ray starts. Each worker is then a fork that takes
0.05 s of CPU and shares the imported code in memory.

    raylet  →  forks/worker.py (as Ray's worker program)  →  forks/server.py: fork  →  Ray's default_worker.py

Without that process, workers start as in plain Ray.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.hosts.requirements import at_least, installed

SOCKET_VARIABLE = "STOKER_FORKS"
"""Path of the fork server's socket."""
SWITCH_VARIABLE = "STOKER_FORK_WORKERS"
FIRST_RAY = "2.56"
"""On Ray 2.52, a host without a dashboard does not join if its workers are forked."""
POSSIBLE = sys.platform == "linux" and os.environ.get(SWITCH_VARIABLE) != "0"
"""Other systems' libraries are not fork-safe; set the variable to 0 if one of yours is not on Linux."""
HERE = Path(__file__).resolve().parent
CHAIN = ("pyarrow.parquet", "ray.data", "stoker.serve.chain_worker", "PIL.Image")
"""Modules that chain workers import."""
TRAINING = (*CHAIN, "ray.train.torch", "stoker.serve.actor", "stoker.train.loop")
"""Modules that all processes of a training host import."""
LATER = ("torch._dynamo", "timm.optim")
"""Modules that only train workers import."""
TRAINS_VARIABLE = "STOKER_TRAINS"
"""Set for train workers, which are forked from the process that has also imported `LATER`."""


@dataclass(frozen=True)
class Imports:
    """Every host: what a fork server imports."""

    first: tuple[str, ...]
    """Modules that all forks need; missing ones are skipped."""
    later: tuple[str, ...] = ()
    """Modules that only train workers need; a second process imports them in parallel."""

    def also(self, *modules: str) -> Imports:
        """Every host: these imports and more for all forks."""
        return Imports((*self.first, *modules), self.later)


FOR_CHAINS = Imports(CHAIN)
FOR_TRAINING = Imports(TRAINING, LATER)


def fork_server(folder: Path) -> ForkServer | None:
    """A fork server that has not started, its sockets in `folder`; None on systems and Rays without."""
    if not POSSIBLE:
        return None
    if not at_least(ray := installed("ray"), FIRST_RAY):
        print(f"Ray {ray}: processes start more slowly than with Ray {FIRST_RAY} or newer", flush=True)
        return None
    return ForkServer(folder)


def started(imports: Imports, folder: Path) -> ForkServer | None:
    """A started fork server, its sockets in `folder`; None on systems and Rays without."""
    server = fork_server(folder)
    if server is not None:
        server.start(imports)
    return server


class ForkServer:
    """Every host: the process from which Ray's workers on this host are forked.

    Ray's daemons get its socket in their environment and may start before it.

    Args:
        folder: a private one, for its sockets.
    """

    def __init__(self, folder: Path) -> None:
        self.socket = str(Path(tempfile.mkdtemp(prefix="forks-", dir=folder)) / "socket")
        """Value of `SOCKET_VARIABLE` in the environment of Ray's daemons."""
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, imports: Imports) -> None:
        """Every host: start it as a new process."""
        modules = (*imports.first, "-", *imports.later)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), self.socket, str(os.getpid()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.pid = self._process.pid

    def fork(self, imports: Imports, ahead: Iterable[str]) -> None:
        """Laptop: import some modules here, then fork it from this process, so that they are imported once.

        Args:
            imports: modules that it imports itself.
            ahead: modules that this process needs, too; no module of Ray, see `_environment`.
        """
        from stoker.hosts.forks import server

        with _set(_environment()):
            for name in ahead:
                server.load(name)
            sys.stdout.flush()
            sys.stderr.flush()
            parent = os.getpid()
            if "ray" in sys.modules or not _has_one_thread():
                self.start(imports)  # only a process with one thread can be forked safely
            elif (pid := os.fork()) == 0:
                server.begin(self.socket, parent, [*imports.first], [*imports.later])
            else:
                self.pid = pid

    def stop(self) -> None:
        """Every host: kill the process. Call it after Ray has stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        elif self.pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        shutil.rmtree(Path(self.socket).parent, ignore_errors=True)


def forkable() -> contextlib.AbstractContextManager[None]:
    """Laptop: while this is entered, imports start no threads, so that `ForkServer.fork` remains possible."""
    return _set(_of_libraries())


def _has_one_thread() -> bool:
    for _ in range(20):  # threads that were joined exist for another moment
        if len([*Path("/proc/self/task").iterdir()]) == 1:
            return True
        time.sleep(0.01)
    return False


@contextlib.contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _environment() -> dict[str, str]:
    return {
        # Ray reads these once, when its library is loaded. A worker without a job id can serve any job. The
        # raylet's end is also detected through the connection to it.
        "RAY_JOB_ID": "ffffffff",
        "RAY_RAYLET_PID": str(os.getpid()),
        **_of_libraries(),
    }


def _of_libraries() -> dict[str, str]:
    return {
        # Ray's value for a worker with one CPU; numerical libraries read it only once, too.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # An import that asks PyTorch for a GPU must not initialize CUDA, which would then fail in the forks.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Arrow's library starts a thread for it, although Arrow uses another allocator.
        "JE_ARROW_MALLOC_CONF": os.environ.get("JE_ARROW_MALLOC_CONF", "background_thread:false"),
    }


def use_forks() -> None:
    """The process that starts Ray's daemons: patch Ray to fork this host's workers. Call it before the start.

    Without a dashboard, it also skips the daemons that only feed the dashboard, and the server for Ray
    clients outside the cluster. Ray has no public setting for any of these. Written for Ray 2.60.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from ray._private import node, services, utils
        from ray._private.parameter import RayParams
        from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT

        original = RayParams.update_if_absent
        python = services._build_python_executable_command_memory_profileable

        def program(component: str, *how: object, **more: object) -> list[str]:
            command: list[str] = python(component, *how, **more)
            agent = component == PROCESS_TYPE_DASHBOARD_AGENT
            return [*command, "-S", str(HERE / "agent.py")] if agent else command

        def update_if_absent(self: RayParams, **values: object) -> None:
            if "worker_path" in values and os.environ.get(SOCKET_VARIABLE):
                values["worker_path"] = str(HERE / "worker.py")
                values["setup_worker_path"] = str(HERE / "setup_worker.py")
                if not self.include_dashboard:
                    self.include_log_monitor, self.no_monitor = False, True
                    self.ray_client_server_port = None
                    # Makes Ray believe that the dashboard's dependencies are not installed.
                    utils.get_dashboard_dependency_error = lambda: ImportError("not shown")
                    # The other daemons would wait for its start.
                    node.Node.start_api_server = lambda self, **_: setattr(self, "_webui_url", "")
                    services._build_python_executable_command_memory_profileable = program
            original(self, **values)

        RayParams.update_if_absent = update_if_absent
