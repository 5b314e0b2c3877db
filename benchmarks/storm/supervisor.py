"""Laptop: runs a storm: a seeded schedule of faults, and the job started again when a fault ended it."""

from __future__ import annotations

import random
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.storm.faults import FAULTS, Fault, NotPossible
from benchmarks.storm.ground import Ground
from benchmarks.storm.hosts import Host, Hosts
from benchmarks.storm.job import HEAD, StormJob
from benchmarks.storm.s3_proxy import S3Proxy
from benchmarks.storm.watch import Watch
from stoker_launcher.rehearsal.running import RehearsalRun

GAP_S = (20.0, 60.0)
"""Between two faults."""
FIRST_STEP_S, END_S, RECOVERY_S, FINISH_S = 400.0, 240.0, 400.0, 1800.0
"""Deadlines: for the first step of a launch, the end of a job that a fault ends, new steps after a fault has
healed, and the end of the job after the storm. They only catch hangs."""
STEPS_TO_RECOVER, LAUNCHES = 8, 3
TICK_S = 0.2


class StormError(Exception):
    """Laptop: the job did not do in time what it has to; the text names it."""


@dataclass(frozen=True)
class Planned:
    """Laptop: a fault to come."""

    fault: Fault
    seed: int
    """Of its details."""
    gap_s: float
    """Seconds until the next."""


@dataclass
class Event:
    """Laptop: a fault and what became of it."""

    fault: str
    hit: str
    at_s: float
    """Seconds since the storm began."""
    outcome: str = ""
    ok: bool = True
    from_step: int = 0
    to_step: int = 0
    recovered_s: float = 0.0
    """From the fault to the end of the last pause that it caused; 0: training did not pause."""
    paused_s: float = 0.0
    """The longest of these pauses."""
    lost: int = 0
    repeated: int = 0


@dataclass
class Storm:
    """Laptop: one storm."""

    job: StormJob
    ground: Ground
    proxy: S3Proxy
    hosts: Hosts
    watch: Watch
    seed: int
    events: list[Event] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)
    """How each launch ended."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Faults that could not be injected, and why."""
    clock: Path | None = None
    """What hosts preload to have a date of their own."""
    late: dict[str, float] = field(default_factory=dict)
    """Hosts that come late to the next launch."""
    _run: RehearsalRun | None = None
    _returning: dict[str, float] = field(default_factory=dict)
    """When hosts that were asked to return had ended."""
    _began: float = 0.0
    _log: Any = None

    @property
    def run(self) -> RehearsalRun:
        assert self._run is not None
        return self._run

    def host(self, name: str) -> Host:
        """A live host.

        Raises:
            NotPossible: it is not there.
        """
        found = self.hosts.live.get(name)
        if found is None:
            raise NotPossible(f"{name} is not there")
        return found

    def cpu_hosts(self) -> list[str]:
        """The CPU hosts that live now, at least one.

        Raises:
            NotPossible: there are none.
        """
        found = sorted(name for name in self.hosts.live if name != HEAD)
        if not found:
            raise NotPossible("no CPU host is there")
        return found

    def blow(self, minutes: float, names: list[str]) -> None:
        """Inject faults for some minutes, then let the job finish.

        Args:
            minutes: how long.
            names: the kinds of faults; each comes once before any comes again.

        Raises:
            StormError: a deadline passed.
        """
        self._began = time.monotonic()
        schedule = self._schedule(names)
        with (self.job.folder / "storm.log").open("w") as self._log:
            self._launch()
            until = time.monotonic() + minutes * 60
            due: deque[Planned] = deque()
            while time.monotonic() < until and not self._over():
                due.append(next(schedule))
                # What is not possible now comes first in the next round.
                for _ in range(len(due)):
                    if self._one(due[0]):
                        due.popleft()
                        break
                    due.rotate(-1)
            self.watch.in_hurry = True
            self.job.hurry()
            self._until(lambda: self.over, FINISH_S, "the end of the job after the storm")
            self._ended()

    def close(self) -> None:
        """End whatever still runs."""
        if self._run is not None and self.over is False:
            self._run.kill()
            self._run.wait()
        self.proxy.close()

    def _schedule(self, names: list[str]) -> Iterator[Planned]:
        """Endless and seeded."""
        draw = random.Random(self.seed)
        while True:
            for name in draw.sample(names, len(names)):
                yield Planned(FAULTS[name], draw.getrandbits(32), draw.uniform(*GAP_S))

    def _one(self, planned: Planned) -> bool:
        """Inject a fault and see it through; False if it is not possible now."""
        fault, draw, gap_s = planned.fault, random.Random(planned.seed), planned.gap_s
        began = time.monotonic()
        event = Event(fault.name, "", round(began - self._began, 1), from_step=self.watch.step)
        lasts_s = draw.uniform(*fault.lasts)
        act = fault.act(self, draw)
        try:
            event.hit = next(act)
        except NotPossible as reason:
            self.left_out[fault.name] = str(reason)
            self._say(f"{fault.name}: left out, {reason}")
            time.sleep(TICK_S)
            return False
        self.left_out.pop(fault.name, None)
        self.events.append(event)
        self._say(f"{fault.name}: {event.hit}, at step {self.watch.step}")
        try:
            if fault.ends:
                self._until(lambda: self.over, END_S, f"the end of the job after {fault.name}")
            else:
                self._for(lasts_s)
        finally:
            for _ in act:
                raise AssertionError(f"{fault.name} yields twice")
            self._bring_back()
        goal = self.watch.step + STEPS_TO_RECOVER
        for _ in range(LAUNCHES):
            if self.over and not self._over():
                self._after_end(fault, event)
            what = f"new steps after {fault.name}"
            self._until(lambda: self._returned(goal) or self.over, RECOVERY_S, what)
            if self._over() or not self.over:
                break
        else:
            raise StormError(
                f"after {fault.name}, {LAUNCHES} launches failed: {self.run.failure_reason}"
            )
        self._for(gap_s - (time.monotonic() - began))
        if self.over and not self._over():
            self._after_end(fault, event)
        until = time.monotonic()
        event.to_step = self.watch.step
        if pauses := self.watch.pauses(began, until):
            event.recovered_s = round(pauses[-1][1] - began, 1)
            event.paused_s = round(max(b - a for a, b in pauses), 1)
        event.outcome = event.outcome or "continued"
        self._say(f"{fault.name}: {event.outcome}, recovered after {event.recovered_s:.0f} s")
        return True

    def _bring_back(self) -> None:
        """Start the CPU hosts again that have ended: of the faults, or because they left."""
        if (
            self.over
            or self.run.results[HEAD].ended_s is not None
            or self.watch.step >= self.job.steps
        ):
            return
        for name, result in self.run.results.items():
            if (
                name != HEAD
                and result.ended_s is not None
                and self._returning.get(name) != result.ended_s
            ):
                self._returning[name] = result.ended_s
                self._say(f"{name} ended with {result.exit_code} and returns")
                self.run.inject("return", name)

    def _returned(self, goal: int) -> bool:
        """Whether training has gone on; hosts that leave only after a fault has healed return, too."""
        self._bring_back()
        return self.watch.step >= goal

    def _after_end(self, fault: Fault, event: Event) -> None:
        """The job has ended: as the fault has it, as it should at its end, or for no good reason."""
        code, reason = self._ended()
        if code == 0:
            event.outcome = "the job was done"
            return
        expected = code in fault.ends and re.search(fault.says, reason)
        event.outcome = f"ended with {code}, continued"
        if not expected:
            event.ok = False
            event.outcome = f"ended with {code}: {reason[:300]}"
            self._say(f"UNEXPECTED: {event.outcome}")
        self._launch()

    @property
    def over(self) -> bool:
        """Whether the running launch has ended."""
        return self.run.status() != "running"

    def _over(self) -> bool:
        """Whether the job is done."""
        return bool(self.ends) and self.ends[-1]["code"] == 0

    def _launch(self) -> None:
        self.watch.launch = len(self.ends) + 1
        self._run = self.job.launch(late=self.late)
        self._returning.clear()
        self.late = {}
        self.proxy.listen(self.run.process_id)
        self._say(f"launch {self.watch.launch}: {self.run.run_dir.name}")
        before = self.job.trace_starts()
        self._until(
            lambda: self.job.trace_starts() > before or self.over,
            FIRST_STEP_S,
            f"the first step of launch {self.watch.launch}",
        )

    def _ended(self) -> tuple[int, str]:
        code, reason = self.run.wait(), self.run.failure_reason
        self._drain()
        self.proxy.close()
        at_s = round(time.monotonic() - self._began, 1)
        self.ends.append(
            {"launch": self.watch.launch, "code": code, "at_s": at_s, "reason": reason}
        )
        self._say(f"launch {self.watch.launch} ended with {code} {reason[:200]}")
        return code, reason

    def _for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.over:
            self._tick()

    def _until(self, reached: Any, deadline_s: float, what: str) -> None:
        deadline = time.monotonic() + deadline_s
        while not reached():
            if time.monotonic() > deadline:
                raise StormError(f"waited {deadline_s:.0f} s for {what}, in vain")
            self._tick()

    def _tick(self) -> None:
        if self.watch.error is not None:
            raise StormError("the watch failed") from self.watch.error
        self._drain()
        time.sleep(TICK_S)

    def _drain(self) -> None:
        for line in self.run.logs():
            self._log.write(f"{time.monotonic() - self._began:7.1f} {line}\n")
        self._log.flush()

    def _say(self, text: str) -> None:
        at = time.monotonic() - self._began
        print(f"{at:7.1f} s  {text}", flush=True)
        self._log.write(f"{at:7.1f} ==== {text}\n")
        self._log.flush()


def as_rows(events: list[Event]) -> list[dict[str, Any]]:
    return [asdict(event) for event in events]
