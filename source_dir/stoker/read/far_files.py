"""Chain worker: whole files of an object store, each requested before it is needed.

An object of 100 kB takes 30 ms to come and 3 to arrive. Read one after the other, a process would get 3 MB/s.

From S3 they come by one request each, over connections that stay open. pyarrow asks for an object's size
first: twice the requests, which cost and of which a prefix answers 5,500 a second, and three times the CPU.
Only a whole answer counts here. Anything else (a refusal, a broken connection, no credentials) is left to
pyarrow, with its retries and its words.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from stoker.protocol import BadRecord
from stoker.read.sources import read_again
from stoker.storage.filesystems import endpoint_of_s3, filesystem_of, region_of_s3

_log = logging.getLogger("stoker")
READS = 32
"""Requests in flight, and so connections, of a chain worker; 32 bring 85 MB/s of such objects."""
AHEAD_BYTES = 32 * 2**20
"""About so much is held ready: of larger files, fewer are in flight."""


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
        content = self._objects.read(whole.partition("/")[2]) if self._objects else None
        return content_of(self._filesystem, whole) if content is None else content

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
    def _objects(self) -> Objects | None:
        if not self.folder.startswith("s3://"):
            return None
        try:
            return objects_of(self._root.partition("/")[0])
        except Exception as error:  # of botocore's, such as a profile that is not there
            _log.warning("%s: objects take two requests each: %s", self.folder, str(error)[:200])
            return None


def content_of(filesystem: Any, path: str) -> bytes:
    with filesystem.open_input_file(path) as file:
        content: bytes = file.readall()
    return content


TIMEOUT_S = 20.0
MOST_FAILURES, OFF_S = 8, 60.0
"""After so many refusals or broken connections in a row, pyarrow reads all objects for this time."""
PASSING = (404, 429)
"""Like 5xx, these say nothing about the way of asking."""
REGION = "us-east-1"
"""For servers that have none."""
REGIONS = (
    "us-east-",
    "us-west-",
    "us-gov-",
    "eu-",
    "ap-",
    "ca-",
    "sa-",
    "me-",
    "af-",
    "il-",
    "mx-",
    "cn-",
)
_UNSIGNED = "UNSIGNED-PAYLOAD"


class Credentials(NamedTuple):
    access_key: str
    secret_key: str
    token: str | None


def objects_of(bucket: str) -> Objects | None:
    """Reads from a bucket as the environment says; None if only pyarrow can tell where it is, or for whom."""
    session = None
    with contextlib.suppress(ImportError):  # most images have it
        from botocore.session import Session

        session = Session()
    credentials, region = _credentials(session), region_of_s3()
    region = region or (session.get_config_variable("region") if session else None)
    if endpoint := endpoint_of_s3():
        address = f"{endpoint}/{bucket}"
    elif not region or not region.startswith(REGIONS):
        return None
    else:
        host = f"s3.{region}.amazonaws.com{'.cn' * region.startswith('cn-')}"
        address = f"https://{host}/{bucket}" if "." in bucket else f"https://{bucket}.{host}"
    parts = urlsplit(address)
    proxied = parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")
    if proxied or credentials is None or ":" in bucket:
        return None
    return Objects(address, region or REGION, credentials)


def _credentials(session: Any) -> Callable[[], Any] | None:
    """How to get credentials that are valid now: from the environment, or from where botocore finds some."""
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        known = Credentials(key, secret, os.environ.get("AWS_SESSION_TOKEN"))
        return lambda: known
    found = session.get_credentials() if session else None
    return found.get_frozen_credentials if found else None


class Objects:
    """The objects of a bucket; `read` may be called by several threads, each with a connection of its own."""

    def __init__(self, address: str, region: str, credentials: Callable[[], Any]) -> None:
        parts = urlsplit(address)
        self._open = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._host, self._path = parts.netloc, f"{parts.path.rstrip('/')}/"
        self._address, self._region, self._credentials = address, region, credentials
        self._own = threading.local()
        self._failures, self._off_until = 0, 0.0

    def read(self, key: str) -> bytes | None:
        """The content of an object; None: pyarrow shall read it."""
        if time.monotonic() < self._off_until:
            return None
        try:
            content = self._get(key)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            return None
        if content is not None:
            self._failures = 0
        return content

    def target(self, key: str) -> str:
        return quote(f"{self._path}{key}", safe="/-_.~")

    def _get(self, key: str) -> bytes | None:
        connection, answer = self._answer(self.target(key))
        content: bytes = answer.read()
        # Without a length, the end of the connection would look like the end of the object.
        whole = answer.headers["Content-Length"] == str(len(content))
        if whole and not answer.will_close:
            self._own.connection = connection
        else:
            connection.close()
        if answer.status == 200 and whole:
            return content
        if answer.status in PASSING or answer.status >= 500:
            return None
        raise OSError(f"{answer.status} {answer.reason}, {len(content)} bytes")

    def _answer(self, target: str) -> tuple[Any, Any]:
        connection, self._own.connection = getattr(self._own, "connection", None), None
        if connection is not None:
            try:
                connection.request("GET", target, headers=self.signed(target))
                return connection, connection.getresponse()
            except ConnectionError:  # S3 closes connections that are idle
                connection.close()
        connection = self._open(self._host, timeout=TIMEOUT_S)
        connection.request("GET", target, headers=self.signed(target))
        return connection, connection.getresponse()

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures < MOST_FAILURES:
            return
        self._off_until = time.monotonic() + OFF_S
        if self._failures == MOST_FAILURES:
            _log.warning(
                "%s: objects take two requests each, because one did not do: %s",
                self._address,
                why[:200],
            )

    def signed(self, target: str) -> dict[str, str]:
        """The headers of a GET, signed as AWS's Signature Version 4 says."""
        known = self._credentials()
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": self._host, "x-amz-content-sha256": _UNSIGNED, "x-amz-date": now}
        if known.token:
            headers["x-amz-security-token"] = known.token
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = hashlib.sha256(
            f"GET\n{target}\n\n{lines}\n{names}\n{_UNSIGNED}".encode()
        ).hexdigest()
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        key = _signing_key(known.secret_key, now[:8], self._region)
        signature = _hmac(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{request}").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={known.access_key}/{scope}, SignedHeaders={names},"
            f" Signature={signature}"
        )
        return headers


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


@cache
def _signing_key(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = _hmac(key, part)
    return key
