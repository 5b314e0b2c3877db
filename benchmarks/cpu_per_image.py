"""Laptop: where the CPU time of an image goes on one machine, by process and function, and a DataLoader's.

The job and the peer are those of `end_to_end`: photos of 500×375 to 224², two chain workers or two DataLoader
workers with the same decode chain. A watcher reads the CPU time of every process that the command started;
what falls into the window of `end_to_end` counts. A second run of each is sampled by py-spy, which also
slows it down, for the functions: shares of the samples, times the CPU time of the process in the first run.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import end_to_end
from benchmarks.harness import Measure
from benchmarks.loaders import shards
from benchmarks.loaders.work import WINDOW, write_folder
from benchmarks.per_core import photos

ROUNDS = 3
LOOK_EVERY_S = 0.2
SAMPLED_AFTER_S, SAMPLED_S, SAMPLES_PER_S = 1.0, 6, 100
TOP = 6
"""Functions to show for each kind of process."""
PEER = "DataLoader, our decode chain"
KINDS = {
    "ray::MapWorker": "chain workers",
    "ray::Coordinator": "data service",
    "ray::DataService": "data service",
    "ray::RayTrainWorker": "train worker",
    "raylet": "Ray's daemons",
    "gcs_server": "Ray's daemons",
    "ray::DashboardAgent": "Ray's daemons",
    "ray::RuntimeEnvAgent": "Ray's daemons",
    "dashboard": "Ray's daemons",
    "log_monitor": "Ray's daemons",
    "ray::": "Ray's other workers",
    "fork_server": "Ray's other workers",
    "launcher/submit.py": "launcher and driver",
    "benchmarks.loaders": "train worker",
}
"""Words of a command line → kind of process, the first that is found."""
OTHER = "other"
WAITING = (
    "Condition.wait (", "Popen._try_wait (", "Worker.main_loop (", "ThreadRunner._monitor_target (", "wait (",
    "_PollLikeSelector.select (", "_worker (concurrent/", "socket.accept (", "Event.wait (", "look (",
)  # fmt: skip
"""Functions in which a thread waits although py-spy takes it for busy."""
SAMPLED = {"chain workers", "data service", "train worker", "launcher and driver"}


@dataclass
class Watched:
    """CPU seconds of the processes that this one started, at each look."""

    looks: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By process: (`time.perf_counter()`, CPU seconds)."""
    kinds: dict[int, str] = field(default_factory=dict)

    def look(self) -> None:
        """Read all processes once."""
        for each in psutil.Process().children(recursive=True):
            try:
                command, times = " ".join(each.cmdline()), each.cpu_times()
                parent = each.parent()
            except psutil.Error:
                continue
            known = next((kind for words, kind in KINDS.items() if words in command), OTHER)
            # torch's workers are forks of the script and have its command line.
            if parent is not None and "benchmarks.loaders" in command and parent.pid in self.kinds:
                known = "chain workers"
            self.kinds[each.pid] = known
            self.looks[each.pid].append((time.perf_counter(), times.user + times.system))

    def chain_seconds(self) -> float:
        """CPU seconds that the slowest chain worker has used since it was first seen; 0 without any."""
        chain = [self.looks[pid] for pid, kind in self.kinds.items() if kind == "chain workers"]
        return min((looks[-1][1] - looks[0][1] for looks in chain), default=0.0)

    def used(self, window: tuple[float, float]) -> Counter[str]:
        """CPU seconds between two points of time, by kind of process."""
        used: Counter[str] = Counter()
        for pid, looks in self.looks.items():
            at, seconds = zip(*looks, strict=True)
            began, ended = np.interp(window, at, seconds)
            used[self.kinds[pid]] += float(ended - began)
        return used


def watched(run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Watched]:
    """Run a loader while its processes are looked at."""
    seen, over = Watched(), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            seen.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return run(), seen
    finally:
        over.set()
        thread.join()


CORES = "cores in use"


def per_image(run: Callable[[], dict[str, Any]]) -> dict[str, float]:
    """CPU milliseconds of an image by kind of process, and how many cores they used together."""
    result, seen = watched(run)
    began, ended = result["window_at"]
    used = seen.used((began, ended))
    images = (WINDOW[1] - WINDOW[0]) * end_to_end.TOTAL
    return {CORES: used.total() / (ended - began)} | {
        kind: 1000 * s / images for kind, s in used.items()
    }


def functions(run: Callable[[], dict[str, Any]], out: Path) -> dict[str, Counter[str]]:
    """Samples by function for each kind of process; C code counts for the function that called it."""
    sampling: dict[int, subprocess.Popen[bytes]] = {}
    seen, over = Watched(), threading.Event()

    def sample() -> None:
        while not over.wait(LOOK_EVERY_S) and not sampling:
            seen.look()
            if seen.chain_seconds() > SAMPLED_AFTER_S:
                wanted = [
                    pid
                    for pid in seen.kinds
                    if psutil.pid_exists(pid) and seen.kinds[pid] in SAMPLED
                ]
                sampling.update({pid: spy(pid, out / f"{pid}.raw") for pid in wanted})

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        run()
    finally:
        over.set()
        thread.join()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for pid, process in sampling.items():
        process.wait()
        file = out / f"{pid}.raw"
        for line in file.read_text().splitlines() if file.exists() else []:
            stack, _, count = line.rpartition(" ")
            function = stack.rpartition(";")[2]
            if function.strip() and not function.startswith(WAITING):
                found[seen.kinds[pid]][function] += int(count)
    return found


def spy(pid: int, file: Path) -> subprocess.Popen[bytes]:
    """Sample the functions that use the CPU in a process, for some seconds."""
    command = [
        "record",
        "--pid",
        str(pid),
        "--duration",
        str(SAMPLED_S),
        "--rate",
        str(SAMPLES_PER_S),
    ]
    spy = Path(sys.executable).with_name("py-spy")  # Ray's dashboard brings it along
    form = ["--format", "raw", "--nolineno", "--output", str(file)]
    return subprocess.Popen(
        [spy, *command, *form], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_folder(folder / "data", photos(500, 375), end_to_end.TOTAL)
        shards.write(folder / "data", mosaic_too=False)
        loaders: dict[str, Callable[[], dict[str, Any]]] = {
            "Stoker": lambda: end_to_end.stoker(folder, end_to_end.TOTAL),
            PEER: lambda: end_to_end.peer(folder, "dataloader_ours"),
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
        for _ in range(ROUNDS):
            for name, loader in loaders.items():
                found[name].append(per_image(loader))
        ours, peer = (medians(found[name]) for name in loaders)
        cores = Measure(CORES, ours.pop(CORES), peer.pop(CORES), PEER, None, None, None, "cores")
        for name, loader in loaders.items():
            show(name, functions(loader, folder), medians(found[name]))
    order = sorted({*ours, *peer}, key=lambda kind: -ours.get(kind, 0.0))
    total = Measure(
        "CPU per image", sum(ours.values()), sum(peer.values()), PEER,
        sum(peer.values()) / sum(ours.values()), None, None, "ms",
    )  # fmt: skip
    parts = [
        Measure(f"  {kind}", ours.get(kind, 0.0), peer.get(kind), PEER, None, None, None, "ms")
        for kind in order
    ]
    return [total, *parts, cores]


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """By kind of process, over the rounds."""
    kinds = {kind for each in rounds for kind in each}
    return {kind: statistics.median(each.get(kind, 0.0) for each in rounds) for kind in kinds}


def show(name: str, found: dict[str, Counter[str]], used: dict[str, float]) -> None:
    """Print the functions of each kind of process with their CPU milliseconds of an image."""
    for kind, samples in found.items():
        print(f"{name}, {kind}: {used.get(kind, 0.0):.3f} ms of an image", flush=True)
        for function, count in samples.most_common(TOP):
            print(f"  {used.get(kind, 0.0) * count / samples.total():8.3f}  {function}", flush=True)
