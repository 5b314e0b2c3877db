"""Fork Ray's worker processes on a host from one process that has already imported their modules.

Importing Ray, Ray Data and PyTorch takes three to five seconds of CPU per process, and a small job has a
dozen processes. A fork takes 0.05 s and shares the imported code in memory.

    raylet  →  forked_worker.py (as Ray's worker program)  →  fork_server.py: fork  →  Ray's default_worker.py

Without that process, workers start as in plain Ray, and the host says so.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from stoker.hosts.requirements import at_least, installed

SERVER = Path(__file__).with_name("fork_server.py")
POSSIBLE = sys.platform == "linux" and os.environ.get("STOKER_FORK_WORKERS") != "0"
"""Other systems' libraries are not fork-safe; set the variable to 0 if one of yours is not on Linux."""
SOCKET_VARIABLE = "STOKER_FORKS"
"""For Ray's daemons: the server's socket."""
FIRST_RAY = "2.56"
"""On Ray 2.52, a host without a dashboard does not join if its workers are forked."""
FOR_CHAINS = ("pyarrow.parquet", "ray.data", "stoker.serve.chain_worker", "PIL.Image")
FOR_TRAINING = (
    *FOR_CHAINS,
    *("ray.train.torch", "stoker.serve.actor", "stoker.train.loop"),
    *("torch._dynamo", "timm.optim"),  # imported by the first step
)
"""Modules of workers on hosts without and with train workers; missing ones are skipped."""
FOR_RECIPES = ("torchvision.transforms.v2",)
"""In addition, unless the job is a script: most chains use it, and it takes a second to import."""
ENVIRONMENT = {
    # Ray's value for a worker with one CPU; numerical libraries read it only once.
    "OMP_NUM_THREADS": "1",
    # An import that asks PyTorch for a GPU must not initialize CUDA, which would then fail in the forks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Arrow's library starts a thread for it, although Arrow uses another allocator.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


def started(modules: Iterable[str], folder: Path) -> ForkServer | None:
    """A fork server, its socket in a private folder in `folder`; None on systems and Rays without."""
    if POSSIBLE and at_least(ray := installed("ray"), FIRST_RAY):
        return ForkServer(modules, folder)
    if POSSIBLE:
        print(
            f"Ray {ray}: processes start more slowly than with Ray {FIRST_RAY} or newer", flush=True
        )
    return None


class ForkServer:
    """The process from which Ray's workers on this host are forked; it ends with the calling thread.

    Ray's daemons get its socket in their environment. Requests wait while it imports, and are refused as soon
    as it has ended.
    """

    def __init__(self, modules: Iterable[str], folder: Path) -> None:
        self.socket = str(Path(tempfile.mkdtemp(prefix="forks-", dir=folder)) / "socket")
        environment = {
            **ENVIRONMENT,
            **os.environ,
            # Ray reads these once, when its library is loaded. A worker without a job id can serve any job.
            # The raylet's end is also detected through the connection to it.
            "RAY_JOB_ID": "ffffffff",
            "RAY_RAYLET_PID": str(os.getpid()),
        }
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.socket)
            listening.listen(4096)
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(os.getpid()), json.dumps(sys.path), *modules],
                stdin=listening.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C is not for it
            )
        self.pid = self._process.pid

    def stop(self) -> None:
        """Kill the process, after Ray has stopped; say so if it ended before."""
        if self._process.returncode is None and self._process.poll() is not None:
            print(
                "warning: the process that forks Ray's workers ended early, so they started slowly"
            )
        self._process.kill()
        self._process.wait()
