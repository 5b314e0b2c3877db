"""Laptop: what a service gets of a job: its staged source with the hosts' token, and local data."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import secrets
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.job import Job, write_private
from stoker import figures
from stoker.place import TOKEN_FILE
from stoker.storage.filesystems import Entry, walk

PRIVATE_FILES = (".env", "*.pem", "id_rsa*", "id_ed25519*", "credentials", ".netrc", TOKEN_FILE)
LIMIT_BYTES = 500_000_000


def files_below(source: Path) -> list[tuple[str, Path, Entry]]:
    """(name relative to `source`, path, size and time) of a file, or of every file in a folder.

    A link that leads nowhere or to a folder above it is refused.
    """
    if source.is_file():
        about = source.stat()
        return [
            (source.name, source, Entry(str(source), source.name, True, about.st_size, about.st_mtime_ns))
        ]
    below = [entry for entry in walk(str(source), hidden=True) if entry.is_file]
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

    def path_in(self, folder: str) -> str:
        """Where hosts find the data if the target is this folder: a single file is placed in it."""
        return folder if self.source.is_dir() else f"{folder}/{self.source.name}"


def find_data_uploads(
    data: Mapping[str, str], uri: str, kms_key: str | None = None
) -> tuple[DataUpload, ...]:
    """Plan uploads below `uri` for local data, given as recipe parameter → path."""
    found = []
    for parameter, text in sorted(data.items()):
        source = Path(text)
        files = files_below(source)
        lines = [f"{name}\0{about.size}\0{about.mtime_ns}" for name, _, about in files]
        lines += [kms_key] if kms_key else []
        fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]
        size = sum(about.size for _, _, about in files)
        found.append(DataUpload(parameter, source, f"{uri}/data/{fingerprint}/", len(files), size))
    return tuple(found)


def stage(job: Job, folder: Path, data_at: dict[str, str]) -> None:
    """Write the staged source and, into the same folder, a new Ray token."""
    job.stage(folder, data_at)
    write_private(folder / TOKEN_FILE, secrets.token_hex(32))


def pack(folder: Path, archive: Path) -> None:
    """Pack the staged source as a `.tar.gz` that only its owner can read, with files at the root."""
    descriptor = os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, path, _ in files_below(folder):
            tar.add(path, arcname=name)


def measure(
    job: Job, data_at: dict[str, str], instead: str, limit: int = LIMIT_BYTES
) -> tuple[int, int, list[str]]:
    """Stage the source once; number of files and bytes to upload, and what speaks against it.

    Args:
        job: its source.
        data_at: recipe parameter → path of its data on the hosts.
        instead: where data belongs that is too large for the source, for the message.
        limit: bytes that the service accepts.
    """
    with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
        folder = Path(scratch) / "code"
        job.stage(folder, data_at)
        found = files_below(folder)
    problems = [
        f"--source-dir: {name} looks private and would be uploaded; move it elsewhere"
        for name, path, _ in found
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in PRIVATE_FILES)
    ]
    size = sum(about.size for _, _, about in found)
    if size > limit:
        largest = max(found, key=lambda item: item[2].size)[0]
        problems.append(
            f"--source-dir: {figures.size(size)} of source (largest: {largest}), more than"
            f" {figures.size(limit)}; move data out and name it in {instead}"
        )
    return len(found), size, problems
