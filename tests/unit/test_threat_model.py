"""What docs/security.md says of strangers on the network and of files that want to run code."""

from __future__ import annotations

import base64
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damage import Attack
from pyarrow import parquet

from stoker.data import read_parquet
from stoker.errors import UsageError
from stoker.serve.blocks import wire
from stoker.serve.blocks.folder import BlockFolder, BlockServer

SECRET = b"s" * 32
FOLDER = BlockFolder("test", "far")


def block_server() -> BlockServer:
    return BlockServer("127.0.0.1", SECRET, FOLDER)


def connect(server: BlockServer, timeout_s: float = 20) -> socket.socket:
    return socket.create_connection(server._socket.getsockname(), timeout=timeout_s)


def test_a_server_listens_on_the_address_of_its_host_alone() -> None:
    server = block_server()
    port = server._socket.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    server._socket.close()


def test_a_handshake_ends_however_slowly_the_other_side_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.serve.blocks.wire.GREETING_TIMEOUT_S", 0.3)
    server, over = block_server(), threading.Event()
    with connect(server, 5) as silent, connect(server, 5) as slow:

        def drip() -> None:
            while not over.wait(0.1):
                try:
                    slow.sendall(b"x")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            for connection in (silent, slow):
                assert ended(connection)
        finally:
            over.set()
            thread.join()
    server._socket.close()


def ended(connection: socket.socket) -> bool:
    """Whether the server hangs up, after its nonce."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_handshakes_at_the_same_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.serve.blocks.wire.MOST_GREETINGS", 2)
    server = block_server()
    with connect(server) as first, connect(server) as second, connect(server, 0.3) as third:
        assert first.recv(1) and second.recv(1)
        with pytest.raises(TimeoutError):
            third.recv(1)
        first.close()
        third.settimeout(20)
        assert third.recv(1)
    server._socket.close()


def test_a_request_that_announces_more_than_a_megabyte_is_not_waited_for() -> None:
    server = block_server()
    with connect(server) as connection:
        wire.greet_server(connection, wire.run_key(SECRET))
        connection.settimeout(20)
        connection.sendall(struct.pack(">I", 2**20 + 1))
        assert ended(connection)
    server.close()


def test_a_recorded_or_reflecting_block_server_is_not_believed() -> None:
    server = block_server()
    key = wire.run_key(SECRET)
    ours, theirs = socket.socketpair()
    with connect(server) as host, ours:
        thread = threading.Thread(target=wire.greet_server, args=(theirs, key))
        thread.start()
        nonce = wire.receive(host, wire.NONCE_BYTES)
        ours.sendall(nonce)
        host.sendall(wire.receive(ours, wire.NONCE_BYTES + wire.PROOF_BYTES))
        proof = wire.receive(host, wire.PROOF_BYTES)
        ours.sendall(proof)
        thread.join(20)
    server.close()
    for answer in (lambda hello: proof, lambda hello: hello[-wire.PROOF_BYTES :]):
        assert "the server does not hold the key" in refused_by_a_worker(key, nonce, answer)


def refused_by_a_worker(key: bytes, nonce: bytes, answer: Callable[[bytes], bytes]) -> str:
    """What a train worker says of a server with this nonce and proof."""
    worker, fake = socket.socketpair()
    found: list[str] = []

    def greet() -> None:
        try:
            wire.greet_server(worker, key)
        except wire.WireError as error:
            found.append(str(error))

    thread = threading.Thread(target=greet)
    thread.start()
    with worker, fake:
        fake.sendall(nonce)
        fake.sendall(answer(wire.receive(fake, wire.NONCE_BYTES + wire.PROOF_BYTES)))
        thread.join(20)
    return "".join(found)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", ["arrow.py_extension_type", "ray.data.arrow_pickled_object"])
def test_an_extension_type_of_a_parquet_file_runs_nothing(
    name: str, loaded: bool, nested: bool, tmp_path: Path
) -> None:
    """Also where Ray's own classes are known, as in every chain worker."""
    if loaded:
        import ray.data  # noqa: F401
    mark = tmp_path / "executed"
    code = pickle.dumps(Attack(mark))
    forged = {b"ARROW:extension:name": name.encode(), b"ARROW:extension:metadata": code}
    field = pa.field("x", pa.large_binary(), metadata=forged)
    values = pa.array([code, code], pa.large_binary())
    if nested:
        field = pa.field("x", pa.list_(field.with_name("item")))
        values = pa.array([[code], [code]], pa.list_(pa.large_binary()))
    data = tmp_path / "data"
    data.mkdir()
    parquet.write_table(
        pa.table([values.cast(field.type)], schema=pa.schema([field])), data / "train.parquet"
    )
    stored = parquet.read_metadata(data / "train.parquet").metadata[b"ARROW:schema"]
    assert name.encode() in base64.b64decode(stored)
    source = read_parquet(str(data), "train")
    assert source is not None
    source.check()
    found: list[Any] = []
    try:
        for shard in source.shards(100, None):
            found += source.for_workers().read(shard, None)
    except UsageError as error:
        assert f"column x is of the type {name}, whose values could run code" in str(error)
    assert not mark.exists()
    assert bool(found) == (name == "arrow.py_extension_type"), "bytes where nothing gives them a meaning"


def test_tensors_of_ray_data_are_read(tmp_path: Path) -> None:
    from ray.data.extensions import ArrowTensorArray

    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    parquet.write_table(pa.table({"x": ArrowTensorArray.from_numpy(images)}), tmp_path / "train.parquet")
    source = read_parquet(str(tmp_path), "train")
    assert source is not None
    source.check()
    [shard] = source.shards(100, None)
    found = [record["x"] for record in source.for_workers().read(shard, None)]  # type: ignore[union-attr]
    assert np.array_equal(np.stack(found), images)
