"""Ray's workers are forked from a process that has imported for them; else they are as Ray starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from stoker.hosts import cluster, forks
from stoker.config.schema import Config

servers = []

def start(server):
    server.fork(forks.FOR_TRAINING, ["torch"])
    servers.append(server)

cluster.set_environment("0" * 32)
starting = cluster.LocalCluster(Config(), start)
SERVER = servers[0].pid
assert "torch" in sys.modules and "OMP_NUM_THREADS" not in os.environ, "nothing else is left"
import pathlib, time

def wait_for(name):
    # Else a worker starts without forking after a while.
    while not (pathlib.Path(servers[0].socket).parent / name).exists():
        time.sleep(0.1)

with starting:
    import ray
    wait_for("socket")

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

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {forks.TRAINS_VARIABLE: "1"}})
    class Trains(Worker.__ray_metadata__.modified_class):
        def has(self):
            return "torch._dynamo" in sys.modules, self.about()["imported"]

    wait_for("training")
    assert ray.get(Trains.remote().has.remote()) == (True, True), "from the second server"
    import psutil

    second = min(psutil.Process(SERVER).children(), key=lambda child: child.create_time())
    second.kill()
    second.wait()
    assert ray.get(Trains.remote().has.remote()) == (False, True), "the first one stands in"

    os.kill(SERVER, 9)
    c = ray.get(Worker.remote().about.remote())
    assert not c["imported"], "where nobody forks, a worker starts as Ray starts it"
"""


GPUS = """
import importlib, torch

def count():
    raise SystemExit("counts GPUs")

torch._C._cuda_getDeviceCount = count
from stoker.hosts import forks

for name in (*forks.TRAINING, *forks.LATER):
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""


def run(code: str, folder: Path) -> str:
    source = Path(__file__).resolve().parents[2] / "source_dir"
    environment = {**os.environ, "PYTHONPATH": str(source), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=500, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_is_imported_ahead_touches_no_gpu(tmp_path: Path) -> None:
    """CUDA cannot be used in a fork of a process that has as much as counted the GPUs."""
    run(GPUS, tmp_path)


def test_a_forked_worker_is_a_process_like_any_other(tmp_path: Path) -> None:
    run(SCRIPT, tmp_path)
    assert not list(tmp_path.glob("sray-*"))


def test_forking_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_FORK_WORKERS", "0")
    started = run(
        "from stoker.hosts import cluster\n"
        "from stoker.config.schema import Config\n"
        "cluster.set_environment('0' * 32)\n"
        "with cluster.LocalCluster(Config(), lambda server: print('forks')):\n"
        "    pass\n",
        tmp_path,
    )
    assert "forks" not in started
