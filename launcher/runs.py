"""Laptop: runs that go on elsewhere: found again by their id, followed, left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from launcher.backends.base import Run


class RemoteRun(Run, Protocol):
    """Laptop: a run that outlives this process, and what to say at its end."""

    def closing(self) -> str:
        """What to say after the end: outcome, cost, where the model lies."""
        ...

    def detached(self) -> str:
        """What to say when the user stops watching."""
        ...


def attach(run_id: str) -> RemoteRun | None:
    """Laptop: the remote run that an id names; None where the id is not one of a remote backend.

    Raises:
        UsageError: the id begins as a remote one and is not whole.
    """
    if run_id.startswith("ray:"):
        from launcher.backends import ray_cluster

        return ray_cluster.attach(run_id)
    if run_id.startswith(("sagemaker:", "arn:")):
        from launcher.backends import sagemaker

        return sagemaker.attach(run_id)
    return None


def show(line: str) -> None:
    """Laptop: print at once, into a pipe too."""
    print(line, flush=True)


def follow(run: RemoteRun, tell: Callable[[str], None] = show) -> int:
    """Laptop: show the logs until the end, then the outcome; Ctrl-C leaves the job alone.

    Returns:
        The job's exit code; 130 after Ctrl-C.
    """
    tell(f"{run.id}: Ctrl-C stops watching, not the job")
    try:
        for line in run.logs(follow=True):
            tell(line)
        code = run.wait()
    except KeyboardInterrupt:
        tell(run.detached())
        return 130
    tell(run.closing())
    return code
