"""Laptop: what every backend offers: `plan(job) → Request` without side effects, then `submit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from launcher.job import Job


@dataclass(frozen=True, kw_only=True)
class Options:
    """Laptop: what stands on the command line beside the configuration."""

    on: str = "local"
    source_dir: Path | None = None
    dry_run: bool = False
    resume: str | None = None
    address: str | None = None
    offline: bool = False
    request: Path | None = None
    install: bool = False
    dashboard: bool = False


@dataclass(frozen=True)
class Resume:
    """Laptop: from what a job goes on."""

    value: str | None = None
    """For `checkpoint.resume`; None leaves the key as it is."""
    run_dir: Path | None = None
    """A run directory to continue in, instead of a new one."""
    checkpoints: tuple[Path, ...] = ()
    """Checkpoint folders that hosts find in `/opt/ml/checkpoints`, as after a restart."""

    def overrides(self) -> list[str]:
        """The key's new value, as typed."""
        return [] if self.value is None else [f"checkpoint.resume={self.value}"]


class Request(Protocol):
    """Laptop: all that a backend is about to do, as a value one can print."""

    def render(self) -> str:
        """The request as `--dry-run` shows it."""
        ...


class Run(Protocol):
    """Laptop: one execution of a job."""

    @property
    def id(self) -> str:
        """How `status`, `logs` and `stop` find the run again."""
        ...

    def status(self) -> str:
        """running, succeeded, failed, interrupted or unknown, perhaps with a reason after a colon."""
        ...

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The log so far, line by line; with `follow` until the run has ended."""
        ...

    def wait(self) -> int:
        """Block until the end; the job's exit code."""
        ...

    def stop(self) -> None:
        """Ask the run to stop with a checkpoint, as SIGTERM does."""
        ...


@runtime_checkable
class RemoteRun(Run, Protocol):
    """Laptop: a run that outlives this process, and what to say at its end."""

    def closing(self) -> str:
        """What to say after the end: outcome, cost, where the model lies."""
        ...

    def detached(self) -> str:
        """What to say when the user stops watching."""
        ...


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Laptop: a place where jobs run. Each module of this folder that has one calls it `BACKEND`."""

    name: str
    """`--on NAME`."""
    plan: Callable[[Job, Options, Resume], Request]
    """Check everything, without side effects; raises UsageError."""
    submit: Callable[[Any], Run]
    """Takes the request of `plan`."""
    attach: Callable[[str], Run]
    """A run by its id; raises UsageError."""
    ids: tuple[str, ...] = ()
    """How ids of its runs begin; empty: they are run directories of this machine."""
    options: tuple[str, ...] = ()
    """Of `Options`, those that other places have no use for."""
    checkpoints: Literal["folders", "copies", "shared", "s3"] = "folders"
    """What its hosts see of this machine's: folders, copies of them in `/opt/ml/checkpoints`, only what all
    hosts share, or only `s3://`."""
