"""Laptop: upload a job's staged code and local data to S3."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tarfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launcher.files import files_below
from launcher.job import Job, write_private
from stoker.errors import UsageError

ARCHIVE = "sourcedir.tar.gz"


@dataclass(frozen=True)
class DataUpload:
    """Laptop: local data that becomes an input channel.

    The target prefix is a fingerprint of paths, sizes and modification times, so that a second job with
    the same data uploads nothing.
    """

    parameter: str
    source: Path
    uri: str
    files: int
    bytes: int


def find_data_uploads(data: Mapping[str, str], s3_uri: str) -> tuple[DataUpload, ...]:
    """Laptop: plan uploads below `s3_uri` for local data, given as recipe parameter → path."""
    found = []
    for parameter, text in sorted(data.items()):
        source = Path(text)
        files = list(files_below(source))
        lines = [f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}" for name, _, stat in files]
        fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]
        size = sum(stat.st_size for _, _, stat in files)
        uri = f"{s3_uri}/data/{fingerprint}/"
        found.append(DataUpload(parameter, source, uri, len(files), size))
    return tuple(found)


def stage(job: Job, folder: Path, data_at: dict[str, str], token_file: str) -> None:
    """Laptop: write the staged source and, into the same folder, a new Ray token."""
    job.stage(folder, data_at)
    write_private(folder / token_file, secrets.token_hex(32))


def pack(folder: Path, archive: Path) -> None:
    """Laptop: pack the staged source as the toolkit's `sourcedir.tar.gz`, with files at the root."""
    descriptor = os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, path, _ in files_below(folder):
            tar.add(path, arcname=name)


def upload_code(s3: Any, folder: Path, code_uri: str, archive: bool, kms_key: str | None) -> None:
    """Laptop: upload the staged source, as single files or as one archive."""
    if not archive:
        _send_all(s3, [(path, name) for name, path, _ in files_below(folder)], code_uri, kms_key)
        return
    packed = folder.parent / ARCHIVE
    pack(folder, packed)
    _send_all(s3, [(packed, ARCHIVE)], code_uri, kms_key)


def upload_data(s3: Any, item: DataUpload, kms_key: str | None) -> bool:
    """Laptop: upload data unless an earlier job has; returns whether anything was uploaded.

    A manifest next to the prefix is written last, so an interrupted upload is repeated.
    """
    bucket, prefix = split_uri(item.uri)
    manifest = prefix.rstrip("/") + ".json"
    if s3.list_objects_v2(Bucket=bucket, Prefix=manifest, MaxKeys=1).get("KeyCount"):
        return False
    files = list(files_below(item.source))
    _send_all(s3, [(path, name) for name, path, _ in files], item.uri, kms_key)
    content = {"source": str(item.source), "files": item.files, "bytes": item.bytes}
    s3.put_object(Bucket=bucket, Key=manifest, Body=json.dumps(content).encode(), **_encryption(kms_key))
    return True


@contextmanager
def readable_errors() -> Iterator[None]:
    """Laptop: convert upload errors to a one-line `UsageError`."""
    from boto3.exceptions import S3UploadFailedError

    try:
        yield
    except S3UploadFailedError as error:  # wraps the actual error
        raise UsageError(f"AWS upload: {error}") from None
    except OSError as error:
        raise UsageError(f"upload: {error.filename}: {error.strerror}") from None


def split_uri(uri: str) -> tuple[str, str]:
    """Laptop: `s3://bucket/some/key` → (bucket, some/key)."""
    parts = urlsplit(uri)
    return parts.netloc, parts.path.lstrip("/")


def _send_all(s3: Any, files: list[tuple[Path, str]], uri: str, kms_key: str | None) -> None:
    bucket, prefix = split_uri(uri.rstrip("/"))

    def send(item: tuple[Path, str]) -> None:
        path, name = item
        s3.upload_file(str(path), bucket, f"{prefix}/{name}", ExtraArgs=_encryption(kms_key))

    with ThreadPoolExecutor(max_workers=8) as pool:
        for _ in pool.map(send, files):  # re-raises upload errors
            pass


def _encryption(kms_key: str | None) -> dict[str, str]:
    if kms_key is None:
        return {}
    return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key}
