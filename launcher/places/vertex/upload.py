"""Laptop: upload a job's staged code and local data to Cloud Storage."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.files import files_below
from launcher.job import COMMAND
from launcher.places.vertex.request import ARCHIVE, CODE_ON_HOST, PACKAGE, PACKAGE_MODULE
from launcher.source import DataUpload
from launcher.source import pack as pack_archive
from stoker.errors import UsageError

_SETUP = f"""from setuptools import setup

setup(name="stoker_job", version="1.0", packages=["stoker_job"], package_data={{"stoker_job": ["{ARCHIVE}"]}})
"""
_TASK = f'''"""Every host: unpack the job's code and run it in place of this process."""

import os
import shutil
import sys
import tarfile
from pathlib import Path

code = Path({CODE_ON_HOST!r})
shutil.rmtree(code, ignore_errors=True)
code.mkdir()
with tarfile.open(Path(__file__).with_name({ARCHIVE!r})) as archive:
    archive.extractall(code, filter="data")
os.chdir(code)
os.execv(sys.executable, [sys.executable, *{COMMAND[1:]!r}])
'''


def pack(folder: Path, archive: Path) -> None:
    """Laptop: pack the staged source as the archive or, by its name, the package that hosts unpack."""
    if archive.name.endswith(PACKAGE):
        _pack_package(folder, archive)
    else:
        pack_archive(folder, archive)


def _pack_package(folder: Path, archive: Path) -> None:
    """A Python package with the archive in it, as Google's prebuilt containers install it."""
    package, _, module = PACKAGE_MODULE.partition(".")
    with tempfile.TemporaryDirectory(prefix="stoker-") as scratch:
        pack_archive(folder, Path(scratch) / ARCHIVE)
        content = (Path(scratch) / ARCHIVE).read_bytes()
    files = {
        "setup.py": _SETUP.encode(),
        "PKG-INFO": b"Metadata-Version: 2.1\nName: stoker_job\nVersion: 1.0\n",
        f"{package}/__init__.py": b"",
        f"{package}/{module}.py": _TASK.encode(),
        f"{package}/{ARCHIVE}": content,
    }
    descriptor = os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{PACKAGE.removesuffix('.tar.gz')}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def upload_code(folder: Path, code_uri: str) -> None:
    """Laptop: upload the staged source as one object."""
    archive = folder.parent / code_uri.rpartition("/")[2]
    pack(folder, archive)
    _send([(archive, code_uri)])


def upload_data(item: DataUpload) -> bool:
    """Laptop: upload data unless an earlier job has; returns whether anything was uploaded.

    A manifest next to the prefix is written last, so an interrupted upload is repeated.
    """
    from pyarrow import fs

    from stoker.storage.filesystems import filesystem_of

    filesystem, folder = filesystem_of(item.uri)
    manifest = f"{folder}.json"
    if filesystem.get_file_info(manifest).type == fs.FileType.File:
        return False
    _send([(path, f"{folder}/{name}") for name, path, _ in files_below(item.source)])
    content = {"source": str(item.source), "files": item.files, "bytes": item.bytes}
    with filesystem.open_output_stream(manifest) as stream:
        stream.write(json.dumps(content).encode())
    return True


def refuse_bucket(uri: str) -> Iterator[str]:
    """Laptop: a problem if the prefix cannot be listed; one call."""
    from pyarrow import fs

    from stoker.storage.filesystems import filesystem_of

    bucket = uri.removeprefix("gs://").partition("/")[0]
    try:
        filesystem, _ = filesystem_of(uri)
        there = filesystem.get_file_info(f"gs://{bucket}").type != fs.FileType.NotFound
    except OSError as error:
        yield f"vertex.gcs_uri: bucket {bucket!r} cannot be reached: {_line(error)}"
        return
    if not there:
        yield (
            f"vertex.gcs_uri: bucket {bucket!r} does not exist, or you may not see it; create it"
            f" (`gcloud storage buckets create gs://{bucket}`) or name another"
        )


@contextmanager
def readable_errors() -> Iterator[None]:
    """Laptop: convert upload errors to a one-line `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"upload to Cloud Storage: {_line(error)}") from None


def _send(files: list[tuple[Path, str]]) -> None:
    from stoker.storage.google import google_filesystem

    filesystem: Any = google_filesystem()

    def send(item: tuple[Path, str]) -> None:
        with item[0].open("rb") as source, filesystem.open_output_stream(item[1]) as target:
            while chunk := source.read(16 * 2**20):
                target.write(chunk)

    with ThreadPoolExecutor(max_workers=8) as pool:
        for _ in pool.map(send, files):  # re-raises upload errors
            pass


def _line(error: OSError) -> str:
    return " ".join(str(error.strerror or error).split())[:300]
