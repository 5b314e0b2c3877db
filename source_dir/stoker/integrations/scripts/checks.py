"""Laptop and head: what a script job may ask for, refused before anything starts."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.config import Resolved
from stoker.errors import UsageError
from stoker.recipe import SOURCE_FOLDER
from stoker.redaction import redact
from stoker.schema import Config

SCRIPT_FOLDER = "script"
"""In a staged copy: the script's own folder, so that its `train.py` and the container's do not meet."""
HONOURED = {
    "data": ("prepare",),
    "train": ("workers", "max_failures", "threads"),
    "checkpoint": ("dir", "resume"),
    "tracking": ("tensorboard", "mlflow", "sinks"),
}
"""Of the sections that describe a recipe's training, the keys that a script job has a use for."""
WITHOUT_USE = ("recipe", "seed", "export")
REMEDY = "the script decides on that itself: pass it as an argument after --"


def refuse_foreign_keys(resolved: Resolved) -> None:
    """Laptop and head: refuse keys that somebody set and a script job would ignore.

    Raises:
        UsageError: all of them, one line each.
    """
    config = resolved.config
    if config.script is None:
        return
    ignored = list(ignored_keys(resolved))
    problems = [f"{key}: has no effect on a script; {REMEDY}" for key in ignored if key != "recipe"]
    if "recipe" in ignored:
        problems.append("recipe: a job has a recipe or a script, not both; leave one out")
    if config.checkpoint.resume != "auto":
        problems.append(
            f"checkpoint.resume: {config.checkpoint.resume} has no effect on a script, which looks for itself"
            " in stoker.checkpoint_dir(); leave it out"
        )
    if "://" in (config.checkpoint.dir or ""):
        problems.append("checkpoint.dir: a script writes to a folder; name one, or leave it out")
    if config.tracking.mlflow.registered_model:
        problems.append(
            "tracking.mlflow.registered_model: a script's model is not exported; register it there"
        )
    if problems:
        raise UsageError(*problems)


def ignored_keys(resolved: Resolved) -> Iterator[str]:
    """Laptop and head: the keys that somebody set to something and that a script would not see.

    A file may hold a default: so does the `config.yaml` of every run, which can be run again.
    """
    plain = Config()
    for key, origin in resolved.origins.items():
        section, _, name = key.partition(".")
        if section not in WITHOUT_USE and name.split(".")[0] in (
            HONOURED.get(section) or (name.split(".")[0],)
        ):
            continue
        from_file = origin not in ("command line", "arguments")
        if not (from_file and _at(resolved.config, key) == _at(plain, key)):
            yield key


def _at(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def find_script(config: Config, folder: Path = SOURCE_FOLDER / SCRIPT_FOLDER) -> Path:
    """Head and train worker: the script in the staged copy.

    Raises:
        UsageError: it is not there.
    """
    path = folder / str(config.script)
    if not path.is_file():
        raise UsageError(no_such_script(str(config.script), path))
    return path


def no_such_script(named: str, path: Path) -> str:
    """Laptop and head: one line, with the name that may have been meant."""
    folder = path.parent
    close = difflib.get_close_matches(path.name, [p.name for p in folder.glob("*.py")], n=1, cutoff=0.5)
    if close:
        return f"script: no file {named}; did you mean {Path(named).parent / close[0]}?"
    return f"script: no file {named} (looked in {folder})"


def command_line(config: Config) -> str:
    """Anywhere: script and arguments as typed, without secrets."""
    return shlex.join([str(config.script), *redact(config.args, "args")])
