"""What docs/security.md says of strangers on the network, and of files that want to run code."""

from __future__ import annotations

import ast
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
import torch
from damage import Attack, checked, read_all
from pyarrow import parquet

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Content
from stoker.data import read_parquet
from stoker.errors import UsageError
from stoker.serve.blocks import wire
from stoker.serve.blocks.folder import BlockFolder, BlockServer
from stoker.storage.checkpoint_store import MANIFEST, Manifest, open_store, verify

SECRET = b"s" * 32
FOLDER = BlockFolder("test", "far")


def block_server() -> BlockServer:
    return BlockServer("127.0.0.1", SECRET, FOLDER)


def connect(server: BlockServer, timeout_s: float = 60) -> socket.socket:
    return socket.create_connection(server._socket.getsockname(), timeout=timeout_s)


def test_a_server_listens_on_the_address_of_its_host_alone() -> None:
    server = block_server()
    port = server._socket.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    server._socket.close()


def test_a_handshake_ends_however_slowly_the_other_side_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker.serve.blocks.wire.GREETING_TIMEOUT_S", 0.3)
    server, over = block_server(), threading.Event()
    with connect(server) as silent, connect(server) as slow:

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
        third.settimeout(60)
        assert third.recv(1)
    server._socket.close()


def test_a_request_that_announces_more_than_a_megabyte_is_not_waited_for() -> None:
    server = block_server()
    with connect(server) as connection:
        wire.greet_server(connection, wire.run_key(SECRET))
        connection.settimeout(60)
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
    source, found = checked(read_parquet(str(data), "train")), []
    try:
        found = read_all(source)
    except UsageError as error:
        assert f"column x is of the type {name}, whose values could run code" in str(error)
    assert not mark.exists()
    assert bool(found) == (name == "arrow.py_extension_type"), (
        "bytes where nothing gives them a meaning"
    )


def test_tensors_of_ray_data_are_read(tmp_path: Path) -> None:
    from ray.data.extensions import ArrowTensorArray

    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    parquet.write_table(
        pa.table({"x": ArrowTensorArray.from_numpy(images)}), tmp_path / "train.parquet"
    )
    found = [record["x"] for record in read_all(read_parquet(str(tmp_path), "train"))]
    assert np.array_equal(np.stack(found), images)


ROOT = Path(__file__).resolve().parents[2]
SAFE_LOADERS = ("UniqueKeys", "yaml.BaseLoader", "yaml.SafeLoader")
ARGUED = {
    "source_dir/stoker/config/values.py": (
        1,
        "YAML, by loaders derived from SafeLoader and BaseLoader",
    ),
    "source_dir/stoker/serve/shards.py": (1, "chains, pickled by the head of this run"),
    "source_dir/stoker/read/host_cache.py": (
        1,
        "records in a folder that only this user may enter",
    ),
    "source_dir/stoker/chain/collating.py": (2, "records and a recipe's name, by this run"),
    "source_dir/stoker/serve/blocks/packing.py": (1, "by chain workers of this script's own job"),
    "source_dir/stoker/train/export.py": (1, "a copy of an object of this very process"),
    "source_dir/stoker/loader/script_state.py": (1, "values of a script's modules, by that script"),
    "source_dir/stoker/chain/probing.py": (1, "of the head of this run"),
    "source_dir/train.py": (1, "the user's own module of that name, from the staged source"),
    "launcher/stoker_launcher/advise/peek/peek_run.py": (
        1,
        "a copy of an object of this very process",
    ),
}
"""Where pickles are read, how often, and why nobody else can have written them."""
READERS = {"pickle", "cloudpickle", "cPickle", "dill", "joblib", "marshal", "shelve"}


def forge(folder: Path, state: Any) -> checkpoint.Checkpoint:
    """A checkpoint whose state an attacker wrote, with a manifest that fits."""
    saved = checkpoint.save(
        open_store(str(folder)), Content({"w": torch.zeros(3)}, {}, {"step": 5, "monitored": None})
    )
    torch.save(state, folder / saved.name / checkpoint.STATE)
    (folder / saved.name / MANIFEST).unlink()
    fitting = Manifest.of(folder / saved.name, saved.meta)
    (folder / saved.name / MANIFEST).write_text(fitting.text())
    assert verify(saved.store, saved.name) is None
    return saved


@pytest.mark.parametrize("where", ["optimizer", "ranks"])
def test_a_forged_state_is_refused_and_nothing_of_it_runs(tmp_path: Path, where: str) -> None:
    mark = tmp_path / "executed"
    saved = forge(tmp_path / "kept", {where: [Attack(mark)]})
    with pytest.raises(OSError, match="could run code") as caught:
        checkpoint.load_checkpoint(saved)
    assert not mark.exists()
    text = str(caught.value)
    assert saved.path in text and "\n" not in text


def test_a_plain_pickle_in_its_place_is_refused_too(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    saved = forge(tmp_path / "kept", {})
    file = Path(saved.path) / checkpoint.STATE
    file.write_bytes(pickle.dumps(Attack(mark)))
    with pytest.raises(OSError, match="could run code"):
        checkpoint.load_checkpoint(saved)
    assert not mark.exists()


def unsafe_reads(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in READERS:
            names = [alias.name for alias in node.names if "load" in alias.name.lower()]
            found += [f"line {node.lineno}: from {node.module} import {name}" for name in names]
        if not isinstance(node, ast.Call):
            continue
        words = ast.unparse(node.func).split(".")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        unsafe = (
            given.get("weights_only") == "False"
            or given.get("allow_pickle", "False") != "False"
            or (words == ["torch", "load"] and given.get("weights_only") != "True")
            or (len(words) > 1 and words[-2] in READERS and words[-1] in ("load", "loads", "open"))
            or (words == ["yaml", "load"] and given.get("Loader") not in SAFE_LOADERS)
            or words in (["eval"], ["exec"], ["yaml", "unsafe_load"], ["yaml", "full_load"])
            or words[-1] == "Unpickler"
        )
        found += [f"line {node.lineno}: {ast.unparse(node)}"] if unsafe else []
    return found


@pytest.mark.long
def test_no_source_file_reads_pickles_but_those_that_are_argued() -> None:
    files = [
        path
        for folder in ("source_dir", "launcher", "benchmarks", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): unsafe_reads(path) for path in files}
    counts = {name: len(calls) for name, calls in found.items() if calls}
    assert counts == {name: count for name, (count, _) in ARGUED.items()}, found


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "trainer.fit(m, weights_only=False)",
        "pickle.loads(b)",
        "ray.cloudpickle.load(f)",
        "from pickle import loads",
        "np.load(f, allow_pickle=True)",
        "yaml.load(t, Loader=yaml.Loader)",
    ],
)
def test_the_scan_sees_what_it_looks_for(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.py").write_text(line)
    assert len(unsafe_reads(tmp_path / "x.py")) == 1
