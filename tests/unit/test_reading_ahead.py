"""Shards that lie elsewhere are read ahead of their use: the same bytes, or an error, never fewer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import tar_of
from pyarrow import fs

from stoker.protocol import Shard
from stoker.read import tar, webdataset
from stoker.read.tar import CHUNKS_AHEAD, CHUNKS_PREPARED, Ahead, streamed

pytestmark = pytest.mark.unit

CHUNK = 1000
WAIT_S = 30.0


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


def test_the_next_chunks_are_asked_for_while_one_is_used() -> None:
    asked = threading.Semaphore(0)
    file = Remote(content_of(9 * CHUNK), lambda at: asked.release())
    with Ahead(file) as ahead, streamed(ahead) as stream:
        stream.read(1)
        for _ in range(1 + CHUNKS_AHEAD):
            assert asked.acquire(timeout=WAIT_S)
    assert sorted(file.asked) == [n * CHUNK for n in range(1 + CHUNKS_AHEAD)], "no more than that"


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
