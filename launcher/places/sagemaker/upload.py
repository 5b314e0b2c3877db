"""Laptop: upload a job's staged code and local data to S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launcher.files import files_below
from launcher.places.sagemaker.request import Draft
from launcher.source import DataUpload, pack
from stoker.errors import UsageError

ARCHIVE = "sourcedir.tar.gz"


def protection(draft: Draft) -> dict[str, str]:
    """Laptop: options of every upload: the account that must own the bucket, and the key, if any."""
    settings = draft.settings
    owner = settings.bucket_owner or (settings.role or "").split(":")[4:5]
    found = {"ExpectedBucketOwner": "".join(owner)}
    if settings.kms_key is not None:
        found |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": settings.kms_key}
    return found


def upload_code(s3: Any, folder: Path, code_uri: str, archive: bool, options: dict[str, str]) -> None:
    """Laptop: upload the staged source, as single files or as one archive; `options` of `protection`."""
    if not archive:
        _send_all(s3, [(path, name) for name, path, _ in files_below(folder)], code_uri, options)
        return
    packed = folder.parent / ARCHIVE
    pack(folder, packed)
    _send_all(s3, [(packed, ARCHIVE)], code_uri, options)


def upload_data(s3: Any, item: DataUpload, options: dict[str, str]) -> bool:
    """Laptop: upload data unless an earlier job has; returns whether anything was uploaded.

    A manifest next to the prefix is written last, so an interrupted upload is repeated.
    """
    bucket, prefix = split_uri(item.uri)
    manifest = prefix.rstrip("/") + ".json"
    owner = options["ExpectedBucketOwner"]
    there = s3.list_objects_v2(Bucket=bucket, Prefix=manifest, MaxKeys=1, ExpectedBucketOwner=owner)
    if there.get("KeyCount"):
        return False
    _send_all(s3, [(path, name) for name, path, _ in files_below(item.source)], item.uri, options)
    content = {"source": str(item.source), "files": item.files, "bytes": item.bytes}
    s3.put_object(Bucket=bucket, Key=manifest, Body=json.dumps(content).encode(), **options)
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


def _send_all(s3: Any, files: list[tuple[Path, str]], uri: str, options: dict[str, str]) -> None:
    bucket, prefix = split_uri(uri.rstrip("/"))

    def send(item: tuple[Path, str]) -> None:
        path, name = item
        s3.upload_file(str(path), bucket, f"{prefix}/{name}", ExtraArgs=options)

    with ThreadPoolExecutor(max_workers=8) as pool:
        for _ in pool.map(send, files):  # re-raises upload errors
            pass
