"""Laptop: Slurm's commands, each with a deadline, and what they say of jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError
from stoker_launcher.places.remote import UnansweredError

TIMEOUT_S = 60
ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"),
    *("BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED", "REVOKED"),
)
"""States in which a job does not continue, as far as Slurm itself is concerned."""
_HELD = ("SPECIAL_EXIT", "REQUEUE_HOLD", "RESV_DEL_HOLD")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
_GONE = ("Invalid job id", "already completing or completed", "Job/step already")


@dataclass(frozen=True)
class State:
    """The state of a job: PENDING, RUNNING, … and why; "" if Slurm no longer knows the job."""

    word: str
    reason: str = ""

    @property
    def active(self) -> bool:
        return bool(self.word) and not self.word.startswith(ENDED)


def ask(
    *command: str,
    variables: Mapping[str, str] | None = None,
    given: str = "",
    gone_ok: bool = False,
) -> str:
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]}: not found on this machine; run this command on a login node of the Slurm cluster,"
            " or look at the script anywhere with --dry-run --offline"
        )
    try:
        done = subprocess.run(
            command,
            input=given,
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnansweredError(f"{command[0]}: no answer from Slurm within {TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        words = "; ".join(re.sub(rf"^{command[0]}: (error: )?", "", line) for line in lines[-3:])
        if gone_ok and any(word in words for word in _GONE):
            return ""
        raise UsageError(f"{command[0]}: {words or f'exit code {done.returncode}'}")
    return done.stdout


def state_of(job_id: str) -> State:
    """The state of a job, from the queue, else from what the controller or accounting remember."""
    rows = ask(
        "squeue", "--noheader", f"--jobs={job_id}", "--format=%i|%T|%r", gone_ok=True
    ).splitlines()
    # A heterogeneous job has a row for each component; it runs when its first one does.
    found = sorted(tuple(row.split("|")) for row in rows if row.count("|") == 2)
    if found:
        word, reason = found[0][1].strip(), found[0][2].strip()
        if word in _HELD or reason.startswith("JobHeld"):
            held = word if word in _HELD else reason
            return State("PENDING", f"{held}, held until scontrol release {job_id}")
        return State(word, "" if reason == "None" else reason)
    return State(job_fields(job_id).get("JobState", "") or accounted(job_id, "State").split(" ")[0])


def job_fields(job_id: str) -> dict[str, str]:
    """The fields of `scontrol show job`; empty some minutes after the job's end."""
    text = ask("scontrol", "--oneliner", "show", "job", job_id, gone_ok=True)
    return dict(re.findall(r"(\w+)=(\S*)", text.partition("\n")[0]))


def accounted(job_id: str, field: str) -> str:
    """A field of a job from the accounting database; "" on clusters that have none."""
    table = ("--noheader", "--parsable2", "--allocations")
    try:
        lines = ask("sacct", *table, f"--jobs={job_id}", f"--format={field}").splitlines()
    except UsageError:
        return ""
    return lines[0].strip() if lines else ""


def sbatch(*words: str, script: str = "") -> str:
    # SBATCH_ variables precede the script's lines, and SLURM_ ones may describe the job around this shell.
    own = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith(("SLURM_", "SBATCH_"))
    }
    return ask("sbatch", *words, variables=own, given=script)


def submitted(script: Path) -> str:
    told = sbatch("--parsable", str(script))
    # A site's own sbatch may print more.
    if ids := re.findall(r"^(\d+)(?:;\S+)?\s*$", told, re.MULTILINE):
        return str(ids[-1])
    raise UnansweredError(f"sbatch: no job id in its answer ({' '.join(told.split())[-200:]!r})")


def queued_in(folder: Path) -> str:
    """The id of this user's job with a working directory, which the queue soon no longer shows."""
    for row in ask("squeue", "--me", "--noheader", "--format=%i|%Z").splitlines():
        job_id, _, where = row.partition("|")
        if where.strip() == str(folder):
            return re.split(r"\D", job_id.strip())[0]
    raise UsageError(f"squeue: no job in {folder}")
