"""Laptop: runs a user's training script as a job: finds and checks it and its folder."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.config.loading import Resolved
from stoker.errors import UsageError
from stoker.place import ORIGINS_FILE, TOKEN_FILE
from stoker.scripts.script_checks import no_such_script, refuse_foreign_keys
from stoker.storage.filesystems import walk

MOST_BYTES = 500_000_000
MOST_FILES = 20_000
IGNORED = shutil.ignore_patterns(
    "__pycache__", "*.pyc", ".git", ".venv", ".data", "runs", ".*_cache", "*.egg-info", ".ipynb_checkpoints"
)
"""Never staged."""
Ignore = Callable[[str, list[str]], set[str]]


def as_overrides(path: Path | None, arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """Laptop: turn the command line's file and script arguments into (YAML file, key overrides).

    Args:
        path: a YAML file, or a script without a YAML file.
        arguments: the words after `--`; None without it.
    """
    words = [] if arguments is None else [f"args={json.dumps(arguments)}"]
    if path is None or path.suffix != ".py":
        return path, words
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip("_.-")[:63] or "job"
    return None, [f"name={name}", f"script={path}", *words]


def located(resolved: Resolved, source_dir: Path | None) -> tuple[Resolved, Path]:
    """Laptop: the job with its script's path relative to the staged folder, and that folder.

    Args:
        resolved: the configuration, which names the script as typed.
        source_dir: the folder to stage; None: the script's folder, found here or next to the job's file.

    Raises:
        UsageError: the script is missing, ambiguous or invalid, ignores a given key, or its folder is too
            large.
    """
    refuse_foreign_keys(resolved)
    named = str(resolved.config.script)
    if source_dir is not None and not source_dir.is_dir():
        raise UsageError(f"--source-dir {source_dir}: no such folder")
    folders = [Path(), *filter(None, [source_dir or (resolved.file.parent if resolved.file else None)])]
    tried = [folder / named for folder in folders]
    found = {path.resolve(): None for path in tried if path.is_file()}
    if not found:
        raise UsageError(no_such_script(named, tried[-1].absolute()))
    if len(found) > 1 and source_dir is None:
        both = " and ".join(map(str, found))
        raise UsageError(f"script: {named} could be {both}; choose the folder with --source-dir")
    folder = source_dir.resolve() if source_dir else next(iter(found)).parent
    path = next((path for path in found if path.is_relative_to(folder)), None)
    if path is None:
        raise UsageError(f"script: {named} is not in --source-dir {source_dir}")
    try:
        ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"script: {named} is not Python: {getattr(error, 'msg', error)}{line}") from None
    refuse_too_much(folder, named, ignoring(Path(resolved.config.output_dir).resolve()))
    config = resolved.config.model_copy(update={"script": str(path.relative_to(folder))})
    return replace(resolved, config=config), folder


def refuse_too_much(folder: Path, script: str, ignore: Ignore, key: str = "script") -> None:
    """Laptop: refuse a folder that is too large to stage, before copying it.

    Raises:
        UsageError: names the script and the folder, or a link that leads nowhere or to a folder above it.
    """
    size = files = 0
    for entry in walk(str(folder), hidden=True, ignore=ignore):
        files, size = files + entry.is_file, size + entry.size * entry.is_file
        if size > MOST_BYTES or files > MOST_FILES:
            raise UsageError(
                f"{key}: {folder}, the folder of {script}, is staged with the job but holds more than"
                f" {MOST_BYTES // 10**6} MB or {MOST_FILES:,} files; move the code to a separate folder (or"
                " name one with --source-dir), and name data in params"
            )


def ignoring(*paths: Path) -> Ignore:
    """Laptop: a filter of what not to stage: caches and the like, and folders of runs and staged copies."""

    def ignore(at: str, names: list[str]) -> set[str]:
        found = ((name, Path(at) / name) for name in names)
        return {*IGNORED(at, names), *(n for n, path in found if path.resolve() in paths or is_staged(path))}

    return ignore


def is_staged(path: Path) -> bool:
    """Laptop: whether a folder or archive is a staged copy, as `--request` writes them, with its token."""
    if path.is_dir():
        return (path / ORIGINS_FILE).is_file()
    with contextlib.suppress(OSError, zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error):
        if path.suffix == ".zip":
            return ORIGINS_FILE in zipfile.ZipFile(path).namelist()
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                first = archive.next()
            return first is not None and Path(first.name).name == TOKEN_FILE
    return False


def refuse_unusable_params(params: dict[str, Any], data: dict[str, str]) -> None:
    """Laptop: refuse parameters of a script that do not name data.

    Raises:
        UsageError: one line per parameter.
    """
    problems = [
        f"params.{name}: no such file or folder here (got {value!r}); a script's params name its data, which"
        f" it finds in $SM_CHANNEL_{name.upper()}; pass anything else as an argument after --"
        for name, value in params.items()
        if name not in data and not (isinstance(value, str) and Path(value).is_absolute())
    ]
    if problems:
        raise UsageError(*problems)
