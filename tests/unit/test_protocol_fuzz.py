"""Frames that nobody may send: no answer without the key, no crash, no thread or memory left behind.

`make soak` sends a million of them; set STOKER_FRAMES for another number.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from stoker.serve.blocks import wire
from stoker.serve.blocks.folder import BlockFolder, BlockServer
from tests.waiting import until

FRAMES = int(os.environ.get("STOKER_FRAMES", "2000"))
SECRET, TOKEN = b"s" * 32, "the job's token"
MOST_MB = 64
"""More memory than this after all frames is a leak."""


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    threads, before = threading.active_count(), psutil.Process().memory_info().rss
    yield
    until(lambda: threading.active_count() <= threads)
    assert psutil.Process().memory_info().rss - before < MOST_MB * 2**20


def mutated(frame: bytes, chance: random.Random) -> bytes:
    """A frame with bits flipped, parts repeated, cut off or replaced; never the frame itself."""
    content = bytearray(frame)
    while bytes(content) == frame:
        for _ in range(chance.choice((1, 1, 1, 4, 16))):
            at = chance.randrange(len(content) + 1)
            match chance.randrange(5):
                case 0 if at < len(content):
                    content[at] ^= 1 << chance.randrange(8)
                case 1:
                    content[at:at] = chance.randbytes(chance.randrange(1, 40))
                case 2:
                    del content[at:]
                case 3:
                    content[at:at] = content[: chance.randrange(len(content) + 1)]
                case _:
                    content[at : at + 4] = chance.choice(
                        (b"\xff" * 4, b"\0" * 4, b"[[[[", b'""""', b"-1e9")
                    )
    return bytes(content)


def answers(port: int, frame: bytes, greet: Callable[[socket.socket], Any]) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        greet(connection)
        connection.settimeout(20)
        found = b""
        with contextlib.suppress(OSError):  # the server hung up
            connection.sendall(frame)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                found += part
        return found


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    found = BlockFolder("test", "far")
    found.roots = [tmp_path]
    return found


def add(folder: BlockFolder) -> str:
    return folder.write({"x": np.arange(4)})


def hello(nonce: bytes) -> bytes:
    ours = b"o" * wire.NONCE_BYTES
    return ours + wire._proof(wire.run_key(SECRET), b"train worker", nonce, ours)


@pytest.mark.long
def test_a_block_server_answers_no_greeting_but_the_right_one(
    leaves_nothing: None, folder: BlockFolder
) -> None:
    server, chance = BlockServer("127.0.0.1", SECRET, folder), random.Random(3)
    for _ in range(FRAMES):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            nonce = wire.receive(connection, wire.NONCE_BYTES)
            frame = mutated(hello(nonce), chance)
            if frame.startswith(hello(nonce)):
                continue  # a right greeting and what follows it
            with contextlib.suppress(OSError):  # the server hung up
                connection.sendall(frame)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""
    # The proof of another connection, word for word.
    replay = hello(nonce)
    assert answers(server.port, replay, lambda c: wire.receive(c, wire.NONCE_BYTES)) == b""
    assert fetched(server, add(folder)) == [0, 1, 2, 3]
    server.close()


def fetched(server: BlockServer, block: str) -> list[int]:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        wire.greet_server(connection, wire.run_key(SECRET))
        wire.send_message(connection, {"take": [block, 0, 4], "done": []})
        assert wire.receive_message(connection)["rows"] == 4
        return np.frombuffer(wire.receive(connection, 32), np.int64).tolist()


@pytest.mark.long
def test_a_block_server_survives_requests_that_are_none(
    leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, folder: BlockFolder
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    server, chance = BlockServer("127.0.0.1", SECRET, folder), random.Random(4)
    (folder.roots[0].parent / "secret").write_text("of another folder")
    content = json.dumps({"take": ["0" * 24, 0, 4], "done": ["1" * 24, "2" * 24]}).encode()
    frame = struct.pack(">I", len(content)) + content
    deep = b"[" * 100_000
    frames = [struct.pack(">I", len(deep)) + deep, struct.pack(">I", 2**32 - 1), *wrong_requests()]
    frames += [mutated(frame, chance) for _ in range(FRAMES // 4)]
    for each in frames:
        answers(server.port, each, lambda c: wire.greet_server(c, wire.run_key(SECRET)))
    assert not failed, failed[0]
    assert (folder.roots[0].parent / "secret").exists(), "no name leads out of the folder"
    assert fetched(server, add(folder)) == [0, 1, 2, 3]
    server.close()


def wrong_requests() -> Iterator[bytes]:
    for take in (
        1,
        [],
        ["b"],
        ["b", 0],
        ["b", "0", 4],
        ["b", -1, 4],
        ["b", 4, 0],
        ["b", 0.5, 4],
        [1, 0, 4],
        ["../secret", 0, 4],
        {},
    ):
        yield from packed({"take": take})
    for done in (1, {}, [1], [["b"]], "b", ["../secret"]):
        yield from packed({"done": done})


def packed(message: Any) -> Iterator[bytes]:
    content = json.dumps(message).encode()
    yield struct.pack(">I", len(content)) + content
