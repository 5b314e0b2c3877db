"""Laptop: build the CustomJob of a job. Pure: no calls to Google Cloud."""

from __future__ import annotations

from launcher.job import COMMAND
from stoker.bootstrap.services.vertex import MOUNTS

CODE_ON_HOST = "/tmp/stoker-code"  # noqa: S108 - in a container of its own


def container_command(code_uri: str) -> list[str]:
    """Laptop: the command of a container: copy the code out of the mounted bucket and run it.

    Importing it from Cloud Storage FUSE would take a request per file. `exec` makes Python process 1, so that
    SIGTERM reaches it.
    """
    source = MOUNTS / code_uri.removeprefix("gs://")
    run = f"cp -r {source} {CODE_ON_HOST} && cd {CODE_ON_HOST} && exec {' '.join(COMMAND)}"
    return ["/bin/bash", "-c", run]
