"""Head: the work of a script job, and the actor between the driver and the script's processes: events, stops
and exits.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.config import redaction
from stoker.config.schema import Config
from stoker.events import kinds
from stoker.figures import count_of
from stoker.hosts.topology import NODE_LABEL
from stoker.place import LAUNCH_DIR_VARIABLE, RunPlace
from stoker.scripts.script_checks import script_command_line
from stoker.session import NAMESPACE

if TYPE_CHECKING:
    from stoker.events.sinks import Tracking

GRACE_S = 3.0
"""Time between the first failure and stopping the other ranks, which may report the cause themselves."""


class ScriptWork:
    loop = "stoker.scripts.rank:run_script"
    torch_config = "stoker.train.trainer:ScriptConfig"

    def __init__(self, config: Config, place: RunPlace, tracking: Tracking) -> None:
        import ray

        # The supervisor's process and the train workers need neither.
        from stoker.train.recipe_work import count_workers
        from stoker.train.resume import own_place

        self.config, self.place = config, place
        self.job = f"{place.run_dir.name}-{secrets.token_hex(4)}"
        self.head = ray.get_runtime_context().get_node_id()
        self.where, self.synced = own_place(config, place)
        if config.driver:
            # Its own trainer starts train workers, and says where their checkpoints go.
            self.loop, self.workers, self.use_gpu = "stoker.scripts.rank:run_driver", 0, False
            return
        self.workers, self.use_gpu = count_workers(config, ray.cluster_resources())

    def start_coordinator(self) -> Any:
        import ray

        actor = ray.remote(Supervisor).options(
            num_cpus=0, label_selector={NODE_LABEL: self.head}, name=self.job, namespace=NAMESPACE
        )
        scales = self.config.cluster.cpu_hosts.max > 0
        processes = self.workers or 1
        supervisor = actor.remote(Path(str(self.config.script)).name, processes, scales)
        supervisor.watch_hosts.remote()
        return supervisor

    def opening_line(self) -> str:
        command = script_command_line(self.config)
        if self.config.driver:
            return f"{command}; starting it once, as a Ray driver on this host …"
        workers = count_of(self.workers, f"{'GPU' if self.use_gpu else 'CPU'} train worker")
        return f"{command}; starting it on {workers} …"

    def notes(self) -> list[str]:
        folder = Path(self.where)
        files = count_of(there := len(list(folder.iterdir())) if folder.is_dir() else 0, "file")
        return [f"{files} from before in {folder}: stoker.checkpoint_dir()"] if there else []

    def settings(self) -> dict[str, Any]:
        local = self.place.name == "local"
        return {
            "job": self.job,
            "run_dir": str(self.place.run_dir),
            "lasting": str(self.place.lasting or self.place.run_dir),
            "killed_after_s": self.place.killed_after_s,
            "head": self.head,
            "checkpoint_dir": self.where,
            "model_dir": str(self.place.model_dir),
            # Relative paths in the script resolve as they did where the command was typed.
            "folder": os.environ.get(LAUNCH_DIR_VARIABLE) if local else None,
            "channels": self.config.params,
        }

    def write_statistics(self, file: Path) -> None:
        """What Ray Data logged on the head of each dataset that a Ray script executed; nothing without any."""
        import ray

        about = ray.init(ignore_reinit_error=True, logging_level=logging.ERROR).address_info
        logs = sorted(Path(about["session_dir"], "logs/ray-data").glob("ray-data-*.log"))
        texts = [f"== {log.stem}\n{log.read_text(errors='replace')}" for log in logs]
        if texts:
            file.write_text(redaction.scrub("\n".join(texts)))

    def leaves_model(self) -> bool:
        return self.place.model_dir.is_dir() and any(self.place.model_dir.iterdir())


@dataclass(frozen=True)
class RankCommand:
    stop: str = ""
    """Why the script must stop (a request, or another rank's failure); "" to continue."""
    soon: bool = False
    """Whether it has only seconds, because the ranks can no longer save a common state."""
    over: bool = False
    failure: str = ""


class Supervisor:
    """One per run, uses zero CPUs; every call returns immediately."""

    def __init__(self, script: str, workers: int, scales: bool = False) -> None:
        self.script, self.workers = script, workers
        self.unfed = scales
        """Whether hosts may be requested for a loader that training has not used so far."""
        self.events: list[dict[str, Any]] = []
        self.attempts: list[str] = []
        self.exits: list[Exit] = []
        self.stop_reason = ""
        self.failed_at = math.inf

    def watch_hosts(self) -> None:
        from stoker.serve.blocks.agents import Agents  # not in train workers: it loads PyTorch

        self._agents = Agents(self._tell)
        self._agents.start()

    def report(
        self,
        attempt: str,
        rank: int,
        output: str = "",
        events: Sequence[dict[str, Any]] = (),
        end: Exit | None = None,
    ) -> RankCommand:
        """Train worker's call, several times a second: what has changed since the last one."""
        if attempt not in self.attempts:
            self._begin(attempt)
        if attempt != self.attempts[-1]:
            return RankCommand(stop="the train workers have restarted", soon=True, over=True)
        if output:
            self._tell(kinds.ScriptOutput(rank=rank, text=output))
        for event in events:
            self.unfed = self.unfed and event["event"] != "loader"
            self.events.append(_finite(event))
        if end is not None and end.rank not in {each.rank for each in self.exits}:
            self._ended(end)
        return self._order()

    def _begin(self, attempt: str) -> None:
        self.attempts.append(attempt)
        self.exits, self.failed_at = [], math.inf
        if len(self.attempts) > 1:
            text = f"restarting the script on all train workers (start {len(self.attempts)})"
            self._tell(kinds.Note(text=text))

    def _ended(self, end: Exit) -> None:
        # After a stop request, ranks that stop may make others fail.
        stopped = self.stop_reason and any(other.asked for other in [*self.exits, end])
        self.exits.append(end)
        if end.failed and not stopped:
            self.failed_at = min(self.failed_at, time.monotonic())
        if len(self.exits) == self.workers and all(e.code == 0 and not e.asked for e in self.exits):
            self._tell(kinds.Completed())
            if self.unfed:
                why = "the script did not train on a stoker.DataLoader"
                self._tell(kinds.Note(text=f"cluster.cpu_hosts had no effect: {why}"))

    def _order(self) -> RankCommand:
        over = len(self.exits) == self.workers
        if self.failed_at < math.inf:
            ending = over or time.monotonic() - self.failed_at > GRACE_S
            failure = failure_of(self.script, self.exits)
            return RankCommand(failure if ending else "", True, over, failure if over else "")
        return RankCommand(self.stop_reason, False, over)

    def log(self, event: kinds.Event) -> None:
        self._tell(event.received())

    def take(self, event: dict[str, Any]) -> None:
        """Call of a train worker that a Ray script's own trainer started."""
        self.events.append(_finite(event))

    def _tell(self, event: kinds.Event) -> None:
        self.events.append(event.record())

    def request_stop(self, reason: str) -> None:
        if not self.stop_reason:
            self.stop_reason = reason
            self._tell(kinds.StopRequested(reason=reason))

    def drain(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events

    def figures(self) -> dict[str, Any]:
        """Empty, because a script has its own data loading."""
        return {}


def _finite(event: dict[str, Any]) -> dict[str, Any]:
    """Replace non-finite numbers by null, because JSON has no NaN."""
    metrics = event.get("metrics")
    if not isinstance(metrics, dict):
        return event
    return {**event, "metrics": {k: v if math.isfinite(v) else None for k, v in metrics.items()}}


LOG = "logs/script-rank-{rank}.log"
TRACEBACK = "Traceback (most recent call last):"
UNCAUGHT = 1
"""Exit code of Python after an uncaught exception."""


@dataclass(frozen=True)
class Exit:
    rank: int
    code: int
    """As in `subprocess`: negative for a signal."""
    asked: bool = False
    """Whether it received SIGTERM before."""
    line: str = ""
    at: float = 0.0
    """Its host's time, in seconds since 1970, when it printed its last traceback, or ended without one."""

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.asked


def reason_of(script: str, end: Exit) -> str:
    log = LOG.format(rank=end.rank)
    where = f"(rank {end.rank}); see {log}"
    if end.code < 0:
        known = {each.value: each.name for each in signal.Signals}
        name = known.get(-end.code, f"signal {-end.code}")
        hint = ", as when memory runs out" if name == "SIGKILL" else ""
        return f"{script} was killed by {name}{hint} {where}"
    if end.line:
        return f"{end.line} {where}"
    return f"{script} exited with code {end.code} {where}"


def failure_of(script: str, exits: Sequence[Exit]) -> str:
    """The root failure, and the one after it.

    A rank prints its traceback before its connections close, which makes others fail.
    """
    failed = sorted((end for end in exits if end.failed), key=lambda end: end.at)
    return "; then ".join(reason_of(script, end) for end in failed[:2])


def last_error(output: str, script: str) -> str:
    """Last line of the last traceback, `ValueError: no (train.py:12)`; without one, of the output.

    PyTorch begins each line with the rank, and Ray those of its workers with their process. These marks tell
    tracebacks apart that are printed into one another; one without a mark is of the script itself.
    """
    lines = output.splitlines()
    marked = [
        (line.partition(TRACEBACK)[0], at) for at, line in enumerate(lines) if TRACEBACK in line
    ]
    begins = [
        (mark if lines[at + 1 :][:1] and lines[at + 1].startswith(mark) else "", at)
        for mark, at in marked
    ]
    if not begins:
        last = (output.strip() or "nothing").splitlines()[-1].strip()
        return f"{script} exited with code {UNCAUGHT}; its last line: {last}"
    marks = {mark for mark, _ in begins if mark.strip()}  # frames are indented, too
    own = [each for each in begins if not each[0]] or begins
    errors = [_error_in(lines[at + 1 :], mark, marks - {mark}, script) for mark, at in own]
    whole = [error for error in errors if error and not error.startswith("...")]  # cut off by Ray
    return next(reversed(whole), "")


def _error_in(lines: Sequence[str], mark: str, others: Set[str], script: str) -> str:
    place = ""
    for line in lines:
        if not line.startswith(mark) or line.startswith(tuple(others)):
            continue
        line = line.removeprefix(mark)
        before, _, frame = line.partition('File "')
        if frame and not before.strip():
            path, _, rest = frame.partition('", line ')
            name = path.rpartition("/")[2]
            if not place or name == script:
                place = f" ({name}:{rest.partition(',')[0]})"
        elif line and not line[0].isspace():
            return f"{' '.join(line.split())}{place}"
    return ""
