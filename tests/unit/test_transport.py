"""Blocks over a socket: both ends as they run, with a plain object where Ray's actor handle would be."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from stoker.chain.columns import schema_of
from stoker.messages import BlockSlice, Server
from stoker.serve.blocks import wire
from stoker.serve.blocks.batches import BatchBuilder
from stoker.serve.blocks.buffers import BufferPool
from stoker.serve.blocks.connections import DirectHosts
from stoker.serve.blocks.server import BlockServer

SECRET = b"s" * 32


@dataclass(frozen=True)
class Block:
    """As an object reference is used here."""

    columns: Any

    def hex(self) -> str:
        return f"{id(self):x}"


@dataclass
class Hold:
    """What Ray would bring to the other host's actor: a call of its `hold`."""

    server: BlockServer
    deaf: bool = False

    def remote(self, worker: bytes, blocks: list[Block]) -> None:
        for block in blocks:
            if not self.deaf:
                self.server.hold(worker, block.hex(), block.columns)


@dataclass
class Agent:
    hold: Hold


@dataclass
class Setting:
    server: BlockServer
    hosts: DirectHosts
    notes: list[str] = field(default_factory=list)

    def fetch(self, *parts: tuple[Block, int, int]) -> tuple[dict[str, Any], list[bool]]:
        rows = sum(stop - start for _, start, stop in parts)
        batch = BatchBuilder(BufferPool(pinned=False), rows, schema_of(parts[0][0].columns))
        asked = [
            self.hosts.ask(BlockSlice(block, start, stop, "far", len(block.columns["__id"])))
            for block, start, stop in parts
        ]
        came, at = [], 0
        for request, (_, start, stop) in zip(asked, parts, strict=True):
            came.append(request is not None)
            if request is not None:
                try:
                    request.receive(batch, at)
                except OSError as error:
                    request.failed(error)
                    came[-1] = False
            at += stop - start
        return batch.finish() if all(came) else {}, came


def setting(server_secret: bytes = SECRET, worker_secret: bytes = SECRET, deaf: bool = False) -> Setting:
    server = BlockServer("127.0.0.1", server_secret)
    entry = Server(Agent(Hold(server, deaf)), "127.0.0.1", server.port)
    notes: list[str] = []
    hosts = DirectHosts(lambda: (worker_secret, {"far": entry}), notes.append)
    hosts._own_node = "here"  # what Ray would say
    return Setting(server, hosts, notes)


@pytest.fixture
def far() -> Iterator[Setting]:
    here = setting()
    yield here
    here.server.close()


def block(rows: int, first: int = 0) -> Block:
    ids = np.arange(first, first + rows, dtype=np.int64)
    image = np.repeat(ids.astype(np.uint8), 48).reshape(rows, 4, 4, 3)
    return Block({"__id": ids, "image__hwc": image, "word": np.array([f"w{i}" for i in ids], dtype=object)})


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_of_several_blocks_arrive_as_one_batch(far: Setting) -> None:
    first, second = block(10), block(10, first=10)
    columns, came = far.fetch((first, 7, 10), (second, 0, 5))
    assert came == [True, True]
    assert columns["__id"].tolist() == list(range(7, 15))
    assert columns["image__hwc"].dtype == np.uint8
    assert columns["image__hwc"][:, 3, 3, 2].tolist() == list(range(7, 15))
    assert columns["word"] == [f"w{i}" for i in range(7, 15)]


def test_the_other_host_lets_go_of_blocks_that_are_behind_us_and_of_all_when_we_leave(far: Setting) -> None:
    blocks = [block(8, first=8 * n) for n in range(6)]
    for b in blocks:
        far.fetch((b, 0, 4))
        far.fetch((b, 4, 8))
    assert far.server.held() <= 2
    for connection in far.hosts._links["far"].idle:
        connection.close()
    wait_until(lambda: far.server.held() == 0)


def test_who_does_not_hold_the_key_gets_nothing() -> None:
    here = setting(server_secret=SECRET, worker_secret=b"x" * 32)
    columns, came = here.fetch((block(4), 0, 4))
    assert came == [False] and columns == {}
    assert "block server 127.0.0.1" in here.notes[0] and len(here.notes) == 1
    here.server.close()


def test_a_server_without_the_key_is_not_believed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    here = setting()
    port = listener.getsockname()[1]
    connection = socket.create_connection(("127.0.0.1", port))
    other, _ = listener.accept()
    other.sendall(b"n" * wire.NONCE_BYTES + b"p" * wire.PROOF_BYTES)
    with pytest.raises(wire.WireError, match="does not hold the key"):
        wire.greet_server(connection, wire.run_key(SECRET), b"w" * wire.NONCE_BYTES)
    for each in (listener, connection, other):
        each.close()
    here.server.close()


def test_the_key_depends_on_the_cluster_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "one")
    first = wire.run_key(SECRET)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "two")
    assert wire.run_key(SECRET) != first


def test_a_host_that_went_away_is_told_once_and_avoided(far: Setting) -> None:
    far.fetch((block(4), 0, 4))
    far.server.close()
    link = far.hosts._links["far"]
    link.idle[0].shutdown(socket.SHUT_RDWR)
    for _ in range(3):
        _, came = far.fetch((block(4), 0, 4))
        assert came == [False]
    assert len(far.notes) == 1 and "through Ray" in far.notes[0]
    assert link.avoided_until > time.monotonic()


def test_a_block_that_never_reaches_the_host_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.serve.blocks.server.BLOCK_TIMEOUT_S", 0.1)
    here = setting(deaf=True)
    _, came = here.fetch((block(4), 0, 4))
    assert came == [False] and "did not come here" in here.notes[0]
    here.server.close()


def test_blocks_of_this_host_and_of_unknown_ones_are_left_to_ray(far: Setting) -> None:
    for node in ("here", "unknown", ""):
        assert far.hosts.ask(BlockSlice(block(4), 0, 4, node)) is None


def test_memory_is_used_again_only_when_nobody_holds_a_view_of_it() -> None:
    buffers = BufferPool(pinned=False)
    array = buffers.empty((64, 1000, 3), np.uint8)
    address = array.ctypes.data
    view = array[3:5]
    del array
    other = buffers.empty((64, 1000, 3), np.uint8)
    assert other.ctypes.data != address
    del view
    assert buffers.empty((63, 1000, 3), np.uint8).ctypes.data == address
    before = buffers.allocated_bytes
    for _ in range(100):
        buffers.empty((64, 1000, 3), np.uint8)
    assert buffers.allocated_bytes == before
