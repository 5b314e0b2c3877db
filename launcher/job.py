"""Laptop: a resolved and checked job: configuration, source to stage, and data.

Every place runs `COMMAND` in a staged copy of the source. A laptop and SageMaker differ only in the
location of that copy and of the data in `channels`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import scripts
from launcher.scripts import IGNORED
from stoker.config.extras import requirement_lines
from stoker.config.loading import SECRETS_FILE, Resolved, resolved_yaml, secrets_json
from stoker.errors import UsageError, nearest
from stoker.hosts.requirements import CONSTRAINTS, constraint_lines
from stoker.place import COMMIT_FILE, ORIGINS_FILE
from stoker.scripts.script_checks import SCRIPT_FOLDER

COMMAND = ("python", "train.py", "--config", "job.yaml")
"""The command that every place runs in the staged folder."""

HIDING = ("stoker", "train.py", SECRETS_FILE)
"""Reserved names in a user's folder; a script's folder is staged separately and may have most of them."""


@dataclass(frozen=True)
class Job:
    """Laptop: what to run, independent of the place."""

    resolved: Resolved
    source_dir: Path | None = None
    """The user's folder, staged next to `stoker`; None stages the examples."""
    data: dict[str, str] = field(default_factory=dict)
    """Recipe parameters that name data on this machine: parameter → absolute path."""

    @property
    def name(self) -> str:
        return self.resolved.config.name

    def stage(self, folder: Path, data_at: dict[str, str] | None = None) -> None:
        """Laptop: write the staged copy: `train.py`, `stoker/`, the recipe's source, `job.yaml`.

        Args:
            folder: an empty folder; created if missing.
            data_at: paths of the `data` parameters on the hosts; default: the paths on this machine.
        """
        folder.mkdir(parents=True, exist_ok=True)
        own = examples_root()
        shutil.copytree(package_root() / "stoker", folder / "stoker", ignore=IGNORED)
        for name in ("train.py", "requirements.txt"):
            shutil.copy2(own / name, folder / name)
        extras = requirement_lines(self.resolved.config)
        if extras:
            with (folder / "requirements.txt").open("a") as file:
                file.write("\n# extra requirements of this job\n" + "".join(f"{line}\n" for line in extras))
        config = self.resolved.config
        left_out = [Path(config.output_dir).resolve(), folder.resolve()]
        if self.resolved.file is not None and secrets_json(config) is not None:
            left_out.append(self.resolved.file.resolve())
        ignored = scripts.ignoring(*left_out)
        if config.script is not None and self.source_dir is not None:
            self._stage_requirements(folder, self.source_dir / "requirements.txt")
            _copy_tree(self.source_dir, folder / SCRIPT_FOLDER, ignored)
        elif self.source_dir is not None:
            self._stage_user_source(folder, self.source_dir, ignored)
        else:
            for name in ("recipes", "configs"):
                shutil.copytree(own / name, folder / name, ignore=IGNORED)
        self._stage_constraints(folder)
        params = {**config.params, **self.data, **(data_at or {})}
        staged = Resolved(config.model_copy(update={"params": params}), self.resolved.origins)
        (folder / "job.yaml").write_text(resolved_yaml(staged), encoding="utf-8")
        if (secrets := secrets_json(staged.config)) is not None:
            write_private(folder / SECRETS_FILE, secrets)
        commit = git_commit(self.source_dir or own)
        if commit:
            (folder / COMMIT_FILE).write_text(commit + "\n")
        (folder / ORIGINS_FILE).write_text(json.dumps(self.resolved.origins, indent=1))

    def _stage_constraints(self, folder: Path) -> None:
        """Pin this machine's versions, so that hosts installing at different times get the same ones."""
        wanted, constraints = folder / "requirements.txt", folder / CONSTRAINTS
        if wanted.is_file():
            given = constraints.read_text() if constraints.is_file() else ""
            lines = constraint_lines(wanted.read_text(), given)
            constraints.write_text("".join(f"{line}\n" for line in lines))

    def _stage_requirements(self, folder: Path, own: Path) -> None:
        if own.is_file():
            with (folder / "requirements.txt").open("a") as file:
                file.write(f"\n# from {own.parent.name}/requirements.txt\n{own.read_text()}\n")

    def _stage_user_source(self, folder: Path, source_dir: Path, ignored: scripts.Ignore) -> None:
        for item in sorted(source_dir.iterdir()):
            target = folder / item.name
            if item.name == "job.yaml" or item.name in ignored(str(source_dir), [item.name]):
                continue  # the staged job.yaml is the resolved one
            if item.name == "requirements.txt":
                self._stage_requirements(folder, item)
            elif item.is_dir():
                _copy_tree(item, target, ignored)
            elif item.exists():  # editors lock files by links that lead nowhere
                shutil.copy2(item, target)


def _copy_tree(folder: Path, target: Path, ignored: scripts.Ignore) -> None:
    shutil.copytree(folder, target, ignore=ignored, ignore_dangling_symlinks=True)


def write_private(file: Path, text: str) -> None:
    """Laptop: write a new file that only its owner can read."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(text)


def git_commit(folder: Path) -> str | None:
    """Laptop: the commit checked out in a folder, with "-dirty" if files differ; None without git."""
    git = ["git", "-C", str(folder)]
    try:
        done = [
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=10)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."])
        ]
    except (OSError, subprocess.TimeoutExpired):
        return None
    if any(result.returncode for result in done):
        return None
    return done[0].stdout.strip() + ("-dirty" if done[1].stdout.strip() else "")


def package_root() -> Path:
    """Laptop: the folder that contains the `stoker` package."""
    import stoker

    return Path(stoker.__file__).parent.parent


def examples_root() -> Path:
    """Laptop: the folder with `train.py`, `requirements.txt`, and the example recipes and configurations.

    In a clone it is `source_dir`; a wheel has a copy.
    """
    own = package_root()
    return own if (own / "train.py").is_file() else Path(__file__).parent / "examples"


def example_file(word: str) -> str:
    """Laptop: the configuration file that `example:digits` names.

    Raises:
        UsageError: there is no such example.
    """
    name = word.removeprefix("example:")
    files = {path.stem: path for path in sorted((examples_root() / "configs").glob("*.yaml"))}
    if name not in files:
        known = f"available: {', '.join(files)}"
        raise UsageError(f"{word}: no such example{nearest(name, files, known)}")
    return str(files[name])


def beside(resolved: Resolved) -> Path | None:
    """Laptop: the folder of the job's file if it contains the recipe's module, else None."""
    if resolved.file is None or ":" not in resolved.config.recipe:
        return None
    folder, module = resolved.file.resolve().parent, resolved.config.recipe.partition(":")[0].split(".")[0]
    there = (folder / f"{module}.py").is_file() or (folder / module).is_dir()
    return folder if there and folder != examples_root() else None


def open_job(resolved: Resolved, source_dir: Path | None = None) -> Job:
    """Laptop: check the job and find the data that it reads from this machine.

    A recipe parameter whose value is an existing path names local data. The path becomes absolute for
    local runs; other every_place upload the data as an input channel.

    Args:
        resolved: the configuration.
        source_dir: the user's folder; None: that of the job's file, if it contains the recipe or script.

    Raises:
        UsageError: the source folder is missing or shadows a Stoker file, or the script cannot be run.
    """
    if resolved.config.script is not None:
        resolved, source_dir = scripts.located(resolved, source_dir)
    elif (source_dir := source_dir or beside(resolved)) is not None and source_dir.is_dir():
        outputs = scripts.ignoring(Path(resolved.config.output_dir).resolve())
        scripts.refuse_too_much(source_dir, resolved.config.recipe, outputs, "recipe")
    problems = []
    if source_dir is not None:
        source_dir = source_dir.resolve()
        if not source_dir.is_dir():
            problems.append(f"--source-dir {source_dir}: no such folder")
        else:
            problems += [
                f"--source-dir {source_dir}: {name} would shadow Stoker's own; rename it"
                for name in HIDING[: 1 if resolved.config.script else None]
                if (source_dir / name).exists()
            ]
    if problems:
        raise UsageError(*problems)
    prepare_data(resolved, source_dir)
    data = {
        name: str(_located(Path(value)))
        for name, value in resolved.config.params.items()
        if _names_local_data(value)
    }
    if resolved.config.script is not None:
        scripts.refuse_unusable_params(resolved.config.params, data)
    return Job(resolved, source_dir, data)


def prepare_data(resolved: Resolved, source_dir: Path | None) -> None:
    """Laptop: call the job's `data.prepare` function, if any, to create its data.

    Raises:
        UsageError: the function cannot be loaded, or it raised.
    """
    target = resolved.config.data.prepare
    if not target:
        return
    from stoker.recipe import load_object

    prepare = load_object(target, source_dir or examples_root(), "data.prepare")
    try:
        prepare()
    except Exception as error:
        raise UsageError(f"data.prepare: {target} failed: {type(error).__name__}: {error}") from error


def _located(path: Path) -> Path:
    """The absolute path; of a link to a file, whose target may have no suffix, the link's."""
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def _names_local_data(value: Any) -> bool:
    return isinstance(value, str) and "://" not in value and bool(value.strip()) and Path(value).exists()
