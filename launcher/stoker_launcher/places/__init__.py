"""Laptop: the places that run jobs, named as `--on` names them: one module each, and installed packages' own."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from stoker.errors import UsageError, nearest

if TYPE_CHECKING:
    from stoker_launcher.job import Job


EXIT_CODES = {"succeeded": 0, "failed": 1, "interrupted": 143}
"""By a run's status."""


ENTRY_POINTS = "stoker.places"


def names() -> list[str]:
    """The values of `--on`; imports no place."""
    own = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "remote"]
    return list(dict.fromkeys([*own, *sorted(entry_points(group=ENTRY_POINTS).names)]))


def every_place() -> Iterator[Place]:
    for name in names():
        try:
            place = place_named(name)
        except UsageError as error:  # a package that is broken; the others work
            print(f"warning: {error}", file=sys.stderr)
        else:
            yield place


def place_named(name: str) -> Place:
    if name not in (known := names()):
        raise UsageError(
            f"--on {name}: no such place (known: {', '.join(known)})" + nearest(name, known)
        )
    if importlib.util.find_spec(f"{__name__}.{name}"):
        found: Place = importlib.import_module(f"{__name__}.{name}").PLACE
        return found
    (entry, *_) = entry_points(group=ENTRY_POINTS, name=name)
    try:
        found = entry.load()
    except Exception as error:
        raise UsageError(
            f"--on {name}: {entry.value} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return found


def attach(run_id: str) -> Run:
    for found in every_place():
        if run_id.startswith(found.ids) or (
            found.marker and (Path(run_id) / found.marker).is_file()
        ):
            return found.attach(run_id)
    return place_named("local").attach(run_id)


EVERYWHERE = ("on", "source_dir", "dry_run", "resume")
"""The fields of `Options` that mean the same with every place."""


@dataclass(frozen=True, kw_only=True)
class Options:
    on: str = "local"
    source_dir: Path | None = None
    dry_run: bool = False
    resume: str | None = None
    address: str | None = None
    offline: bool = False
    request: Path | None = None
    source: Path | None = None
    install: bool = False
    dashboard: bool = False


@dataclass(frozen=True)
class Resume:
    value: str | None = None
    """Value for `checkpoint.resume`; None leaves the key unchanged."""
    run_dir: Path | None = None
    """A run directory to continue in, instead of a new one."""
    checkpoints: tuple[Path, ...] = ()
    """Checkpoint folders to place in the hosts' `/opt/ml/checkpoints`, as after a restart."""

    def overrides(self) -> list[str]:
        return [] if self.value is None else [f"checkpoint.resume={self.value}"]


class Request(Protocol):
    """Everything that a place is about to do, as a printable value."""

    def render(self) -> str:
        """The request as shown by `--dry-run`."""


class Run(Protocol):
    """One execution of a job."""

    @property
    def id(self) -> str:
        """The id for `status`, `logs` and `stop`."""

    def status(self) -> str:
        """running, succeeded, failed, interrupted or unknown, optionally with a reason after a colon."""

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The log so far, line by line; with `follow` until the run has ended."""

    def wait(self) -> int:
        """Block until the end; returns the job's exit code."""

    def stop(self) -> str | None:
        """Ask the run to stop with a checkpoint, as SIGTERM does; returns what differs from that."""


@runtime_checkable
class RemoteRun(Run, Protocol):
    """A run that outlives this process."""

    def closing(self) -> str:
        """Message after the end: outcome, cost, location of the model."""

    def detached(self) -> str:
        """Message when the user stops watching."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place where jobs run. Each module in this folder defines one as `PLACE`."""

    name: str
    """`--on NAME`."""
    plan: Callable[[Job, Options, Resume], Request]
    """Check everything without side effects; raises UsageError."""
    submit: Callable[[Any], Run]
    """Takes the request of `plan`."""
    attach: Callable[[str], Run]
    """A run by its id; raises UsageError."""
    ids: tuple[str, ...] = ()
    """Prefixes of its run ids; empty: its runs are run directories on this machine."""
    marker: str = ""
    """A file that only its runs have in their run directory, which is then an id of the run, too."""
    options: tuple[str, ...] = ()
    """Names of `Options` that apply to this place but not to all others."""
    scales: bool = False
    """Whether hosts can join and leave during a run."""
    checkpoints: Literal["folders", "copies", "shared", "s3", "gs"] = "folders"
    """Which checkpoints its hosts can read: this machine's folders, copies of them in
    `/opt/ml/checkpoints`, only folders that all hosts share, or only `s3://` or `gs://`."""
