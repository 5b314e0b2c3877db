"""Laptop: CPU time on the GPU host beside a train worker that only waits for its GPU.

A job on two rehearsed hosts: chain workers on the CPU host, steps that sleep `STEP_S` on the other. Once
training runs, the CPU time of every process on that host is read before and after `SECONDS`. Stoker's are
driver, data service and the actors that it starts; Ray's are what a cluster and a TorchTrainer take anyway.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Measure
from benchmarks.jobs import run_job
from stoker.events.kinds import json_lines

STEP_S, BATCH, BLOCK_RECORDS = 0.1, 32, 256
LEAST_STEPS_S, WARM_S, SECONDS = 75, 8.0, 30.0
GOAL = 0.02
TRAIN, OURS, RAYS = "train worker", "Stoker", "Ray"
KINDS = {
    "RayTrainWorker": (TRAIN, "train worker"),
    "ray::Coordinator": (OURS, "data service, with Ray Data's executor"),
    "ray::HostAgent": (OURS, "agent"),
    "ray::fit": (OURS, "task that calls TorchTrainer.fit"),
    "ray::TrainController": (RAYS, "Ray Train's controller"),
    "ray::": (RAYS, "other actors of Ray Data and Ray Train"),
    "gcs_server": (RAYS, "GCS"),
    "raylet/raylet": (RAYS, "raylet"),
    "ray_command_line": (RAYS, "ray start"),
    "code/train.py": (OURS, "driver"),
    "stoker/hosts/forks": (OURS, "fork server"),
    "": (OURS, "cleaners"),
}
"""Words of a command line → whose process it is and its name, the first that is found."""
JOB = {
    "name": "gpu-host",
    "recipe": "asleep:Asleep",
    "params": {
        "records": int(LEAST_STEPS_S / STEP_S) * BATCH,
        "cpu_s": 0.0005,
        "bytes_per_sample": 150_528,
        "gpu_samples_per_s": BATCH / STEP_S,
    },
    "data": {"preprocess_on": ["cpu"], "block_records": BLOCK_RECORDS},
    "train": {"epochs": 1, "batch_size": BATCH},
    "cluster": {"object_store_mb": 192},
    "rehearsal": {
        "hosts": "gpu=1,cpu=1",
        "entry": "container",
        "cpus": 4,
        "shm_mb": 512,
        "timeout_s": 280,
    },
}


def run() -> list[Measure]:
    """Run the benchmark and return its rows.

    Raises:
        RuntimeError: training did not last as long as it is watched.
    """
    with tempfile.TemporaryDirectory() as name:
        cores, over = Counter[tuple[str, str]](), threading.Event()
        watcher = threading.Thread(target=watch, args=(cores, over))
        watcher.start()
        try:
            run_job(Path(name), JOB, "--on", "rehearsal", timeout_s=300)
        finally:
            over.set()
            watcher.join()
    if not cores:
        raise RuntimeError("training did not last as long as it is watched")
    return rows(cores)


def rows(cores: Counter[tuple[str, str]]) -> list[Measure]:
    """Shares of a core, of Stoker's processes and of each part."""
    whole = {
        whose: sum(used for (of, _), used in cores.items() if of == whose) for whose in (OURS, RAYS)
    }
    ours, unit = whole[OURS], "cores"
    return [
        Measure(
            "GPU host beside its train worker",
            ours,
            GOAL,
            "the goal",
            GOAL / ours,
            1.0,
            ours <= GOAL,
            unit,
        ),
        Measure("  Ray itself there", whole[RAYS], None, "–", None, None, None, unit),
        *(
            Measure(f"  GPU host: {name}", used, None, whose, None, None, None, unit)
            for (whose, name), used in cores.most_common()
        ),
    ]


def watch(cores: Counter[tuple[str, str]], over: threading.Event) -> None:
    """Fill in the cores that each kind of process uses on the GPU host while training runs."""
    while not (over.wait(1.0) or trains()):
        pass
    if over.wait(WARM_S):
        return
    before, began = on_gpu_host(), time.perf_counter()
    if over.wait(SECONDS):
        return
    after, spent = on_gpu_host(), time.perf_counter() - began
    for pid, (kind, command, seconds) in after.items():
        used = (seconds - before.get(pid, (kind, command, 0.0))[2]) / spent
        if used > 0.0005:
            print(f"{used:8.4f} cores  {kind[0]:<13} {command[:90]}", flush=True)
        cores[kind] += used


def kind_of(command: str) -> tuple[str, str]:
    """Whose process it is, and its name."""
    return next(kind for words, kind in KINDS.items() if words in command)


def trains() -> bool:
    """Whether the train worker has logged a step."""
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            if "RayTrainWorker" in " ".join(each.cmdline()):
                files = Path(f"/proc/{each.pid}/root/opt/ml").rglob("events.jsonl")
                return any(event["event"] == "step" for file in files for event in json_lines(file))
    return False


def on_gpu_host() -> dict[int, tuple[tuple[str, str], str, float]]:
    """Kind, command and CPU seconds of the processes that share a network with the train worker."""
    found: dict[str, dict[int, Any]] = {}
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            command, times = " ".join(each.cmdline()), each.cpu_times()
            host = found.setdefault(str(Path(f"/proc/{each.pid}/ns/net").readlink()), {})
            host[each.pid] = kind_of(command), command, times.user + times.system
    return next(
        host for host in found.values() if any(kind[0] == TRAIN for kind, *_ in host.values())
    )
