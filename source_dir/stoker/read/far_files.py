"""Chain worker: whole files of an object store, each requested before it is needed.

An object of 100 kB takes 30 ms to come and 3 to arrive. Read one after the other, a process would get 3 MB/s.

obstore asks once for each object; pyarrow asks for its size first: twice the requests, of which a prefix of S3
answers 5,500 a second, and twice the CPU. It reads where obstore has no credentials, and in forks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property, partial
from itertools import islice
from typing import Any

from stoker.config.redaction import redact
from stoker.protocol import BadRecord
from stoker.read.sources import read_again
from stoker.storage.filesystems import (
    azure_endpoint,
    endpoint_of_s3,
    filesystem_of,
    gcs_emulator,
    region_of_s3,
)

_log = logging.getLogger("stoker")
READS = 32
"""Requests in flight, and so connections, of a chain worker; 32 bring 85 MB/s of such objects."""
AHEAD_BYTES = 32 * 2**20
"""About so much is held ready: of larger files, fewer are in flight."""
CREDENTIALS_S = timedelta(minutes=10)
"""botocore renews credentials in their last ten minutes, obstore asks again for the last five of these."""
CLIENT = {"timeout": "1 hour", "read_timeout": "20 s", "connect_timeout": "5 s"}
RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
CHINA = "cn-"


class FarFiles:
    """The files below a folder. One thread calls; of what it does not ask for in turn, nothing is kept."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._expected: dict[str, Future[bytes | BadRecord] | None] = {}
        """Paths in the order in which they will be read; the first ones are being fetched."""
        self._bytes = AHEAD_BYTES // 4
        """Size of the latest file."""

    def __reduce__(self) -> Any:
        return FarFiles, (self.folder,)

    def expect(self, paths: list[str]) -> None:
        for path in paths:
            self._expected.setdefault(path, None)
        self._ask()

    def read(self, paths: list[str]) -> Iterator[bytes | BadRecord]:
        if paths and paths[0] not in self._expected:
            self._drop_before(None)
        self.expect(paths)
        for path in paths:
            yield self._take(path)

    def _take(self, path: str) -> bytes | BadRecord:
        self._drop_before(path)
        coming = self._expected.pop(path, None) or self._submit(path)
        self._ask()
        content = coming.result()
        if not isinstance(content, BadRecord):
            self._bytes = max(len(content), 1)
        return content

    def _drop_before(self, path: str | None) -> None:
        while self._expected and (first := next(iter(self._expected))) != path:
            if (coming := self._expected.pop(first)) is not None:
                coming.cancel()

    def _ask(self) -> None:
        for path in islice(self._expected, max(2, min(READS, AHEAD_BYTES // self._bytes))):
            if self._expected[path] is None:
                self._expected[path] = self._submit(path)

    def _submit(self, path: str) -> Future[bytes | BadRecord]:
        return self._threads.submit(read_again, path, partial(self._content, path), far=True)

    def _content(self, path: str) -> bytes:
        whole = f"{self._root}/{path}"
        if self._store is None:
            return content_of(self._filesystem, whole)
        try:
            content: bytes = self._store.get(whole.partition("/")[2]).bytes().to_bytes()
        except (FileNotFoundError, ValueError):
            raise  # a key such as a//b or ./a, for which pyarrow might read another object
        except Exception as error:  # obstore's have no other base
            raise OSError(redact(" ".join(str(error).split()))) from None
        return content

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(READS, thread_name_prefix="read-ahead")

    @cached_property
    def _filesystem(self) -> Any:
        return filesystem_of(self.folder)[0]

    @cached_property
    def _root(self) -> str:
        return filesystem_of(self.folder)[1]

    @cached_property
    def _store(self) -> Any:
        try:
            return store_of(self.folder)
        except Exception as error:  # obstore's or botocore's, such as a profile that is not there
            text = redact(" ".join(str(error).split()))[:300]
            _log.warning("%s: objects take two requests each: %s", self.folder, text)
            return None


_process: dict[str, int] = {}
"""The first to use obstore, which would wait forever in its forks."""


def store_of(uri: str) -> Any:
    """obstore's client of a bucket, with the endpoint and the credentials that the environment names."""
    from obstore.store import from_url

    if _process.setdefault("id", os.getpid()) != os.getpid():
        raise OSError(
            "this process was forked from one that has used obstore, whose threads are gone"
        )
    scheme, _, rest = uri.partition("://")
    options: dict[str, Any] = {}
    if scheme == "s3":
        options = _of_s3()
    elif scheme == "gs" and (base := gcs_emulator()):
        options = {"base_url": base, "skip_signature": True}
    elif scheme == "az" and (base := azure_endpoint()):
        options = {"endpoint": base}
    http = any(str(value).startswith("http://") for value in options.values())
    bucket = f"{scheme}://{rest.partition('/')[0]}"
    client = CLIENT | {"allow_http": http}
    return from_url(bucket, client_options=client, retry_config=RETRIES, **options)


def _of_s3() -> dict[str, Any]:
    """Credentials of a role change while a job runs: boto3, which most images have, renews them."""
    region, endpoint = region_of_s3(), endpoint_of_s3()
    options: dict[str, Any] = {}
    with contextlib.suppress(ImportError):
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = boto3.Session(region_name=region)
        region = session.region_name
        if session.get_credentials() is None:
            options["skip_signature"] = True  # a public bucket
        else:
            options["credential_provider"] = Boto3CredentialProvider(session, ttl=CREDENTIALS_S)
    if region and region.startswith(CHINA):
        endpoint = endpoint or f"https://s3.{region}.amazonaws.com.cn"
    options["region"] = region or "us-east-1"
    return options | ({"endpoint": endpoint} if endpoint else {})


def content_of(filesystem: Any, path: str) -> bytes:
    with filesystem.open_input_file(path) as file:
        content: bytes = file.readall()
    return content
