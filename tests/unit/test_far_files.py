"""Files of an object store are fetched ahead: each once, in order, whole or by another way, never in part."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stoker.data import read_images
from stoker.protocol import BadRecord
from stoker.read import far_files
from stoker.read.far_files import AHEAD_BYTES, READS, Credentials, FarFiles, Objects, objects_of

pytestmark = pytest.mark.unit

WAIT_S = 30.0
KNOWN = Credentials("AKIDEXAMPLE", "secret/+=", None)


@contextmanager
def store(answer: Any) -> Iterator[str]:
    """A server that answers a GET by `answer(handler, key)`; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self, self.path.removeprefix("/bucket/"))

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/bucket"
    finally:
        server.shutdown()
        server.server_close()


def send(handler: Any, content: bytes, status: int = 200, length: int | None = -1) -> None:
    handler.send_response(status)
    if length is not None:
        handler.send_header("Content-Length", str(len(content) if length < 0 else length))
    handler.end_headers()
    handler.wfile.write(content)
    handler.close_connection = length is None or length > len(content)


@pytest.mark.parametrize("key", ["a/b.jpg", "a b+c&d=e/ä~(1)'.jpg", "//x", "100%.jpg"])
@pytest.mark.parametrize("token", [None, "session/token=="])
@pytest.mark.parametrize(
    "host", ["https://bucket.s3.eu-west-1.amazonaws.com", "http://127.0.0.1:9000/bucket"]
)
def test_requests_are_signed_as_by_aws_own_client(key: str, token: str | None, host: str) -> None:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials as Theirs

    known = Credentials("AKIDEXAMPLE", "secret/+=", token)
    objects = Objects(host, "eu-west-1", lambda: known)
    headers = objects.signed(target := objects.target(key))
    request = AWSRequest("GET", host.removesuffix("/bucket") + target)
    request.context |= {"payload_signing_enabled": False, "timestamp": headers["x-amz-date"]}
    theirs = S3SigV4Auth(Theirs(*known), "s3", "eu-west-1")
    request.headers["X-Amz-Date"] = headers["x-amz-date"]
    request.headers["X-Amz-Content-SHA256"] = headers["x-amz-content-sha256"]
    if token:
        request.headers["X-Amz-Security-Token"] = token
    text = theirs.string_to_sign(request, theirs.canonical_request(request))
    assert headers["authorization"].endswith(f"Signature={theirs.signature(text, request)}")


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler: send(handler, b"half", length=8),
        lambda handler: send(handler, b"perhaps half", length=None),
        lambda handler: send(handler, b"<Error/>", status=503),
        lambda handler: send(handler, b"<Error/>", status=404),
        lambda handler: send(handler, b"<Error/>", status=301),
        lambda handler: send(handler, b"part", status=206),
        lambda handler: handler.connection.shutdown(socket.SHUT_RDWR),
    ],
)
def test_anything_but_a_whole_object_is_left_to_pyarrow(answer: Any) -> None:
    def by_key(handler: Any, key: str) -> None:
        send(handler, b"whole") if key == "right" else answer(handler)

    with store(by_key) as address:
        objects = Objects(address, "us-east-1", lambda: KNOWN)
        assert objects.read("right") == b"whole"
        assert objects.read("wrong") is None
        assert objects.read("right") == b"whole"


def test_a_connection_that_was_idle_too_long_is_opened_again() -> None:
    asked: list[str] = []

    def once_per_connection(handler: Any, key: str) -> None:
        asked.append(key)
        send(handler, key.encode())
        handler.close_connection = True  # without saying so

    with store(once_per_connection) as address:
        objects = Objects(address, "us-east-1", lambda: KNOWN)
        assert [objects.read(str(n)) for n in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    assert asked == ["0", "1", "2", "3", "4"]


def test_a_way_that_never_does_is_given_up_for_a_while_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(handler: Any, key: str) -> None:
        asked.append(key)
        send(handler, b"<Error/>", status=403)

    with store(refuse) as address:
        objects = Objects(address, "us-east-1", lambda: KNOWN)
        assert [objects.read("key") for _ in range(50)] == [None] * 50
        assert len(asked) == far_files.MOST_FAILURES
        monkeypatch.setattr(far_files.time, "monotonic", lambda: float("inf"))
        assert objects.read("key") is None and len(asked) == far_files.MOST_FAILURES + 1
    [line] = caplog.messages
    assert address in line and "403" in line


def test_refusals_for_a_moment_never_end_the_short_way() -> None:
    left = 3 * far_files.MOST_FAILURES

    def throttle(handler: Any, key: str) -> None:
        nonlocal left
        left -= 1
        send(handler, b"<Error/>", 503) if left >= 0 else send(handler, b"whole")

    with store(throttle) as address:
        objects = Objects(address, "us-east-1", lambda: KNOWN)
        assert all(objects.read("key") is None for _ in range(left))
        assert objects.read("key") == b"whole"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"AWS_REGION": "eu-west-1"}, "bucket.s3.eu-west-1.amazonaws.com"),
        ({"AWS_REGION": "cn-north-1"}, "bucket.s3.cn-north-1.amazonaws.com.cn"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}, "127.0.0.1:9000"),
        ({"AWS_REGION": "us-iso-east-1"}, None),
        ({"AWS_REGION": "eu-west-1", "HTTPS_PROXY": "http://proxy:3128"}, None),
        ({"AWS_REGION": "eu-west-1", "AWS_ACCESS_KEY_ID": ""}, None),
    ],
)
def test_where_a_bucket_is(
    variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_PROFILE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "https_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    nowhere = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), "/dev/null")
    keys = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in (nowhere | keys | variables).items():
        monkeypatch.setenv(name, value)
    found = objects_of("bucket")
    assert (found.signed("/")["host"] if found else None) == expected


class Files(FarFiles):
    """Contents are paths; the files of `held` come only after `go_on`."""

    def __init__(self, held: tuple[str, ...] = (), size: int = 10) -> None:
        super().__init__("s3://bucket/data")
        self.asked: Counter[str] = Counter()
        self.held, self.go_on = held, threading.Event()
        self.begun = threading.Semaphore(0)
        self.size = size

    def _content(self, path: str) -> bytes:
        self.asked[path] += 1
        self.begun.release()
        assert path not in self.held or self.go_on.wait(WAIT_S)
        if path.startswith("broken"):
            raise FileNotFoundError(path)
        return path.encode().ljust(self.size)


def paths(first: int, count: int = 100) -> list[str]:
    return [f"{number}.jpg" for number in range(first, first + count)]


def read(files: Files, those: list[str]) -> list[str]:
    return [
        content.decode().strip() if isinstance(content, bytes) else content.key
        for content in files.read(those)
    ]


def test_shards_come_in_order_and_each_file_is_asked_for_once() -> None:
    files = Files()
    for first in range(0, 500, 100):
        files.expect(paths(first))
        files.expect(paths(first + 100))
        assert read(files, paths(first)) == paths(first)
    assert set(files.asked.values()) == {1}


def test_the_next_shard_is_fetched_while_the_last_files_of_one_come() -> None:
    files = Files(held=(*paths(2),))
    files.expect(paths(0, 2))
    files.expect(paths(2))
    assert read(files, paths(0, 2)) == paths(0, 2)
    for _ in range(2 + READS):
        assert files.begun.acquire(timeout=WAIT_S)
    assert files.asked == Counter(paths(0, 2 + READS)), "no more than that"
    files.go_on.set()
    assert read(files, paths(2)) == paths(2)
    assert set(files.asked.values()) == {1}


def test_a_shard_that_was_expected_in_vain_is_let_go() -> None:
    files = Files()
    files.expect(paths(0))
    assert read(files, paths(1000, 40)) == paths(1000, 40)
    assert files.asked.total() <= READS + 40
    assert read(files, paths(50)) == paths(50)


def test_large_files_are_few_at_a_time() -> None:
    size = AHEAD_BYTES // 2
    files = Files(size=size)
    reader = files.read(paths(0, 20))
    for number in range(10):
        assert len(next(reader)) == size
        assert files.asked.total() <= number + 1 + 4
    reader.close()


def test_a_file_that_is_gone_is_a_bad_record_in_its_place() -> None:
    found = list(Files().read(["0.jpg", "broken.jpg", "1.jpg"]))
    assert [type(content) for content in found] == [bytes, BadRecord, bytes]


def test_images_far_away_are_those_of_local_files(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label in ("cat", "dog"):
        for number in range(40):
            (tmp_path / "train" / label).mkdir(parents=True, exist_ok=True)
            (tmp_path / "train" / label / f"{number}.jpg").write_bytes(f"{label} {number}".encode())
    source = read_images(str(tmp_path), "train")
    assert source is not None and not source.far
    near = [record for shard in source.shards(7, None) for record in source.read(shard, None)]
    source.far = True
    shards = source.shards(7, None)
    far = []
    for number, shard in enumerate(shards):
        for each in shards[number : number + 2]:
            source.prepare(each)
        far += source.read(shard, None)
    assert far == near


def test_what_botocore_refuses_is_left_to_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "missing")
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    assert FarFiles("s3://bucket/data")._objects is None
