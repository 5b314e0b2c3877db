"""Laptop: `--on slurm`: run the job through a Slurm cluster's queue, from one of its login nodes.

With CPU nodes it is a heterogeneous job. Source, token, log and results are in the run directory, which the
nodes share.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.config.loading import SECRETS_FILE
from stoker.errors import UsageError
from stoker.place import STOP_FILE, TOKEN_FILE
from stoker_launcher import run_directory
from stoker_launcher.job import Job, stage
from stoker_launcher.places import EXIT_CODES, Place
from stoker_launcher.places.remote import (
    ServicePoller,
    UnansweredError,
    created_once,
    detached,
)
from stoker_launcher.places.slurm import slurm_commands
from stoker_launcher.places.slurm.batch_script import (
    EXIT_FILE,
    JOB_FILE,
    LOG,
    batch_script,
    slurm_problems,
)
from stoker_launcher.places.slurm.slurm_commands import State
from stoker_launcher.run_directory import PastRun

SCRIPT = "slurm.sh"


@dataclass(frozen=True)
class SlurmRequest:
    job: Job
    run_dir: Path
    script: str
    notes: tuple[str, ...]

    def render(self) -> str:
        rows = [f"results   {self.run_dir}", *(f"note: {line}" for line in self.notes)]
        return f"{self.script}\n" + "\n".join(rows)

    def stage(self) -> SlurmRequest:
        """Write the run directory; the request for the one that this run got."""
        run_dir = run_directory.create(self.run_dir)
        (run_dir / LOG).parent.mkdir()
        stage(self.job, run_dir / "code", {})
        script = batch_script(self.job.resolved.config.slurm, self.job.name, run_dir)
        (run_dir / SCRIPT).write_text(script)
        return replace(self, run_dir=run_dir, script=script)

    def write(self, path: Path) -> str:
        """Stage the job and write its script to a file, for users who edit it first; returns what to type."""
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = self.stage()
        path.write_text(staged.script)
        return f"sbatch {shlex.quote(str(path))}\n# status, logs and stop: {staged.run_dir}"


def plan(job: Job, *, offline: bool = False) -> SlurmRequest:
    config = job.resolved.config
    if (
        where := config.checkpoint.dir
    ) and "://" not in where:  # else it would be in the staged code
        at = config.checkpoint.model_copy(update={"dir": str(Path(where).absolute())})
        config = config.model_copy(update={"checkpoint": at})
        job = replace(job, resolved=replace(job.resolved, config=config))
    if problems := [*slurm_problems(config.slurm, config.output_dir)]:
        raise UsageError(*problems)
    if offline:  # away from the cluster, this machine need not have its folders
        run_dir = run_directory.new_run_path(job, Path(config.output_dir))
    else:
        run_dir = run_directory.new_run_dir(job)
    notes = [
        f"params.{name} = {path} must exist on the nodes, too" for name, path in job.data.items()
    ]
    if where and "://" not in where and where != config.checkpoint.dir:
        notes.append(f"checkpoint.dir = {config.checkpoint.dir} must be shared by the nodes")
    if config.slurm.max_runtime_s is None:
        notes.append(
            "without slurm.max_runtime_s, the partition's time limit ends the job without a checkpoint"
        )
    script = batch_script(config.slurm, job.name, run_dir)
    if not offline:
        slurm_commands.sbatch("--test-only", script=script)
    return SlurmRequest(job, run_dir, script, tuple(notes))


def submit(request: SlurmRequest) -> SlurmRun:
    request = request.stage()
    run_dir = request.run_dir
    try:
        job_id = created_once(
            lambda: slurm_commands.submitted(run_dir / SCRIPT),
            lambda: slurm_commands.queued_in(run_dir / "code"),
            f"the job may be queued all the same, so {run_dir} stays; remove it if squeue --me does not"
            " show the job",
        )
    except UnansweredError:
        raise
    except UsageError:
        run_directory.remove_refused(run_dir, None)
        raise
    if not (file := request.run_dir / JOB_FILE).exists():  # the job's script writes it, too
        file.write_text(f"{job_id}\n")
    run_directory.point_latest(request.run_dir)
    return SlurmRun(job_id, request.run_dir, submitted=True)


def attach(run_id: str) -> SlurmRun:
    """Find a run by its run directory, or by `slurm:<job>` while Slurm knows the job."""
    if not run_id.startswith("slurm:"):
        run_dir = Path(run_id).resolve()
        return SlurmRun((run_dir / JOB_FILE).read_text().strip(), run_dir)
    job_id = run_id.removeprefix("slurm:")
    if not job_id.isdigit():
        raise UsageError(f"{run_id}: write slurm:<job id>, or name the run directory")
    folder = slurm_commands.job_fields(job_id).get("WorkDir") or slurm_commands.accounted(
        job_id, "WorkDir"
    )
    run_dir = Path(folder).parent
    if not folder or not run_directory.is_run(run_dir):
        raise UsageError(f"{run_id}: Slurm does not know this job any more; name its run directory")
    with contextlib.suppress(OSError):
        owner = (run_dir / JOB_FILE).read_text().strip()
        if owner and owner != job_id:
            raise UsageError(
                f"{run_id}: its script is that of job {owner}, so it does not run; {run_dir} is the run of"
                f" slurm:{owner}"
            )
    return SlurmRun(job_id, run_dir)


PLACE = Place(
    name="slurm",
    plan=lambda job, options, resume: plan(job, offline=options.offline),
    submit=submit,
    attach=attach,
    ids=("slurm:",),
    marker=JOB_FILE,
    options=("offline", "request"),
    checkpoints="shared",
)


POLL_S = 1.0
ASK_EVERY_S = 15.0
"""How often to ask Slurm's controller, which all users of the cluster share."""


class SlurmRun(PastRun):
    def __init__(
        self, job_id: str, run_dir: Path, ask_every_s: float = ASK_EVERY_S, submitted: bool = False
    ) -> None:
        super().__init__(run_dir)
        self.job_id, self.id = job_id, f"slurm:{job_id}"
        self._ask_every_s = ask_every_s
        self._state, self._asked_at = State("PENDING"), 0.0
        self._patiently = ServicePoller(POLL_S, answered=submitted)

    def state(self) -> State:
        return slurm_commands.state_of(self.job_id)

    def alive(self) -> bool:
        """Whether Slurm has the job in its queue, or a local process continues it."""
        return self.state().active or super().alive()

    def status(self) -> str:
        return self._status_in(self._patiently(self.state))

    def _status_in(self, state: State) -> str:
        if state.word == "PENDING":
            again = "requeued, " if self._started() else ""
            return f"running: {again}waiting for nodes ({state.reason or 'no reason given'})"
        if state.active:
            return super().status() if self._started() else f"running: {state.word.lower()}"
        if self._started_last() and self.summary().get("status") not in ("running", "starting"):
            return super().status()
        with contextlib.suppress(OSError):
            return f"failed: {(self.run_dir / 'failure').read_text().strip()}"
        word = state.word or "no longer known to Slurm"
        if (self.run_dir / LOG).is_file() or self._started():
            return f"failed: the job ended without a result ({word}); see {self.run_dir / LOG}"
        if word.startswith("CANCELLED"):
            return "interrupted: cancelled before it started"
        return (
            f"failed: the job ended without a line of output ({word}); do its nodes share {self.run_dir}?"
            " Set output_dir to a folder that they do"
        )

    def _started(self) -> bool:
        return (self.run_dir / "summary.json").is_file()

    def _started_last(self) -> bool:
        """Whether the summary is of the job's last start, which wrote its id into a file before."""
        try:
            began = (self.run_dir / JOB_FILE).stat().st_mtime
        except OSError:
            return self._started()
        return self._started() and (self.run_dir / "summary.json").stat().st_mtime >= began

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The output of all hosts, line by line; with `follow` until the job ends, restarts included."""
        log, told = run_directory.GrowingLog(self.run_dir / LOG), ""
        while True:
            active = follow and self._active()
            yield from log.lines(ended=not active)
            if not active:
                return
            if self._state.word == "PENDING" and self._state.reason != told:
                told = self._state.reason
                yield f"{self.id}: waiting for nodes ({told or 'no reason given'})"
            time.sleep(POLL_S)

    def wait(self) -> int:
        while self._active():
            time.sleep(POLL_S)
        with contextlib.suppress(OSError, ValueError):
            return int((self.run_dir / EXIT_FILE).read_text())
        # A network file system may show the file a minute late.
        told = self._patiently(lambda: slurm_commands.job_fields(self.job_id)).get("ExitCode")
        told = told or slurm_commands.accounted(self.job_id, "ExitCode")
        if (
            self._state.word.startswith(("COMPLETED", "FAILED"))
            and told.partition(":")[0].isdigit()
        ):
            return int(told.partition(":")[0]) or int(self.summary().get("status") != "succeeded")
        return EXIT_CODES.get(re.split(r"\W", self._status_in(self._state))[0], 1)

    def _active(self) -> bool:
        """Whether the job is in the queue, asking seldom while nothing indicates its end."""
        near_end = (self.run_dir / EXIT_FILE).exists() and self._state.word != "PENDING"
        if (
            not near_end
            and time.monotonic() < self._asked_at + self._ask_every_s
            and self._asked_at
        ):
            return self._state.active
        self._state, self._asked_at = self._patiently(self.state), time.monotonic()
        return self._state.active

    def stop(self) -> str | None:
        """Ask the hosts to stop with a checkpoint; take the job out of the queue if it waits."""
        state = self.state()
        if not state.active:
            raise UsageError(f"{self.id}: this run has already ended: {self.status()}")
        (self.run_dir / STOP_FILE).touch()  # tells the job not to requeue itself
        if state.word == "PENDING":
            slurm_commands.ask("scancel", self.job_id)
            for name in (
                TOKEN_FILE,
                SECRETS_FILE,
            ):  # its script, which would remove them, never runs
                (self.run_dir / "code" / name).unlink(missing_ok=True)
            return "taken out of the queue"
        slurm_commands.ask("scancel", "--signal=TERM", self.job_id)
        return None

    def closing(self) -> str:
        status = self.status()
        lines = [f"{self.id}: {status}", f"results: {self.run_dir}"]
        if not status.startswith("succeeded") and list(
            (self.run_dir / "checkpoints").glob("step-*")
        ):
            lines.append(
                f"continue: the same command with --resume {shlex.quote(str(self.run_dir))}"
            )
        return "\n".join(lines)

    def detached(self) -> str:
        return detached(self.id, str(self.run_dir))
