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
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

SOCKET_VARIABLE = "STOKER_FORKS"
"""Path of the fork server's socket."""
SWITCH_VARIABLE = "STOKER_FORK_WORKERS"
POSSIBLE = sys.platform == "linux" and os.environ.get(SWITCH_VARIABLE) != "0"
"""Other systems' libraries are not fork-safe; set the variable to 0 if one of yours is not on Linux."""
HERE = Path(__file__).resolve().parent
CHAIN = ("pyarrow.parquet", "ray.data", "stoker.data.engine.chain_worker", "PIL.Image")
"""Modules that chain workers import."""
TRAINING = (*CHAIN, "ray.train.torch", "stoker.data.coordinator.actor", "stoker.training.loop")
"""Modules that all processes of a training host import."""
LATER = ("torch._dynamo", "timm.optim")
"""Modules that only train workers import."""
TRAINS_VARIABLE = "STOKER_TRAINS"
"""Set for train workers, which are forked from the process that has also imported `LATER`."""


class ForkServer:
    """Every host: the process from which Ray's workers on this host are forked. Start it before Ray.

    Args:
        modules: modules to import before forking; missing ones are skipped.
        later: modules that only train workers need; a second process imports them in parallel.
    """

    def __init__(self, modules: Iterable[str], later: Iterable[str] = ()) -> None:
        self.socket = str(Path(tempfile.mkdtemp(prefix="stoker-forks-")) / "socket")
        """Value of `SOCKET_VARIABLE` in the environment of Ray's daemons."""
        # Ray reads these once, when its library is loaded. A worker without a job id can serve any job. The
        # raylet's end is also detected through the connection to it.
        own = {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}
        # Ray's value for a worker with one CPU; numerical libraries read it only once, too.
        given = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        # An import that asks PyTorch for a GPU must not initialize CUDA, which would then fail in the forks.
        given["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), self.socket, str(os.getpid()), *modules, "-", *later],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **own, **given, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Every host: kill the process. Call it after Ray has stopped."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(Path(self.socket).parent, ignore_errors=True)


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
