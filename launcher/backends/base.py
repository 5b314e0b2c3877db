"""Laptop: what every backend offers: `plan(job) → Request` without side effects, then `submit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


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
