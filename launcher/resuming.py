"""Laptop: resolves `--resume` for each place.

The head reads `checkpoint.resume`. Only the laptop knows which run directory a local run resumes in and
which files to copy for the hosts of a rehearsal.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from launcher.places import Place, Resume
from launcher.run_directory import PastRun
from stoker.config.redaction import redact
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.storage.filesystems import deepest_there

_STEP = re.compile(r"step-\d{8,}")


def resolve(asked: str | None, place: Place, config: Config) -> Resume:
    """Resolve `--resume`: auto, never, a path or an `s3://` URI; None if it was not given."""
    if asked is None:
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
        found = newest_unfinished(config)
        if found is None:
            where = f"{config.name} in {config.output_dir}/"
            print(f"no unfinished run of {where} has a checkpoint; starting a new one")
            return Resume("auto")
        return _run(found, place, config)
    copied = place.checkpoints == "copies"
    path = Path(asked)
    if not path.exists():
        raise UsageError(f"--resume {asked}: no such folder{deepest_there(asked)}")
    path = path.resolve()
    if own and not _is_run(path):
        raise UsageError(f"--resume {asked}: not a run directory")
    if _STEP.fullmatch(path.name):
        return Resume(checkpoints=(path,)) if copied else Resume(str(path))
    if path.name == "checkpoints" and _is_run(path.parent):
        path = path.parent
    if _is_run(path):
        return _run(path, place, config)
    steps = steps_in(path)
    if not steps:
        raise UsageError(f"--resume {asked}: neither a run directory nor a folder with step-… folders")
    return Resume(checkpoints=tuple(steps)) if copied else Resume(str(path))


def newest_unfinished(config: Config) -> Path | None:
    """The newest run of the job in `output_dir` that did not succeed and has a checkpoint."""
    form = re.compile(re.escape(config.name) + r"-\d{8}-\d{6}(-\d+)?")
    root = Path(config.output_dir)
    folders = [path for path in root.iterdir() if form.fullmatch(path.name)] if root.is_dir() else []
    for folder in sorted(folders, key=lambda path: _order(path.name), reverse=True):
        run = PastRun(folder.resolve())
        if run.summary().get("status") != "succeeded" and (config.checkpoint.dir or kept_in(folder, config)):
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


def continuation(run_dir: Path, config: Config, words: list[str]) -> str:
    """The command that continues a run which has stopped; empty without a checkpoint."""
    if not kept_in(run_dir, config):
        return ""
    end = words.index("--") if "--" in words else len(words)
    options, rest = words[1:end], words[end:]
    if "--resume" in options:
        at = options.index("--resume")
        options = options[:at] + options[at + 2 :]
    options = [word for word in options if not word.startswith("--resume=")]
    here = Path.cwd()
    where = run_dir.relative_to(here) if run_dir.is_relative_to(here) else run_dir
    program = ["stoker"] if Path(words[0]).name == "stoker" else ["python", words[0]]
    halves = (word.partition("=") for word in options)
    shown = [f"{key}={redact(value, key)}" if sign else key for key, sign, value in halves]
    return shlex.join([*program, *shown, "--resume", str(where), *redact(rest, "args")])


def _run(run_dir: Path, place: Place, config: Config) -> Resume:
    run = PastRun(run_dir)
    if run.process_id() is not None:
        raise UsageError(
            f"--resume: {run_dir} is still running; stop it first: stoker stop {shlex.quote(str(run_dir))}"
        )
    steps = kept_in(run_dir, config)
    if place.checkpoints == "copies":
        if not steps:
            raise UsageError(f"--resume: {run_dir} holds no checkpoint")
        return Resume("auto", checkpoints=tuple(steps))
    if not steps and config.checkpoint.dir is None:
        raise UsageError(f"--resume: {run_dir} holds no checkpoint")
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
        remedy = f"{scheme}://" if only_uri else "an absolute folder shared by the cluster's hosts, or s3://"
        raise UsageError(f"--resume {asked}: the hosts cannot read a folder of this machine; name {remedy}")
    return Resume(asked)


def _is_run(folder: Path) -> bool:
    return (folder / "summary.json").is_file() or (folder / "code").is_dir()


def _order(name: str) -> tuple[str, int]:
    """Sort key; the second and later runs of the same second have a number."""
    found = re.search(r"-(\d{8}-\d{6})(?:-(\d+))?$", name)
    return (found[1], int(found[2] or 1)) if found else (name, 0)
