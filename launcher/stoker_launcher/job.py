"""Laptop: a resolved and checked job: configuration, source to stage, and data.

Every place runs `COMMAND` in a staged copy of the source. A laptop and SageMaker differ only in the
location of that copy and of the data in `channels`.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import tarfile
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker import figures
from stoker.config.loading import SECRETS_FILE, Resolved, resolved_yaml, secrets_json
from stoker.config.schema import Config, requirement_lines
from stoker.config.values import expanded_paths, typed
from stoker.errors import UsageError, nearest
from stoker.hosts.requirements import CONSTRAINTS, constraint_lines
from stoker.place import COMMIT_FILE, ORIGINS_FILE, TOKEN_FILE
from stoker.recipe import ALIASES, Recipe, load_object, load_recipe, names_data
from stoker.scripts.script_checks import SCRIPT_FOLDER, no_such_script, refuse_foreign_keys
from stoker.storage.filesystems import Entry, walk

COMMAND = ("python", "train.py", "--config", "job.yaml")
"""The command that every place runs in the staged folder."""
HIDING = ("stoker", SECRETS_FILE)
"""Reserved names in a user's folder; a script's folder is staged separately and may have the second."""
OWN_TRAIN = "train.own.py"
"""The staged name of a recipe's own `train.py`, for which `import train` stands there."""
MOST_BYTES = 500_000_000
MOST_FILES = 20_000
IGNORED = shutil.ignore_patterns(
    "__pycache__",
    "*.pyc",
    ".git",
    ".venv",
    ".data",
    "runs",
    ".*_cache",
    "*.egg-info",
    ".ipynb_checkpoints",
)
Ignore = Callable[[str, list[str]], set[str]]


@dataclass(frozen=True)
class Project:
    """The folder of a job's code, found once, and the recipe in it, which is loaded once."""

    config: Config
    source_dir: Path | None = None
    """The user's folder, staged next to `stoker`; None stages the examples."""

    @property
    def root(self) -> Path:
        return self.source_dir or examples_root()

    @functools.cached_property
    def kind(self) -> Any:
        """The recipe's class. Raises UsageError."""
        path = ALIASES.get(self.config.recipe, self.config.recipe)
        return load_object(path, self.root, "recipe", offers=Recipe)

    @functools.cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.config.recipe, self.config.params, self.root)

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """The recipe's parameters with their types; empty for a script, and if it cannot be imported here."""
        if self.config.script is None:
            with contextlib.suppress(Exception):  # the hosts may have packages that this one lacks
                fields = self.kind.model_fields.items()
                return {info.alias or name: info.annotation for name, info in fields}
        return {}


@dataclass(frozen=True)
class Job:
    resolved: Resolved
    project: Project
    data: dict[str, str] = field(default_factory=dict)
    """Parameters that are the path of a file or folder: parameter → absolute path."""

    @property
    def name(self) -> str:
        return self.resolved.config.name

    @property
    def source_dir(self) -> Path | None:
        return self.project.source_dir

    def is_path(self, name: str) -> bool:
        """Whether a parameter is a path: all of a script are, of a recipe `data` and fields of type `Path`."""
        script = self.resolved.config.script is not None
        return script or name == "data" or names_data(name, self.project.fields.get(name))

    def stage(
        self, folder: Path, data_at: dict[str, str] | None = None, *, installs: bool = True
    ) -> None:
        """Write the staged copy: `train.py`, `stoker/`, the recipe's source, `job.yaml`.

        Args:
            folder: an empty folder; created if missing.
            data_at: paths of the `data` parameters on the hosts; default: the paths on this machine.
            installs: whether hosts install the requirements: reading this machine's versions takes 0.5 s.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ORIGINS_FILE).write_text(
            json.dumps(self.resolved.origins, indent=1)
        )  # first: a mark
        own, config = examples_root(), self.resolved.config
        shutil.copytree(package_root() / "stoker", folder / "stoker", ignore=IGNORED)
        for name in ("train.py", "requirements.txt"):
            shutil.copy2(own / name, folder / name)
        if extras := requirement_lines(config):
            with (folder / "requirements.txt").open("a") as file:
                file.write(
                    "\n# extra requirements of this job\n" + "".join(f"{line}\n" for line in extras)
                )
        self._stage_source(folder)
        if (
            installs
        ):  # pin this machine's versions: hosts that install at different times get the same ones
            wanted, constraints = folder / "requirements.txt", folder / CONSTRAINTS
            given = constraints.read_text() if constraints.is_file() else ""
            lines = constraint_lines(wanted.read_text(), given)
            constraints.write_text("".join(f"{line}\n" for line in lines))
        params = {**config.params, **self.data, **(data_at or {})}
        staged = Resolved(config.model_copy(update={"params": params}), self.resolved.origins)
        (folder / "job.yaml").write_text(resolved_yaml(staged), encoding="utf-8")
        if (secrets := secrets_json(staged.config)) is not None:
            write_private(folder / SECRETS_FILE, secrets.encode())
        if commit := git_commit(self.project.root):
            (folder / COMMIT_FILE).write_text(commit + "\n")

    def _stage_source(self, folder: Path) -> None:
        config = self.resolved.config
        left_out = [folder.resolve()]
        if self.resolved.file is not None and secrets_json(config) is not None:
            left_out.append(self.resolved.file.resolve())
        ignored = ignoring(*outputs_of(config), *left_out)
        copy = functools.partial(shutil.copytree, ignore=ignored, ignore_dangling_symlinks=True)
        if self.source_dir is None:
            for name in ("recipes", "configs"):
                shutil.copytree(examples_root() / name, folder / name, ignore=IGNORED)
        elif config.script is not None:
            self._stage_requirements(folder, self.source_dir / "requirements.txt")
            copy(self.source_dir, folder / SCRIPT_FOLDER)
        else:
            for item in sorted(self.source_dir.iterdir()):
                if item.name in (
                    "job.yaml",
                    ORIGINS_FILE,
                    *ignored(str(self.source_dir), [item.name]),
                ):
                    continue  # the staged job.yaml is the resolved one
                if item.name == "train.py":
                    shutil.copy2(item, folder / OWN_TRAIN)
                elif item.name == "requirements.txt":
                    self._stage_requirements(folder, item)
                elif item.is_dir():
                    copy(item, folder / item.name)
                elif item.exists():  # editors lock files by links that lead nowhere
                    shutil.copy2(item, folder / item.name)

    def _stage_requirements(self, folder: Path, own: Path) -> None:
        if own.is_file():
            with (folder / "requirements.txt").open("a") as file:
                file.write(f"\n# from {own.parent.name}/requirements.txt\n{own.read_text()}\n")


def write_private(file: Path, content: bytes) -> None:
    if file.is_file():  # no device
        file.chmod(0o600)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
        output.write(content)


def git_commit(folder: Path) -> str | None:
    """The commit checked out in a folder, with "-dirty" if files differ; None without git."""
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
    return Path(figures.__file__).parent.parent


def examples_root() -> Path:
    """The folder with `train.py` and the examples: in a clone `source_dir`; a wheel has a copy."""
    own = package_root()
    return own if (own / "train.py").is_file() else Path(__file__).parent / "examples"


def example_file(word: str) -> str:
    name = word.removeprefix("example:")
    files = {path.stem: path for path in sorted((examples_root() / "configs").glob("*.yaml"))}
    if name not in files:
        known = f"available: {', '.join(files)}"
        raise UsageError(f"{word}: no such example{nearest(name, files, known)}")
    return str(files[name])


def holds_recipe(folder: Path, recipe: str) -> bool:
    module = recipe.partition(":")[0].split(".")[0]
    return bool(module) and ((folder / f"{module}.py").is_file() or (folder / module).is_dir())


def project_of(resolved: Resolved, source_dir: Path | None = None) -> tuple[Resolved, Project]:
    """A job's project, and the job with its script's path relative to it.

    Without `source_dir`, it is the folder of the job's file if that contains the recipe or script.
    """
    config, key = resolved.config, "recipe" if resolved.config.script is None else "script"
    if source_dir is not None and not source_dir.is_dir():
        raise UsageError(f"--source-dir {source_dir}: no such folder")
    if key == "script":
        resolved, source_dir = located(resolved, source_dir)
    elif source_dir is None and resolved.file is not None and ":" in config.recipe:
        beside = resolved.file.resolve().parent
        if holds_recipe(beside, config.recipe) and beside != examples_root():
            source_dir = beside
    if source_dir is not None:
        source_dir = source_dir.resolve()
        refuse_too_much(source_dir, getattr(config, key), ignoring(*outputs_of(config)), key)
        hiding = HIDING[:1] if key == "script" else HIDING
        if found := [name for name in hiding if (source_dir / name).exists()]:
            shadows = "would shadow Stoker's own; rename it"
            raise UsageError(*(f"--source-dir {source_dir}: {name} {shadows}" for name in found))
    return resolved, Project(resolved.config, source_dir)


def open_job(resolved: Resolved, source_dir: Path | None = None) -> Job:
    """Check the job and find the data that it reads from this machine.

    Parameters that are paths (`Job.is_path`) become absolute for local runs; other places upload the data as
    an input channel.
    """
    resolved, project = project_of(resolved, source_dir)
    prepare_data(project)
    job = Job(resolved, project)
    problems = []
    for name, value in resolved.config.params.items():
        text = isinstance(value, str) and bool(value.strip())
        if text and "://" not in value and job.is_path(name):
            try:
                value = expanded_paths(typed(value, project.fields.get(name, str)))
            except ValueError as error:
                problems.append(f"params.{name}: {error}")
            if isinstance(value, str):
                at = Path(
                    value
                )  # Of a link to a file, whose target may have no suffix, the link's.
                job.data[name] = str(at.resolve() if at.is_dir() else at.parent.resolve() / at.name)
        if resolved.config.script is None:
            continue
        if not text or not ("://" in value or Path(value).is_absolute() or Path(value).exists()):
            problems.append(
                f"params.{name}: no such file or folder here (got {value!r}); a script's params name its"
                f" data, which it finds in $SM_CHANNEL_{name.upper()}; pass anything else as an argument"
                " after --"
            )
    if problems:
        raise UsageError(*problems)
    return job


def prepare_data(project: Project) -> None:
    target = project.config.data.prepare
    if not target:
        return
    prepare = load_object(target, project.root, "data.prepare")
    try:
        prepare()
    except Exception as error:
        raise UsageError(
            f"data.prepare: {target} failed: {type(error).__name__}: {error}"
        ) from error


def as_overrides(path: Path | None, arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """Turn a YAML file or script, and the words after `--` if any, into (YAML file, key overrides)."""
    words = [] if arguments is None else [f"args={json.dumps(arguments)}"]
    if path is None or path.suffix != ".py":
        return path, words
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip("_.-")[:63] or "job"
    return None, [f"name={name}", f"script={path}", *words]


def located(resolved: Resolved, source_dir: Path | None) -> tuple[Resolved, Path]:
    """The job with its script's path relative to the staged folder, and that folder.

    Without `source_dir` it is the script's folder, found here or next to the job's file.
    """
    refuse_foreign_keys(resolved)
    named = str(resolved.config.script)
    folders = [
        Path(),
        *filter(None, [source_dir or (resolved.file.parent if resolved.file else None)]),
    ]
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
        raise UsageError(
            f"script: {named} is not Python: {getattr(error, 'msg', error)}{line}"
        ) from None
    config = resolved.config.model_copy(update={"script": str(path.relative_to(folder))})
    return replace(resolved, config=config), folder


def refuse_too_much(folder: Path, named: str, ignore: Ignore, key: str) -> None:
    size = files = 0
    for entry in walk(str(folder), hidden=True, ignore=ignore):
        files, size = files + entry.is_file, size + entry.size * entry.is_file
        if size > MOST_BYTES or files > MOST_FILES:
            raise UsageError(
                f"{key}: {folder}, the folder of {named}, is staged with the job but holds more than"
                f" {MOST_BYTES // 10**6} MB or {MOST_FILES:,} files; move the code to a separate folder (or"
                " name one with --source-dir), and name data in params"
            )


def outputs_of(config: Config) -> list[Path]:
    folder = config.checkpoint.dir
    found = [
        Path(config.output_dir),
        *(Path(folder).glob("step-*") if folder and "://" not in folder else ()),
    ]
    return [path.resolve() for path in found]


def ignoring(*paths: Path) -> Ignore:
    """A filter of what not to stage: caches and the like, and folders of runs and staged copies."""

    def ignore(at: str, names: list[str]) -> set[str]:
        found = ((name, Path(at) / name) for name in names)
        return {
            *IGNORED(at, names),
            *(n for n, path in found if path.resolve() in paths or _is_staged(path)),
        }

    return ignore


def _is_staged(path: Path) -> bool:
    """Whether a folder or archive is a staged copy, as `--request` writes them, with its token."""
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


PRIVATE_FILES = (".env", "*.pem", "id_rsa*", "id_ed25519*", "credentials", ".netrc", TOKEN_FILE)
NO_HISTORY = shutil.ignore_patterns(".git")


def is_private(file: Path) -> bool:
    return any(fnmatch.fnmatch(file.name, pattern) for pattern in PRIVATE_FILES)


def files_below(source: Path) -> list[tuple[str, Path, Entry]]:
    """(name relative to `source`, path, size and time) of a file, or of every file in a folder.

    Without `.git`. A link that leads nowhere or to a folder above it is refused.
    """
    if source.is_file():
        about = source.stat()
        return [
            (
                source.name,
                source,
                Entry(str(source), source.name, True, about.st_size, about.st_mtime_ns),
            )
        ]
    below = [entry for entry in walk(str(source), hidden=True, ignore=NO_HISTORY) if entry.is_file]
    return sorted((Path(e.path).relative_to(source).as_posix(), Path(e.path), e) for e in below)


@dataclass(frozen=True)
class DataUpload:
    """Local data that becomes an input channel.

    The target prefix is a fingerprint of paths, sizes and modification times, so that a second job with
    the same data uploads nothing. With a key of encryption, it is that of the data under this key.
    """

    parameter: str
    source: Path
    uri: str
    files: int
    bytes: int
    private: tuple[str, ...] = ()
    """Files that look private."""

    def path_in(self, folder: str) -> str:
        """Where hosts find the data if the target is this folder: a single file is placed in it."""
        return folder if self.source.is_dir() else f"{folder}/{self.source.name}"


def find_data_uploads(
    data: Mapping[str, str], uri: str, kms_key: str | None = None
) -> tuple[DataUpload, ...]:
    found = []
    for parameter, text in sorted(data.items()):
        source = Path(text)
        files = files_below(source) if source.exists() else []
        lines = [f"{name}\0{about.size}\0{about.mtime_ns}" for name, _, about in files]
        lines += [kms_key] if kms_key else []
        fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]
        size = sum(about.size for _, _, about in files)
        private = tuple(name for name, path, _ in files if is_private(path))
        at = f"{uri}/data/{fingerprint}/"
        found.append(DataUpload(parameter, source, at, len(files), size, private))
    return tuple(found)


def stage(job: Job, folder: Path, data_at: dict[str, str]) -> None:
    job.stage(folder, data_at)
    write_private(folder / TOKEN_FILE, secrets.token_hex(32).encode())


def pack_source(folder: Path, archive: Path) -> None:
    """Pack the staged source as a `.tar.gz` that only its owner can read, with files at the root."""
    write_private(archive, b"")
    with tarfile.open(archive, "w:gz") as tar:
        for name, path, _ in files_below(folder):
            tar.add(path, arcname=name)


class Staged:
    """A job's source as hosts get it, staged once: measured when the job is planned, then sent."""

    def __init__(self, job: Job, data_at: dict[str, str]) -> None:
        scratch = tempfile.mkdtemp(prefix="stoker-")
        weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self.folder = Path(scratch) / "code"
        job.stage(self.folder, data_at)
        self.found = files_below(self.folder)
        self.bytes = sum(about.size for _, _, about in self.found)

    def problems(self) -> Iterator[str]:
        """Files that must not be sent."""
        for name, path, _ in self.found:
            if is_private(path):
                yield f"--source-dir: {name} looks private and would be uploaded; move it elsewhere"

    def with_token(self) -> Path:
        """The folder, with a token of its own for the hosts of one job."""
        write_private(self.folder / TOKEN_FILE, secrets.token_hex(32).encode())
        return self.folder
