"""Files of an object store are fetched ahead: each once, in order, whole or by another way, never in part."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from spoilt import images

from stoker.data import BadRecord, read_images
from stoker.read.far_files import AHEAD_BYTES, MOST_FAILURES, READS, FarFiles, store_of

pytestmark = pytest.mark.unit

WAIT_S = 30.0


class Bucket(BaseHTTPRequestHandler):
    """Every object holds its own key; `answer(self, key)` of a subclass may answer otherwise."""

    protocol_version = "HTTP/1.1"
    answer: Callable[[Any, str], bool]

    def do_GET(self) -> None:
        key = unquote(self.path).removeprefix("/bucket/")
        if not self.answer(key):
            self.send(key.encode())

    do_HEAD = do_GET  # noqa: N815

    @property
    def by_pyarrow(self) -> bool:
        return "aws-sdk-cpp" in self.headers["User-Agent"]

    def send(self, content: bytes, status: int = 200, length: int | None = -1) -> bool:
        self.send_response(status)
        for name, value in (("ETag", '"0"'), ("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")):
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(len(content) if length < 0 else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.close_connection = length is None or length > len(content)
        return True

    def log_message(self, *arguments: object) -> None:
        pass


Serve = Callable[[Callable[[Any, str], bool]], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a bucket that answers as told; the environment names it."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[Any, str], bool]) -> None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Bucket,), {"answer": answer}))
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "known")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


KEYS = ["a/b.jpg", "a b+c&d=e/ä~(1)'.jpg", "100%.jpg", "a%20b.jpg", "..a/.b.jpg"]


def test_each_key_gives_its_own_object(serve: Serve) -> None:
    serve(lambda request, key: False)
    files = FarFiles("s3://bucket")
    assert list(files.read(KEYS)) == [key.encode() for key in KEYS]
    unreadable = ["x//y.jpg", "./a.jpg", "b/../a.jpg"]
    assert [type(content) for content in files.read(unreadable)] == [BadRecord] * 3


def cut_off(request: Any) -> bool:
    request.connection.shutdown(socket.SHUT_RDWR)
    return True


SPOILT: dict[str, Callable[[Any], bool]] = {
    "half": lambda request: request.send(b"half", length=8),
    "no length": lambda request: request.send(b"perhaps half", length=None),
    **{str(n): lambda request, n=n: request.send(b"<Error/>", status=n) for n in (503, 404, 301)},
    "cut off": cut_off,
}


@pytest.mark.parametrize("spoilt", SPOILT.values(), ids=SPOILT)
def test_only_whole_objects_are_used(spoilt: Callable[[Any], bool], serve: Serve) -> None:
    """obstore gets a spoilt answer to its first or to every request; pyarrow a right one."""
    asked: Counter[str] = Counter()

    def answer(request: Any, key: str) -> bool:
        asked[key] += 1
        right = request.by_pyarrow or key == "right" or (key == "once" and asked[key] > 1)
        return False if right else spoilt(request)

    serve(answer)
    keys = ["right", "once", "always", "right"]
    assert list(FarFiles("s3://bucket").read(keys)) == [key.encode() for key in keys]


def test_requests_that_are_always_refused_are_given_up_and_said_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    refused: list[str] = []

    def answer(request: Any, key: str) -> bool:
        if request.by_pyarrow:
            return False
        refused.append(key)
        return bool(request.send(b"<Error/>", status=403))

    serve(answer)
    keys = [str(number) for number in range(200)]
    files = FarFiles("s3://bucket")
    assert list(files.read(keys)) == [key.encode() for key in keys]
    assert len(refused) <= MOST_FAILURES + READS
    [line] = [line for line in caplog.messages if "two requests" in line]
    assert "s3://bucket" in line and "403" in line


def test_the_credentials_of_a_hosts_role_are_used(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def answer(request: Any, key: str) -> bool:
        if key == "/role":
            expires = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
            names = ("AccessKeyId", "SecretAccessKey", "Token")
            role = dict.fromkeys(names, "of-the-role") | {"Expiration": expires}
            return bool(request.send(json.dumps(role).encode()))
        headers = request.headers
        seen.append((headers["Authorization"], headers["X-Amz-Security-Token"]))
        return False

    serve(answer)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    endpoint = store_of("s3://bucket").config["endpoint"]
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{endpoint}/role")
    assert list(FarFiles("s3://bucket").read(["a"])) == [b"a"]
    [(authorization, token)] = seen
    assert "Credential=of-the-role/" in authorization and token == "of-the-role"


FORKS = """
import os
from stoker.read.far_files import FarFiles
assert list(FarFiles("s3://bucket").read(["a"])) == [b"a"]
if (child := os.fork()) == 0:
    os._exit(list(FarFiles("s3://bucket").read(["b"])) != [b"b"])
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_of_a_reader_reads(serve: Serve) -> None:
    serve(lambda request, key: False)
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "forked" in done.stderr, "by pyarrow"


REGIONS = {"eu-west-1": None, "cn-north-1": "https://s3.cn-north-1.amazonaws.com.cn"}


@pytest.mark.parametrize("region", REGIONS)
def test_a_bucket_is_asked_for_in_its_region(region: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", region)
    config = store_of("s3://bucket").config
    assert (config["region"], config.get("endpoint")) == (region, REGIONS[region])


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
    return [content.decode().strip() for content in files.read(those)]  # type: ignore[union-attr]


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


def test_images_far_away_are_those_of_local_files(tmp_path: Path) -> None:
    names = [f"train/{label}/{number}.jpg" for label in ("cat", "dog") for number in range(40)]
    images(*((name, name.encode()) for name in names), classes="")(tmp_path)
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


def test_a_profile_that_is_not_there_is_left_to_pyarrow(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(lambda request, key: not request.by_pyarrow and bool(request.send(b"wrong")))
    monkeypatch.setenv("AWS_PROFILE", "missing")
    assert list(FarFiles("s3://bucket").read(["a"])) == [b"a"]
