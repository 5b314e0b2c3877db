"""Laptop: the faults of a storm. Each is a generator: it injects before its `yield` and heals after it.

It yields what it hit, in words. A fault with `ends` ends the job; the supervisor then heals it and starts the
job again, which continues from its checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.storm.ground import BLKIO
from benchmarks.storm.hosts import MEMORY, Host, kill
from benchmarks.storm.job import HEAD, LATE_S

if TYPE_CHECKING:
    from benchmarks.storm.supervisor import Storm

Act = Callable[["Storm", random.Random], Iterator[str]]
CHAIN_WORKER = "ray::MapWorker"
TRAIN_WORKER = "ray::RayTrainWorker"
RAYLET = "raylet/raylet"
SLOW_DISK_BYTES_PER_S = 16_384
STEP_S = 3600
"""Of a host's date, either way."""
HOG_MB = 1500
"""The most that an out-of-memory fault allocates; the limit is far below."""


@dataclass(frozen=True)
class Fault:
    """Laptop: a kind of fault."""

    name: str
    act: Act
    lasts: tuple[float, float]
    """Seconds from injecting to healing it."""
    ends: tuple[int, ...] = ()
    """The job's exit codes if it must end; empty: it must continue."""
    says: str = ""
    """A regular expression for the job's FailureReason."""


FAULTS: dict[str, Fault] = {}


class NotPossible(Exception):  # noqa: N818 - not an error: this machine, or this moment, lacks something
    """Laptop: the fault cannot be injected; the text says why."""


def fault(
    lasts: tuple[float, float] = (0, 0), ends: tuple[int, ...] = (), says: str = ""
) -> Callable[[Act], Act]:
    """Register a fault under the name of its function."""

    def register(act: Act) -> Act:
        name = act.__name__.replace("_", "-")
        FAULTS[name] = Fault(name, act, lasts, ends, says)
        return act

    return register


@fault()
def kill_chain_worker(storm: Storm, draw: random.Random) -> Iterator[str]:
    host = storm.host(draw.choice(storm.cpu_hosts()))
    kill(_one_of(draw, host.find(CHAIN_WORKER), f"no chain worker on {host.name}"))
    yield f"one on {host.name}"


@fault()
def kill_train_worker(storm: Storm, draw: random.Random) -> Iterator[str]:
    kill(_one_of(draw, storm.host(HEAD).find(TRAIN_WORKER), "no train worker"))
    yield "the only one"


@fault()
def hang_train_worker(storm: Storm, draw: random.Random) -> Iterator[str]:
    kill(_one_of(draw, storm.host(HEAD).find(TRAIN_WORKER), "no train worker"), signal.SIGSTOP)
    yield "the only one, for good"


@fault()
def kill_raylet(storm: Storm, draw: random.Random) -> Iterator[str]:
    host = storm.host(draw.choice(storm.cpu_hosts()))
    kill(_one_of(draw, host.find(RAYLET), f"no raylet on {host.name}"))
    yield f"on {host.name}"


@fault(lasts=(5, 25))
def lose_host(storm: Storm, draw: random.Random) -> Iterator[str]:
    name = draw.choice(storm.cpu_hosts())
    storm.run.inject("kill", name)
    yield f"{name}, which returns"


@fault(lasts=(10, 40))
def lose_all_cpu_hosts(storm: Storm, draw: random.Random) -> Iterator[str]:
    names = storm.cpu_hosts()
    for name in names:
        storm.run.inject("kill", name)
    yield f"{', '.join(names)}, which return"


@fault(lasts=(3, 60))
def pause(storm: Storm, draw: random.Random) -> Iterator[str]:
    name = draw.choice(storm.cpu_hosts())
    storm.run.inject("pause", name)
    yield name
    storm.run.inject("resume", name)


@fault(lasts=(2, 8))
def pause_head(storm: Storm, draw: random.Random) -> Iterator[str]:
    storm.run.inject("pause", HEAD)
    yield HEAD
    storm.run.inject("resume", HEAD)


@fault(lasts=(2, 30))
def partition(storm: Storm, draw: random.Random) -> Iterator[str]:
    name = draw.choice(storm.cpu_hosts())
    storm.run.inject("partition", name)
    yield name
    storm.run.inject("heal", name)


@fault(lasts=(10, 25))
def slow_link(storm: Storm, draw: random.Random) -> Iterator[str]:
    name = draw.choice([HEAD, *storm.cpu_hosts()])
    storm.run.inject("slow", name)
    yield name
    storm.run.inject("fast", name)


@fault(lasts=(10, 25))
def slow_disk(storm: Storm, draw: random.Random) -> Iterator[str]:
    """By the limit of the root cgroup for this device: the kernel writes dirty pages in its own name."""
    try:
        BLKIO.write_text(f"{storm.ground.device} {SLOW_DISK_BYTES_PER_S}")
    except OSError as error:
        raise NotPossible(f"this machine cannot limit a disk ({error})") from None
    yield "of the checkpoints"
    BLKIO.write_text(f"{storm.ground.device} 0")


@fault(ends=(1,), says="is full")
def full_disk(storm: Storm, draw: random.Random) -> Iterator[str]:
    filler = storm.ground.disk / "filler"
    _fill(filler)
    yield "of the checkpoints"
    filler.unlink()


@fault(lasts=(10, 25))
def full_shm(storm: Storm, draw: random.Random) -> Iterator[str]:
    host = storm.host(draw.choice(storm.cpu_hosts()))
    filler = host.root / "dev/shm/filler"
    _fill(filler)
    yield f"on {host.name}"
    with contextlib.suppress(OSError):  # the host may have ended
        filler.unlink()


@fault(lasts=(10, 40))
def clock_step(storm: Storm, draw: random.Random) -> Iterator[str]:
    if storm.clock is None:
        raise NotPossible("there is no C compiler to build clock.c with")
    host = storm.host(draw.choice([HEAD, *storm.cpu_hosts()]))
    step = draw.choice([STEP_S, -STEP_S])
    clock = host.root / "tmp/clock"
    clock.write_text(str(step))
    yield f"{step:+d} s on {host.name}, and back"
    with contextlib.suppress(OSError):  # the host may have ended
        clock.write_text("0")


@fault()
def out_of_memory(storm: Storm, draw: random.Random) -> Iterator[str]:
    host = storm.host(draw.choice(storm.cpu_hosts()))
    if host.memory is None:
        raise NotPossible(f"{MEMORY} is not there: this machine has no memory cgroups of version 1")
    killed = _exhaust(host)
    yield f"on {host.name}, where the kernel killed {killed}"


@fault(ends=(143,))
def sigterm(storm: Storm, draw: random.Random) -> Iterator[str]:
    storm.run.stop()
    yield "every host, as StopTrainingJob does"


@fault(ends=(137,))
def lose_head(storm: Storm, draw: random.Random) -> Iterator[str]:
    storm.run.inject("kill", HEAD)
    yield HEAD


@fault(ends=(1,))
def kill_launcher(storm: Storm, draw: random.Random) -> Iterator[str]:
    storm.run.kill()
    yield "and with it all hosts"


@fault(ends=(137,))
def late_host(storm: Storm, draw: random.Random) -> Iterator[str]:
    storm.run.inject("crash", HEAD)
    yield f"after a crash of the head, one comes {LATE_S:.0f} s late"
    storm.late = {draw.choice(["algo-2", "algo-3"]): LATE_S}


@fault(ends=(137,))
def corrupt_checkpoint(storm: Storm, draw: random.Random) -> Iterator[str]:
    folder = storm.ground.disk / "checkpoints"
    if len(list(folder.glob("step-*/manifest.json"))) < 2:
        raise NotPossible("there is no checkpoint before the newest yet")
    storm.run.inject("crash", HEAD)
    yield "the newest, after a crash of the head"
    newest = max(folder.glob("step-*/manifest.json")).parent
    file = draw.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content[: draw.choice([len(content), len(content) // 2])])


def _s3(mode: str) -> Act:
    def act(storm: Storm, draw: random.Random) -> Iterator[str]:
        storm.proxy.mode = mode
        yield "requests for records"
        storm.proxy.mode = "well"

    act.__name__ = f"s3_{mode}"
    return act


for _mode in ("errors", "throttled", "resets"):
    fault(lasts=(10, 25))(_s3(_mode))


def _one_of(draw: random.Random, processes: list[int], otherwise: str) -> int:
    if not processes:
        raise NotPossible(otherwise)
    return draw.choice(processes)


def _fill(file: Path) -> None:
    """Write to a file until its disk is full."""
    with file.open("wb", buffering=0) as output:
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while output.write(b"\1" * size) == size:
                    pass
        with contextlib.suppress(OSError):
            os.fsync(output.fileno())


HOG = """
import sys, threading, time

def grow():
    held = []
    for _ in range(int(sys.argv[1])):
        held.append(bytearray(2**20))
        time.sleep(0.004)
    time.sleep(1e6)

print("up", flush=True)
sys.stdin.readline()
threading.Thread(target=grow, daemon=True).start()
sys.stdin.read()
"""
"""It ends with its input: killed from outside its namespace, it would stay there as a zombie."""


def _exhaust(host: Host) -> str:
    """Allocate in a host's cgroup until the kernel kills another of its processes; returns which."""
    assert host.memory is not None
    limit = host.memory / "memory.limit_in_bytes"
    kills = host.memory / "memory.oom_control"
    earlier, there = _kills(kills), {p: name for p in host.processes() if (name := _name(p))}
    enter = ("nsenter", "--target", str(host.init), "--pid", "--mount")
    hog = subprocess.Popen(
        [*enter, sys.executable, "-c", HOG, str(HOG_MB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert hog.stdin is not None and hog.stdout is not None
    try:
        hog.stdout.readline()
        for process in [p for p in host.processes() if p not in there]:
            (host.memory / "cgroup.procs").write_text(str(process))
            # Not this one, but what the kernel thinks best: Ray marks its workers for that.
            with contextlib.suppress(OSError):
                Path(f"/proc/{process}/oom_score_adj").write_text("-1000")
        used = int((host.memory / "memory.usage_in_bytes").read_text())
        limit.write_text(str(used + 32 * 2**20))
        hog.stdin.write(b"\n")
        hog.stdin.flush()
        deadline = time.monotonic() + 60
        while _kills(kills) == earlier and time.monotonic() < deadline:
            time.sleep(0.01)
        if _kills(kills) == earlier:
            raise NotPossible(f"{HOG_MB} MB did not exhaust {host.name}")
    finally:
        limit.write_text("-1")
        hog.communicate(timeout=30)
    time.sleep(0.5)
    gone = [name for process, name in there.items() if not Path(f"/proc/{process}").exists()]
    return ", ".join(gone) or "a process of it"


def _kills(file: Path) -> int:
    lines = dict(line.split() for line in file.read_text().splitlines())
    return int(lines.get("oom_kill", 0))


def _name(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""
