"""Laptop: `--on slurm`: run the job through a Slurm cluster's queue, from one of its login nodes.

    request = plan(job)
    run = submit(request)
    for line in run.logs(follow=True): ...

With CPU nodes it is a heterogeneous job. Source, token, log and results are in the run directory, which the
nodes share.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from launcher import runs
from launcher.job import Job
from launcher.places.base import Backend
from launcher.places.slurm import checks, commands
from launcher.places.slurm.run import SlurmRun
from launcher.places.slurm.script import JOB_FILE, LOG, batch_script
from launcher.source import stage
from stoker.errors import UsageError

SCRIPT = "slurm.sh"


@dataclass(frozen=True)
class SlurmRequest:
    """Laptop: a batch script and the run directory that it works in."""

    job: Job
    run_dir: Path
    script: str
    notes: tuple[str, ...]

    def render(self) -> str:
        """The batch script, and what the user should know."""
        rows = [f"results   {self.run_dir}", *(f"note: {line}" for line in self.notes)]
        return f"{self.script}\n" + "\n".join(rows)

    def stage(self) -> None:
        """Create the run directory: the staged source with the hosts' token, and the batch script."""
        self.run_dir.mkdir(parents=True)
        (self.run_dir / LOG).parent.mkdir()
        stage(self.job, self.run_dir / "code", {})
        (self.run_dir / SCRIPT).write_text(self.script)

    def write(self, path: Path) -> str:
        """Stage the job and write its script to a file, for users who edit it first; returns what to type."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.stage()
        path.write_text(self.script)
        return f"sbatch {shlex.quote(str(path))}\n# status, logs and stop: {self.run_dir}"


def plan(job: Job, *, offline: bool = False) -> SlurmRequest:
    """Laptop: check the job against the cluster's partitions and write its script; submits nothing.

    Args:
        job: what to run.
        offline: do not ask the cluster, which may be out of reach from here.

    Raises:
        UsageError: lists every problem, one line each.
    """
    config = job.resolved.config
    problems = checks.problems_of(config.slurm, config.output_dir)
    if not offline:
        try:
            problems += checks.cluster_problems(config.slurm, commands.partitions())
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(*dict.fromkeys(problems))
    # Away from the cluster, this machine need not have its folders.
    run_dir = runs.named(job, Path(config.output_dir)) if offline else runs.new_run_dir(job)
    notes = [f"params.{name} = {path} must exist on the nodes, too" for name, path in job.data.items()]
    if config.slurm.max_runtime_s is None:
        notes.append(
            "without slurm.max_runtime_s, the partition's time limit ends the job without a checkpoint"
        )
    script = batch_script(config.slurm, job.name, run_dir)
    return SlurmRequest(job, run_dir, script, tuple(notes))


def submit(request: SlurmRequest) -> SlurmRun:
    """Laptop: stage the source into the run directory and submit the job.

    Raises:
        UsageError: Slurm refused it; nothing is left of the run.
    """
    request.stage()
    try:
        job_id = commands.submitted(request.run_dir / SCRIPT)
    except UsageError:
        runs.forget(request.run_dir, None)
        raise
    if not (file := request.run_dir / JOB_FILE).exists():  # the job's script writes it, too
        file.write_text(f"{job_id}\n")
    runs.point_latest(request.run_dir)
    return SlurmRun(job_id, request.run_dir)


def attach(run_id: str) -> SlurmRun:
    """Laptop: find a run by its run directory, or by `slurm:<job>` while Slurm knows the job.

    Raises:
        UsageError: it is neither.
    """
    if not run_id.startswith("slurm:"):
        run_dir = Path(run_id).resolve()
        return SlurmRun((run_dir / JOB_FILE).read_text().strip(), run_dir)
    job_id = run_id.removeprefix("slurm:")
    if not job_id.isdigit():
        raise UsageError(f"{run_id}: write slurm:<job id>, or name the run directory")
    folder = commands.described(job_id).get("WorkDir") or commands.accounted(job_id, "WorkDir")
    run_dir = Path(folder).parent
    if not folder or not (run_dir / "code").is_dir():
        raise UsageError(f"{run_id}: Slurm does not know this job any more; name its run directory")
    with contextlib.suppress(OSError):
        owner = (run_dir / JOB_FILE).read_text().strip()
        if owner and owner != job_id:
            raise UsageError(
                f"{run_id}: its script is that of job {owner}, so it does not run; {run_dir} is the run of"
                f" slurm:{owner}"
            )
    return SlurmRun(job_id, run_dir)


BACKEND = Backend(
    name="slurm",
    plan=lambda job, options, resume: plan(job, offline=options.offline),
    submit=submit,
    attach=attach,
    ids=("slurm:",),
    marker=JOB_FILE,
    options=("offline", "request"),
    checkpoints="shared",
)
