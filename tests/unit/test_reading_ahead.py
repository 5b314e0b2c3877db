"""Shards that lie elsewhere are read ahead of their use: the same bytes, or an error, never fewer."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from stoker.data.sources import tar
from stoker.data.sources.tar import CHUNKS_AHEAD, streamed

pytestmark = pytest.mark.unit

CHUNK = 1000
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "CHUNK_BYTES", CHUNK)


class Remote:
    """A file elsewhere; each read of a chunk is a request."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[int] = []
        self.broken = -1
        self.closed = False

    def size(self) -> int:
        return len(self.content)

    def read_at(self, count: int, at: int) -> bytes:
        assert not self.closed
        self.asked.append(at)
        if at == self.broken:
            raise OSError("the connection broke")
        return self.content[at : at + count]


def content_of(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK, 7 * CHUNK + 123])
@pytest.mark.parametrize("step", [1, 512, CHUNK, 3 * CHUNK])
def test_all_bytes_come_once_and_in_order(size: int, step: int, tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(content_of(size))
    sha256 = hashlib.sha256()
    found = b""
    local = fs.LocalFileSystem()
    with (
        local.open_input_file(str(tmp_path / "shard")) as file,
        streamed(file, sha256, ahead=True) as stream,
    ):
        while part := stream.read(step):
            found += part
        assert stream.read(step) == b""
    assert found == content_of(size)
    assert sha256.digest() == hashlib.sha256(found).digest()


def test_the_next_chunks_are_asked_for_while_one_is_used() -> None:
    asked = threading.Semaphore(0)

    class Noting(Remote):
        def read_at(self, count: int, at: int) -> bytes:
            asked.release()
            return super().read_at(count, at)

    file = Noting(content_of(9 * CHUNK))
    with streamed(file, ahead=True) as stream:
        stream.read(1)
        for _ in range(1 + CHUNKS_AHEAD):
            assert asked.acquire(timeout=WAIT_S)
    assert sorted(file.asked) == [n * CHUNK for n in range(1 + CHUNKS_AHEAD)], "no more than that"


@pytest.mark.parametrize("where", [0, 1, 4])
def test_a_read_that_fails_is_an_error_however_often_it_is_tried(where: int) -> None:
    file = Remote(content_of(5 * CHUNK))
    file.broken = where * CHUNK
    with streamed(file, ahead=True) as stream:
        assert stream.read(where * CHUNK) == file.content[: where * CHUNK]
        for _ in range(3):
            with pytest.raises(OSError, match="the connection broke"):
                stream.read(CHUNK)


def test_an_answer_that_is_cut_short_is_an_error_and_not_the_end() -> None:
    class Cut(Remote):
        def read_at(self, count: int, at: int) -> bytes:
            return super().read_at(count - 100 if at == 2 * CHUNK else count, at)

    with streamed(Cut(content_of(5 * CHUNK)), ahead=True) as stream:
        stream.read(2 * CHUNK)
        with pytest.raises(OSError, match="900 of 1000 bytes came from byte 2000 on"):
            stream.read(CHUNK)


def test_the_file_is_closed_after_what_is_being_read() -> None:
    """A shard of which nothing more is wanted is let go while a request for it is under way."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Remote):
        def read_at(self, count: int, at: int) -> Any:
            if at:
                begun.set()
                assert go_on.wait(WAIT_S)
            return super().read_at(count, at)

    file = Slow(content_of(5 * CHUNK))
    stream = streamed(file, ahead=True)
    stream.read(1)
    assert begun.wait(WAIT_S)

    def close() -> None:
        stream.close()
        file.closed = True

    closing = threading.Thread(target=close)
    closing.start()
    assert not file.closed
    go_on.set()
    closing.join(WAIT_S)
    assert file.closed
