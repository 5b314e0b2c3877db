"""Laptop: watches a storm's job: how far it is, when it paused, and the memory of its hosts."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.storm.hosts import Hosts, anonymous_mb, command_of
from benchmarks.storm.job import Trace

EVERY_S, HOSTS_EVERY_S = 0.25, 3.0
PAUSE_S = 3.0
"""A longer time without a new step is a pause. Steps take a quarter of a second, checkpoints included."""


@dataclass(frozen=True)
class Sample:
    """Laptop: memory at a time."""

    at: float
    launch: int
    step: int
    used_mb: dict[str, dict[int, float]]
    """By host and process; `storm` is this process."""


@dataclass
class Watch:
    """Laptop: a thread that samples; the clock is `time.monotonic`."""

    trace: Trace
    hosts: Hosts
    launch: int = 0
    """Number of the launch; set by the supervisor."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """When the job was first seen at a step that it had never reached."""
    memory: list[Sample] = field(default_factory=list)
    commands: dict[int, str] = field(default_factory=dict)
    """The last command line of each process, shortened: this process's memory is watched, too."""
    in_hurry: bool = False
    """The storm is over; the rest of the job runs many times faster, and growth per minute means little."""
    error: BaseException | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._sample, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=30)

    @property
    def step(self) -> int:
        """The highest step so far."""
        return self.steps[-1][1] if self.steps else 0

    def pauses(self, since: float, until: float) -> list[tuple[float, float]]:
        """Times without a new step, as (begin, end), that overlap a window."""
        times = [since, *(at for at, _ in self.steps if since < at <= until), until]
        return [(a, b) for a, b in itertools.pairwise(times) if b - a > PAUSE_S]

    def save(self, file: Path) -> None:
        """Write the memory of every process over time."""
        file.write_text(
            json.dumps({"commands": self.commands, "samples": [asdict(s) for s in self.memory]})
        )

    def _sample(self) -> None:
        measured = 0.0
        try:
            while not self._stop.wait(EVERY_S):
                step, now = self.trace.step(), time.monotonic()
                if step > self.step:
                    self.steps.append((now, step))
                if self.in_hurry or now - measured < HOSTS_EVERY_S:
                    continue
                measured = now
                live = self.hosts.refresh()
                used = {name: host.used_mb() for name, host in live.items()}
                used["storm"] = {os.getpid(): anonymous_mb(os.getpid())}
                self.memory.append(Sample(now, self.launch, step, used))
                found = {
                    process: command_of(process) for of_host in used.values() for process in of_host
                }
                self.commands |= {
                    process: command[:80].strip() for process, command in found.items() if command
                }
        except BaseException as error:  # the supervisor raises it
            self.error = error
