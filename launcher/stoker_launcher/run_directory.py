"""Laptop: run directories on this machine: new ones, those of refused runs, and the runs found in them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.figures import count_of
from stoker.hosts.run_lock import PROCESS_FILE, holder_of
from stoker.place import ORIGINS_FILE
from stoker.storage.checkpoint_store import complete, open_store
from stoker.storage.filesystems import deepest_there
from stoker_launcher import places
from stoker_launcher.places import EXIT_CODES, Place, Resume

if TYPE_CHECKING:
    from stoker_launcher.job import Job

LEAST_FREE_BYTES = 20 * 2**20
"""Less does not even fit a run's logs."""


def new_run_dir(job: Job) -> Path:
    """The path of a new run directory below `output_dir`; does not create it."""
    root = Path(job.resolved.config.output_dir).resolve()
    refuse_unwritable(root)
    return new_run_path(job, root)


def new_run_path(job: Job, root: Path) -> Path:
    return root / f"{job.name}-{datetime.now():%Y%m%d-%H%M%S}"


def create(planned: Path) -> Path:
    """Create a planned run directory, with a number if another run has its name."""
    run_dir = planned
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            run_dir.mkdir(parents=True)
            break
        run_dir = planned.with_name(f"{planned.name}-{number}")
    return run_dir


def replace_code(run_dir: Path) -> Path:
    """Remove the code of a run's earlier start, and nothing else of that name; where to stage it now."""
    code = run_dir / "code"
    if code.exists() and not (code / ORIGINS_FILE).is_file():
        raise UsageError(f"--resume: {code} was not staged by Stoker and stays; move it elsewhere")
    shutil.rmtree(code, ignore_errors=True)
    return code


def written(run_dir: Path, name: str = "summary.json") -> int:
    """When a run's file was last written, in ns; 0 if it has none."""
    with contextlib.suppress(OSError):
        opened = os.open(run_dir / name, os.O_RDONLY)  # NFS answers a mere `stat` from memory
        try:
            return os.fstat(opened).st_mtime_ns
        finally:
            os.close(opened)
    return 0


def refuse_unwritable(folder: Path) -> None:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        raise UsageError(
            f"output_dir: {folder} cannot be written: {there}: {error.strerror}"
        ) from None
    if free < LEAST_FREE_BYTES:
        needed = f"a run needs at least {LEAST_FREE_BYTES >> 20} MB"
        raise UsageError(f"output_dir: the disk of {there} has {free >> 20} MB free; {needed}")


def point_latest(run_dir: Path) -> str | None:
    """Point `latest` atomically at a run directory; returns the previous target."""
    latest, draft = run_dir.parent / "latest", run_dir.parent / f".latest-{os.getpid()}"
    before = str(latest.readlink()) if latest.is_symlink() else None
    if before is None and latest.exists():
        print(
            f"note: {latest} is not a link, so it stays and does not name this run", file=sys.stderr
        )
        return None
    draft.symlink_to(run_dir.name)
    draft.replace(latest)
    return before


def remove_refused(run_dir: Path, latest: str | None) -> None:
    """Remove the directory of a refused run; `latest` is what the link of that name pointed at before."""
    link = run_dir.parent / "latest"
    if link.is_symlink() and str(link.readlink()) == run_dir.name:
        link.unlink()
        if latest and (run_dir.parent / latest).is_dir():
            link.symlink_to(latest)
    shutil.rmtree(run_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        run_dir.parent.rmdir()  # only if empty


class GrowingLog:
    """A file that a job writes, read by whole lines. Opened anew each time, for NFS to look at it again."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0

    def lines(self, ended: bool) -> Iterator[str]:
        """What is new; its last line may be unfinished if the job has ended.

        After an interrupt, the line that was being shown comes again, and none is lost.
        """
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not (ended or line.endswith(b"\n")):
                    return
                yield line.decode(errors="replace").rstrip("\n")
                self._read += len(line)


class PastRun:
    """A run that another process started, found by its directory."""

    def __init__(self, run_dir: Path) -> None:
        self.id = str(run_dir)
        self.run_dir = run_dir

    def summary(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        except (OSError, ValueError):
            return {"status": "starting"}
        return found if isinstance(found, dict) else {}

    def began(self) -> tuple[float, int, str]:
        """Sorts runs by the time of their first start, and those of the same second by their number."""
        at = written(self.run_dir, "") / 1e9
        with contextlib.suppress(ValueError):
            at = datetime.fromisoformat(str(self.summary().get("started"))).timestamp()
        return at, len(self.run_dir.name), self.run_dir.name

    def alive(self) -> bool:
        return holder_of(self.run_dir).state == "running"

    def status(self) -> str:
        from stoker.events.console import metrics_text
        from stoker.events.summary import finite

        found = self.summary()
        status = str(found.get("status", "unknown"))
        holder = holder_of(self.run_dir)
        if status in ("running", "starting") and not self.alive():
            if holder.state == "ended":
                last = found.get("steps", 0)
                return f"failed: the process exited without a result (last step: {last}); see logs/driver.log"
            status += ", as far as its files say"
        parts = [f"{status} on {holder.host}" if holder.host else status]
        if found.get("error"):
            parts.append(str(found["error"]))
        if found.get("steps"):
            done = (
                ""
                if found.get("script")
                else f", {count_of(found.get('epochs') or 0, 'epoch')} done"
            )
            parts.append(f"step {found['steps']}{done}")
        metrics = found.get("metrics")
        last = metrics.get("last") if isinstance(metrics, dict) else None
        known = finite(last) if isinstance(last, dict) else {}
        if found.get("script"):
            parts += [f"{name} {value:.6g}" for name, value in known.items()]
        elif known:  # without the speed of the last epoch: `standing` has that of the run
            parts.append(
                metrics_text({n: v for n, v in known.items() if not n.startswith("perf/")})
            )
        return "  ".join(parts)

    def logs(self, follow: bool = False) -> Iterator[str]:
        log = GrowingLog(self.run_dir / "logs" / "console.log")
        while True:
            running = follow and self.alive()
            yield from log.lines(ended=not running)
            if not running:
                return
            time.sleep(0.3)

    def wait(self) -> int:
        while self.alive():
            time.sleep(0.5)
        return EXIT_CODES.get(str(self.summary().get("status")), 1)

    def stop(self) -> str | None:
        holder = holder_of(self.run_dir)
        if holder.process is None:
            where = "has already ended" if holder.state == "ended" else "is not of this machine"
            raise UsageError(f"{self.id}: this run {where}: {self.status()}")
        try:
            os.kill(holder.process, signal.SIGTERM)
        except PermissionError:
            raise UsageError(f"{self.id}: this run is another user's, who has to stop it") from None
        return None


def is_lost(run_dir: Path) -> bool:
    """Whether a run's process on this machine is gone, although its summary says that it runs."""
    run = PastRun(run_dir.resolve())
    # Read last, as it may have ended meanwhile.
    return holder_of(run.run_dir).state == "ended" and run.summary().get("status") == "running"


def attach(run_id: str) -> PastRun:
    run_dir = Path(run_id).resolve()
    if not is_run(run_dir):
        if run_dir.name == "latest" and not run_dir.exists():
            raise UsageError(f"{run_id}: there is no run yet; start one, or name a run directory")
        raise UsageError(
            f"{run_id}: not a run directory, nor an id of a run elsewhere, such as sagemaker:…"
        )
    return PastRun(run_dir)


_STEP = re.compile(r"step-\d{8,}")


def resolve_resume(asked: str | None, place: Place, config: Config) -> Resume:
    """Resolve `--resume`: auto, never, a path or an `s3://` URI; None if it was not given."""
    if asked is None:
        refuse_others(place, config)
        return Resume()
    own = config.script is not None
    if own and (asked == "never" or "://" in asked or _STEP.fullmatch(Path(asked).name)):
        raise UsageError(
            f"--resume {asked}: a script resumes from stoker.checkpoint_dir() itself; name a run, or"
            " use auto for the last one"
        )
    if asked == "never" or "://" in asked:
        return Resume(asked)
    if place.checkpoints in ("shared", "s3", "gs"):
        return _elsewhere(asked, place, config)
    if asked == "auto":
        kept = kept_outside(config, place)
        found = newest_unfinished(config, kept)
        if found is None:
            where = f"{config.name} in {config.output_dir}/"
            begin = f", from {config.checkpoint.dir}/{kept}" if kept.startswith("step-") else ""
            print(f"no unfinished run of {where} has a checkpoint; starting a new one{begin}")
            return Resume("auto")
        return _run(found, place, config)
    copied = place.checkpoints == "copies"
    path = Path(asked)
    if not path.exists():
        raise UsageError(f"--resume {asked}: no such folder{deepest_there(asked)}")
    path = path.resolve()
    if own and not is_run(path):
        raise UsageError(f"--resume {asked}: not a run directory")
    if _STEP.fullmatch(path.name):
        return Resume("auto", checkpoints=(path,)) if copied else Resume(str(path))
    if path.name == "checkpoints" and is_run(path.parent):
        path = path.parent
    if is_run(path):
        return _run(path, place, config)
    steps = steps_in(path)
    if not steps:
        raise UsageError(
            f"--resume {asked}: neither a run directory nor a folder with step-… folders"
        )
    return Resume("auto", checkpoints=tuple(steps)) if copied else Resume(str(path))


def refuse_others(place: Place, config: Config) -> None:
    """A new run directory on this machine is a new run; a service starts the same run again.

    On Slurm, a relative folder is that of all launches from here.
    """
    given, newest = config.checkpoint, ""
    where = given.dir or ""
    relative = place.name == "slurm" and "://" not in where and not where.startswith("/")
    if config.script is None and (place.checkpoints in ("folders", "copies") or relative):
        newest = kept_outside(config, place)
    if newest.startswith("step-") and given.resume not in ("never", given.dir):
        raise UsageError(
            f"checkpoint.dir: {given.dir} has checkpoints of another run ({newest}), which this new run"
            " would continue; set another folder, or continue that run with --resume auto or --resume RUN"
        )


def newest_unfinished(config: Config, outside: str) -> Path | None:
    """The newest run of the job in `output_dir` that did not succeed and has a checkpoint."""
    # The second and later runs of the same second have a number, those of notebooks and of Ray Jobs a token.
    form = re.compile(re.escape(config.name) + r"-\d{8}-\d{6}(-[0-9a-f]+)*")
    found = [
        path.resolve() for path in Path(config.output_dir).glob("*") if form.fullmatch(path.name)
    ]
    for run in sorted(map(PastRun, found), key=PastRun.began, reverse=True):
        kept = outside or kept_in(run.run_dir, config)
        if kept and run.summary().get("status") != "succeeded":
            return run.run_dir
    return None


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder or its `checkpoints/`, newest first."""
    for at in (folder, folder / "checkpoints"):
        if at.is_dir():
            found = [path for path in at.iterdir() if _STEP.fullmatch(path.name)]
            if found:
                return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)
    return []


def kept_in(run_dir: Path, config: Config) -> list[Path]:
    """A run's checkpoints; for a script, everything in its checkpoint folder."""
    if config.script is None:
        return steps_in(run_dir)
    folder = run_dir / "checkpoints"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def kept_outside(config: Config, place: Place | None = None) -> str:
    """The newest complete one of `checkpoint.dir`; of a script, or if it is unreadable, the folder; or ""."""
    where = config.checkpoint.dir or ""
    if place and place.checkpoints == "copies" and "://" not in where:
        return ""  # on its hosts, not here
    with contextlib.suppress(OSError, UsageError, ValueError):
        if where and config.script is None:
            return next(complete(open_store(where)), "")
    return where


def continuation(run_dir: Path, config: Config) -> str:
    """How a run that has stopped is continued; empty without a checkpoint."""
    if not (kept_in(run_dir, config) or kept_outside(config)):
        return ""
    here = Path.cwd()
    where = run_dir.relative_to(here) if run_dir.is_relative_to(here) else run_dir
    return f"continue: the same command with --resume {shlex.quote(str(where))}"


def _run(run_dir: Path, place: Place, config: Config) -> Resume:
    run = places.attach(str(run_dir))  # asks Slurm about a run of its own
    holder = holder_of(run_dir)
    if isinstance(run, PastRun) and run.alive():
        here = f"first: stoker stop {shlex.quote(str(run_dir))}"
        on, stop = (f" on {holder.host}", "there") if holder.host else ("", here)
        raise UsageError(f"--resume: {run_dir} is still running{on}; stop it {stop}")
    if holder.state == "unlocked" and PastRun(run_dir).summary().get("status") == "running":
        raise UsageError(
            f"--resume: {run_dir} may still be running: its disk has no file locks to tell; if it is not,"
            f" remove {PROCESS_FILE} from it"
        )
    steps, copied = kept_in(run_dir, config), place.checkpoints == "copies"
    if not steps and not kept_outside(config, place):
        on = " on its hosts" if copied else ""
        nor = (
            f", nor does checkpoint.dir{on}: {config.checkpoint.dir}"
            if config.checkpoint.dir
            else ""
        )
        raise UsageError(f"--resume: {run_dir} holds no checkpoint{nor}")
    if copied:
        return Resume("auto", checkpoints=tuple(steps))
    print(f"resuming in {run_dir}", file=sys.stderr)
    return Resume("auto", run_dir=run_dir)


def _elsewhere(asked: str, place: Place, config: Config) -> Resume:
    scheme = "gs" if place.checkpoints == "gs" else "s3"
    if asked == "auto":
        if config.checkpoint.dir is None:
            raise UsageError(
                f"--resume auto: with --on {place.name} each launch writes its own checkpoints; set"
                f" checkpoint.dir={scheme}://… for all launches, or name an earlier run's with --resume"
            )
        return Resume("auto")
    only_uri = place.checkpoints in ("s3", "gs")
    if only_uri or not Path(asked).is_absolute():
        remedy = (
            f"{scheme}://"
            if only_uri
            else "an absolute folder shared by the cluster's hosts, or s3://"
        )
        raise UsageError(
            f"--resume {asked}: the hosts cannot read a folder of this machine; name {remedy}"
        )
    return Resume(asked)


def is_run(folder: Path) -> bool:
    return (folder / "summary.json").is_file() or (folder / "code" / ORIGINS_FILE).is_file()
