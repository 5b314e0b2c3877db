"""Ray's workers are forked from a process that has imported for them; else they are as Ray starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = """
import json, os, sys
from stoker.hosts import cluster, forks
from stoker.config.schema import Config

cluster.set_environment("0" * 32)
starting = cluster.LocalCluster(Config(), forks.FOR_TRAINING)
import pathlib, psutil

below = {" ".join(p.cmdline()): p for p in psutil.Process().children()}
(SERVER,) = (p.pid for command, p in below.items() if "fork_server.py" in command)
(ray_start,) = (p for command, p in below.items() if "ray_command_line" in command)
assert pathlib.Path(ray_start.environ()[forks.SOCKET_VARIABLE]).is_socket(), "workers may ask at once"

with starting:
    import ray
    daemons = " ".join(word for p in psutil.Process().children(recursive=True) for word in p.cmdline())
    assert "idle_agent.py" in daemons and daemons.count("dashboard/agent.py") == 0, daemons

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"OWN": "yes"}})
    class Own:
        def variable(self):
            return os.environ.get("OWN")

    def drawn():
        # As Ray names its tasks and objects, in a thread.
        import threading

        found = []
        thread = threading.Thread(target=lambda: found.append(ray.ObjectID.from_random().hex()))
        thread.start()
        thread.join()
        return found[0]

    @ray.remote(num_cpus=0)
    class Worker:
        def about(self):
            import random, numpy
            return {
                "pid": os.getpid(),
                "group": os.getpgrp(),
                "imported": "torch" in sys.modules,
                "own": os.environ.get("OWN"),
                "folder": os.getcwd(),
                "chance": (random.random(), numpy.random.rand(), drawn(), drawn()),
                "cuda": sys.modules["torch"].cuda.is_initialized() if "torch" in sys.modules else False,
            }
        def end(self):
            os._exit(1)

    first = [Worker.remote() for _ in range(2)]
    a, b = ray.get([worker.about.remote() for worker in first])
    assert a["imported"] and b["imported"], "from the process that had imported it"
    assert not a["cuda"], "a process that has touched a GPU cannot be forked"
    assert a["pid"] != b["pid"]
    assert len({*a["chance"], *b["chance"]}) == 8, "nothing is drawn twice"
    assert a["group"] == a["pid"], "its end does not end the others"
    assert a["own"] is None and a["folder"] == os.getcwd()
    assert ray.get(Own.remote().variable.remote()) == "yes"
    try:
        ray.get(first[0].end.remote())
    except ray.exceptions.RayActorError:
        pass
    assert ray.get(first[1].about.remote())["pid"] == b["pid"], "another's end is not its own"

    os.kill(SERVER, 9)
    later = []
    for _ in range(10):  # Ray may have some that were forked before
        later.append(Worker.remote())
        if not ray.get(later[-1].about.remote())["imported"]:
            break
    else:
        raise AssertionError("where nobody forks, a worker starts as Ray starts it")
"""


GPUS = """
import importlib, torch

def count():
    raise SystemExit("counts GPUs")

torch._C._cuda_getDeviceCount = count
from stoker.hosts import forks

for name in forks.FOR_TRAINING:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""


def run(code: str, folder: Path) -> str:
    source = Path(__file__).resolve().parents[2] / "source_dir"
    environment = {**os.environ, "PYTHONPATH": str(source), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_is_imported_ahead_touches_no_gpu(tmp_path: Path) -> None:
    """CUDA cannot be used in a fork of a process that has as much as counted the GPUs."""
    run(GPUS, tmp_path)


def test_a_forked_worker_is_a_process_like_any_other(tmp_path: Path) -> None:
    shown = run(SCRIPT, tmp_path)
    assert "the process that forks Ray's workers ended early" in shown
    assert not list(tmp_path.glob("sray-*"))


def test_forking_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_FORK_WORKERS", "0")
    started = run(
        "import psutil\n"
        "from stoker.hosts import cluster, forks\n"
        "from stoker.config.schema import Config\n"
        "cluster.set_environment('0' * 32)\n"
        "with cluster.LocalCluster(Config(), forks.FOR_CHAINS):\n"
        "    print([p.cmdline() for p in psutil.Process().children()])\n",
        tmp_path,
    )
    assert "ray_compat" in started
    assert "fork_server.py" not in started
