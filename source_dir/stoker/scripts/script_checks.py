"""Laptop and head: validates the configuration of script jobs before anything starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from stoker.config.loading import Resolved
from stoker.config.redaction import redact
from stoker.config.schema import Config, for_scripts
from stoker.errors import UsageError, nearest_file
from stoker.recipe import SOURCE_FOLDER

SCRIPT_FOLDER = "script"
"""The script's folder in a staged copy, so that its `train.py` does not clash with the container's."""
REMEDY = "pass it to the script as an argument after --"


def refuse_foreign_keys(resolved: Resolved) -> None:
    config = resolved.config
    if config.script is None:
        return
    ignored = list(ignored_keys(resolved))
    remedy = "its own trainer decides (ScalingConfig); leave it out" if config.driver else REMEDY
    problems = [f"{key}: has no effect on a script; {remedy}" for key in ignored if key != "recipe"]
    if "recipe" in ignored:
        problems.append("recipe: a job has a recipe or a script, not both; leave one out")
    if config.checkpoint.resume not in (None, "auto"):
        problems.append(
            f"checkpoint.resume: {config.checkpoint.resume} has no effect on a script, which resumes from"
            " stoker.checkpoint_dir(); leave it out"
        )
    if "://" in (config.checkpoint.dir or ""):
        problems.append("checkpoint.dir: must be a folder for a script; name one, or leave it out")
    if config.tracking.mlflow.registered_model:
        problems.append(
            "tracking.mlflow.registered_model: a script's model is not exported; register it in the script"
        )
    if problems:
        raise UsageError(*problems)


def ignored_keys(resolved: Resolved) -> Iterator[str]:
    """Keys that a script would not see."""
    for key in resolved.origins:
        section, _, name = key.partition(".")
        if not for_scripts(section, name.split(".")[0], resolved.config.driver):
            yield key


def find_script(config: Config, folder: Path = SOURCE_FOLDER / SCRIPT_FOLDER) -> Path:
    path = folder / str(config.script)
    if not path.is_file():
        raise UsageError(no_such_script(str(config.script), path))
    return path


def no_such_script(named: str, path: Path) -> str:
    hint = nearest_file(path.name, path.parent, "*.py", Path(named).parent)
    return f"script: no file {named}{hint or f' (looked in {path.parent})'}"


def script_command_line(config: Config) -> str:
    """The script and its arguments as typed, without secrets."""
    return shlex.join([str(config.script), *redact(config.args, "args")])
