"""Files of object stores: read ahead, each byte once, in order, or an error; checkpoints appear whole."""

from __future__ import annotations

import contextlib
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
from damage import checked, read_all, tar_of
from pyarrow import fs
from spoilt import images

from stoker.data import BadRecord, read_any, read_images
from stoker.errors import UsageError
from stoker.protocol import Shard
from stoker.read import tar, webdataset
from stoker.read.far_files import AHEAD_BYTES, READS, FarFiles, store_of
from stoker.read.tar import CHUNKS_PREPARED, Ahead, streamed
from stoker.storage.checkpoint_store import MANIFEST, Manifest, open_store, verify
from stoker.storage.filesystems import child_folders, common_folder, filesystem_of, list_files
from tests.fakes import azure, google_cloud

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
    """Of each object but the first, a spoilt answer comes to the first or to every request."""
    asked: Counter[str] = Counter()

    def answer(request: Any, key: str) -> bool:
        asked[key] += 1
        right = key == "right" or (key == "once" and asked[key] > 1)
        return False if right else spoilt(request)

    serve(answer)
    found = list(FarFiles("s3://bucket").read(["right", "once", "always", "right"]))
    assert (found[0], found[1], found[3]) == (b"right", b"once", b"right")
    assert isinstance(found[2], BadRecord) and "cannot be read" in found[2].reason


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
        return path.encode().ljust(self.size)


def paths(first: int, count: int = 100) -> list[str]:
    return [f"{number}.jpg" for number in range(first, first + count)]


def read(files: Files, those: list[str]) -> list[str]:
    return [content.decode().strip() for content in files.read(those)]  # type: ignore[union-attr]


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


CHUNK = 1000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "CHUNK_BYTES", CHUNK)


class Remote:
    """A file elsewhere; `before` is called with the place of each request, and may fail it."""

    def __init__(self, content: bytes, before: Callable[[int], object] = lambda at: None) -> None:
        self.content, self.before = content, before
        self.asked: list[int] = []
        self.short = -1
        self.closed = False

    def size(self) -> int:
        return len(self.content)

    def read_at(self, count: int, at: int) -> bytes:
        assert not self.closed
        self.asked.append(at)
        self.before(at)
        return self.content[at : at + count - (100 if at == self.short else 0)]

    def close(self) -> None:
        self.closed = True


def content_of(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK, 7 * CHUNK + 123])
@pytest.mark.parametrize("step", [1, 512, CHUNK, 3 * CHUNK])
def test_all_bytes_come_once_and_in_order(size: int, step: int, tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(content_of(size))
    found = b""
    local = fs.LocalFileSystem()
    with streamed(Ahead(local.open_input_file(str(tmp_path / "shard")))) as stream:
        while part := stream.read(step):
            found += part
        assert stream.read(step) == b""
    assert found == content_of(size)


@pytest.mark.parametrize("where", [0, 1, 4])
def test_a_read_that_fails_is_an_error_however_often_it_is_tried(where: int) -> None:
    def breaks(at: int) -> None:
        if at == where * CHUNK:
            raise OSError("the connection broke")

    file = Remote(content_of(5 * CHUNK), breaks)
    with Ahead(file) as ahead, streamed(ahead) as stream:
        assert stream.read(where * CHUNK) == file.content[: where * CHUNK]
        for _ in range(3):
            with pytest.raises(OSError, match="the connection broke"):
                stream.read(CHUNK)


def test_an_answer_that_is_cut_short_is_an_error_and_not_the_end() -> None:
    remote = Remote(content_of(5 * CHUNK))
    remote.short = 2 * CHUNK
    with Ahead(remote) as file, streamed(file) as stream:
        stream.read(2 * CHUNK)
        with pytest.raises(OSError, match="900 of 1000 bytes came from byte 2000 on"):
            stream.read(CHUNK)


def test_the_file_is_closed_after_what_is_being_read() -> None:
    """A shard of which nothing more is wanted is let go while a request for it is under way."""
    begun, go_on = threading.Event(), threading.Event()

    def waits(at: int) -> None:
        if at:
            begun.set()
            assert go_on.wait(WAIT_S)

    file = Remote(content_of(5 * CHUNK), waits)
    ahead = Ahead(file)
    stream = streamed(ahead)
    stream.read(1)
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    assert not file.closed
    go_on.set()
    closing.join(WAIT_S)
    assert file.closed


class Shards:
    def __init__(self) -> None:
        self.files: dict[str, list[Remote]] = {}
        self.contents = {
            name: tar_of((f"{n:03d}.txt", f"{name} {n}".ljust(900).encode()) for n in range(20))
            for name in ("a.tar", "b.tar")
        }

    def open_input_file(self, path: str) -> Remote:
        name = path.rpartition("/")[2]
        file = Remote(self.contents[name])
        self.files.setdefault(name, []).append(file)
        return file


@pytest.mark.parametrize("prepared", ["bucket/a.tar", "bucket/b.tar", ""])
def test_a_shard_that_is_prepared_is_fetched_once_and_another_is_let_go(
    prepared: str,
) -> None:
    shards = Shards()
    files = [fs.FileInfo(f"bucket/{name}", fs.FileType.File, size=1) for name in ("a.tar", "b.tar")]
    source = webdataset.WebDatasetSource(files, shards)
    if prepared:
        source.prepare(Shard(prepared))
    texts = [record["text"].strip() for record in source.read(Shard("bucket/a.tar"), None)]
    assert texts == [f"a.tar {number}" for number in range(20)]
    assert len(shards.files["a.tar"]) == 1, "opened once, prepared or not"
    (read,) = shards.files["a.tar"]
    assert sorted(read.asked) == sorted(set(read.asked)), "no chunk twice"
    assert all(file.closed for files in shards.files.values() for file in files)
    if prepared == "bucket/b.tar":
        assert len(shards.files["b.tar"][0].asked) <= CHUNKS_PREPARED


@pytest.fixture(scope="module", params=["gs", "az"])
def root(request: pytest.FixtureRequest, digits: Path) -> Iterator[str]:
    """The digits as tar shards, Parquet and images, uploaded as any tool does: objects, no folders."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if request.param == "gs":
            environment = stack.enter_context(google_cloud.cloud_storage())
            root = f"gs://{google_cloud.BUCKET}"
        else:
            environment, _ = stack.enter_context(azure.blob_storage())
            root = f"az://{azure.CONTAINER}"
        for name, value in environment.items():
            patch.setenv(name, value)
        filesystem, at = filesystem_of(root)
        files = [
            path for form in ("webdataset", "parquet") for path in (digits / form).rglob("*.*")
        ]
        images = sorted((digits / "images" / "train").rglob("*.jpg"))
        for path in [*files, *images[:: len(images) // 40]]:
            with filesystem.open_output_stream(f"{at}/{path.relative_to(digits)}") as stream:
                stream.write(path.read_bytes())
        yield root


@pytest.mark.long
@pytest.mark.parametrize("form", ["webdataset", "parquet"])
def test_every_record_comes_once(form: str, root: str) -> None:
    source = checked(read_any(f"{root}/{form}", "val"))
    assert source.fingerprint()
    records = read_all(source)
    assert not any(isinstance(record, BadRecord) for record in records)
    assert len({record["key"] for record in records}) == len(records) == 360


@pytest.mark.long
def test_classes_of_images_are_their_folders(root: str) -> None:
    source = checked(read_any(f"{root}/images", "train"))
    assert source.classes() == [str(digit) for digit in range(10)]
    records = read_all(source, 16)
    assert len(records) == source.count() and not any(isinstance(r, BadRecord) for r in records)


@pytest.mark.long
def test_folders_are_the_beginnings_of_names(root: str) -> None:
    assert child_folders(root) == ["images", "parquet", "webdataset"]
    assert child_folders(f"{root}/webdataset") == ["train", "val"]
    files = list_files(f"{root}/webdataset")
    bucket = root.partition("://")[2]
    assert common_folder(files) == f"{bucket}/webdataset/"
    assert all(file.path.startswith(f"{bucket}/webdataset/") and file.size for file in files)
    with pytest.raises(UsageError, match=f"{root}/nothing: no such file or folder"):
        list_files(f"{root}/nothing")


@pytest.mark.long
def test_checkpoints_appear_whole_and_damage_is_found(root: str, tmp_path: Path) -> None:
    store = open_store(f"{root}/job/checkpoints")
    assert store.names() == []
    for step in (5, 12):
        draft = store.draft()
        (draft / "model.safetensors").write_bytes(bytes([step]) * 100)
        (draft / MANIFEST).write_text(Manifest.of(draft, {}).text())
        store.publish(draft, f"step-{step:08d}")
    assert store.names() == ["step-00000012", "step-00000005"]
    assert [verify(store, name) for name in store.names()] == [None, None]
    with store.local("step-00000012") as folder:
        assert (folder / "model.safetensors").read_bytes() == bytes([12]) * 100
    filesystem, at = filesystem_of(root)
    with filesystem.open_output_stream(
        f"{at}/job/checkpoints/step-00000012/model.safetensors"
    ) as stream:
        stream.write(b"other")
    assert "damaged" in str(verify(store, "step-00000012"))
    store.remove("step-00000012")
    assert store.names() == ["step-00000005"]
