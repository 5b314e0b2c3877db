"""Every host: Ray's worker processes are forked from one that has imported what they need.

A Python process that imports Ray, Ray Data and PyTorch takes three to five seconds of CPU before it does
anything, and a small job has a dozen of them. Here one process imports, beside Ray's own start, and every
worker is its copy after 0.05 s of CPU, with the imported code in memory once.

    raylet  →  forks/worker.py (as Ray's worker program)  →  forks/server.py: fork  →  Ray's default_worker.py

Where that process is not there, a worker starts as Ray starts it.
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
"""Names the socket of the process that forks."""
SWITCH_VARIABLE = "STOKER_FORK_WORKERS"
POSSIBLE = sys.platform == "linux" and os.environ.get(SWITCH_VARIABLE) != "0"
"""Elsewhere libraries do not survive a fork; the variable is for one that does not on Linux either."""
HERE = Path(__file__).resolve().parent
CHAIN = ("pyarrow.parquet", "ray.data", "stoker.data.engine.chain_worker", "PIL.Image")
"""What chain workers import."""
TRAINING = (*CHAIN, "ray.train.torch", "stoker.data.coordinator.actor", "stoker.training.loop")
"""What the processes of a host that trains import."""
LATER = ("torch._dynamo", "timm.optim")
"""What only train workers import."""
TRAINS_VARIABLE = "STOKER_TRAINS"
"""Set for train workers: they are forked from the process that has imported `LATER`, too."""


class ForkServer:
    """Every host: the process from which Ray's workers on this host are forked; start it before Ray.

    Args:
        modules: what it imports before it forks, as far as there is such a module.
        later: what only those that train need; a second process imports it meanwhile.
    """

    def __init__(self, modules: Iterable[str], later: Iterable[str] = ()) -> None:
        self.socket = str(Path(tempfile.mkdtemp(prefix="stoker-forks-")) / "socket")
        """What `SOCKET_VARIABLE` is to name where Ray's daemons start."""
        # Ray reads these once, when its library is loaded. A worker without a job is of use to any; and its
        # raylet's end is also seen by the connection to it.
        own = {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}
        # As Ray has it for a worker of one CPU; numerical libraries read it once, too.
        given = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        # Whoever asks PyTorch for a GPU on import must not open it for that: it would be lost to the forks.
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
        """Every host: end it, after Ray."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(Path(self.socket).parent, ignore_errors=True)


def use_forks() -> None:
    """The process that starts Ray's daemons, before it does: workers of this host are to be forked.

    Where no dashboard is shown, daemons that only feed it are left out, too. Ray has public settings for
    neither. Written for Ray 2.60.
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
                    # So Ray takes itself for installed without what its dashboard needs.
                    utils.get_dashboard_dependency_error = lambda: ImportError("not shown")
                    # The start of the others would wait for it.
                    node.Node.start_api_server = lambda self, **_: setattr(self, "_webui_url", "")
                    services._build_python_executable_command_memory_profileable = program
            original(self, **values)

        RayParams.update_if_absent = update_if_absent
