"""Laptop: the size of a job's staged source, and files in it that must not be uploaded."""

from __future__ import annotations

import fnmatch
import tempfile
from pathlib import Path

from launcher.files import files_below
from launcher.job import Job
from stoker import figures

PRIVATE_FILES = (".env", "*.pem", "id_rsa*", "id_ed25519*", "credentials", ".netrc", ".ray-token")
LIMIT_BYTES = 500_000_000


def measure(job: Job, data_at: dict[str, str], instead: str) -> tuple[int, int, list[str]]:
    """Laptop: stage the source once; number of files and bytes to upload, and what speaks against it.

    Args:
        job: its source.
        data_at: recipe parameter → path of its data on the hosts.
        instead: where data belongs that is too large for the source, for the message.
    """
    problems = []
    with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
        folder = Path(scratch) / "code"
        job.stage(folder, data_at)
        found = list(files_below(folder))
    for name, path, _ in found:
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in PRIVATE_FILES):
            problems.append(f"--source-dir: {name} looks private and would be uploaded; move it elsewhere")
    size = sum(stat.st_size for _, _, stat in found)
    if size > LIMIT_BYTES:
        largest = max(found, key=lambda item: item[2].st_size)[0]
        problems.append(
            f"--source-dir: {figures.size(size)} of source (largest: {largest});"
            f" move data out and name it in {instead}"
        )
    return len(found) + 1, size, problems  # the Ray token is written at submission
