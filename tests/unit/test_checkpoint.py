"""Checkpoints are whole or passed over; drafts of writers that were killed go."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Content, Retention, Writer
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.storage import checkpoint_store
from stoker.storage.checkpoint_store import (
    MANIFEST,
    CheckpointStore,
    open_store,
    verify,
)
from stoker.storage.filesystems import takes_whole_files
from stoker.train import state as snapshot
from stoker.train import strategies
from stoker.train.state import Worker
from tests.fakes.aws import moto, served
from tests.waiting import until


def save(
    store: CheckpointStore, step: int, value: float | None = None, **meta: Any
) -> checkpoint.Checkpoint:
    monitored = None if value is None else {"metric": "val/loss", "mode": "min", "value": value}
    weights = {"w": torch.full((64,), float(step))}
    about = {"step": step, "epoch": step, "monitored": monitored, **meta}
    return checkpoint.save(store, Content(weights, {"optimizer": {"lr": 0.1}}, about))


@pytest.fixture(params=["folder", "synced"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """A folder, and one that someone copies elsewhere as files appear."""
    return open_store(str(tmp_path / "kept"), synced=request.param == "synced")


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:40 / /mnt/data\\040lake rw shared:9 - fuse.gcsfuse lake rw,user_id=0
41 22 0:41 / /mnt/s3 rw - fuse mountpoint-s3 rw
42 22 0:42 / /mnt/other rw - fuse.sshfs machine:/ rw
44 22 0:44 / /mnt/shared rw - fuse.glusterfs machine:/s3fs rw
43 41 8:1 / /mnt/s3/disk rw - ext4 /dev/sda1 rw
"""


def test_mounted_object_storage_which_renames_no_folder_is_recognised(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    for folder in (
        "/Volumes/a/b/c/runs",
        "/gcs/bucket",
        "/dbfs/x",
        "/mnt/data lake/a",
        "/mnt/s3/a/b",
    ):
        assert takes_whole_files(Path(folder), table), folder
    for folder in ("/mnt/other/a", "/mnt/shared/a", "/mnt/s3/disk/a", "/mnt/s3x", "/home/me"):
        assert not takes_whole_files(Path(folder), table), folder
    assert not takes_whole_files(tmp_path, tmp_path / "absent")


@pytest.mark.parametrize("damage", ["", "flip", "truncate", "remove", "unfinished"])
def test_the_newest_comes_back_whole_and_a_damaged_one_is_passed_over_and_named(
    store: CheckpointStore, damage: str
) -> None:
    save(store, 1)
    save(store, 2, note="replaced")
    newest = Path(store.where) / save(store, 2, note="again").name
    assert {path.name for path in newest.parent.iterdir()} == {*store.names()}, "no draft stays"
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-40])
    elif damage == "remove":
        file.unlink()
    elif damage:
        (newest / MANIFEST).unlink()
    said: list[str] = []
    found = checkpoint.newest_valid(store, said.append)
    assert found is not None
    step = 1 if damage else 2
    assert found.meta["step"] == step and found.meta.get("note", "again") == "again"
    loaded = checkpoint.load_checkpoint(found)
    assert torch.equal(loaded.weights["w"], torch.full((64,), float(step)))
    assert loaded.state["optimizer"] == {"lr": 0.1} and loaded.ema is None
    assert ["skipping checkpoint step-00000002" in text for text in said] == [True] * bool(damage)


def test_in_a_synced_folder_the_manifest_appears_last(tmp_path: Path, monkeypatch: Any) -> None:
    kept = tmp_path / "kept"
    store = open_store(str(kept), synced=True)
    seen: list[list[str]] = []
    whole = type(store.filesystem).open_output_stream  # type: ignore[attr-defined]

    class Watched:
        __class__ = type(store.filesystem)  # type: ignore[attr-defined,assignment]

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def open_output_stream(self, path: str) -> Any:
            seen.append(sorted(p.name for p in kept.rglob("*") if p.is_file()))
            return whole(real, path)

    real = store.filesystem  # type: ignore[attr-defined]
    monkeypatch.setattr(store, "filesystem", Watched())
    save(store, 1)
    assert [MANIFEST in files for files in seen] == [False] * 3
    assert len(seen[-1]) == 2, "all other files stood before the manifest came"


@pytest.mark.parametrize(
    ("newest", "top_k", "values", "best", "left"),
    [
        # Of equals the earlier comes first.
        (2, 2, [0.5, 0.2, None, 0.9, 0.2, 0.7, None], "25", "7652"),
        (2, 0, [1, 2, 3, 4, 5], "", "54"),
        (2, -1, [1, 2, 3, 4, 5], "12345", "54321"),
        (2, 1, [1, 2, 3, 4, 5], "1", "541"),
        (1, 2, [math.nan, 0.5, math.inf, 0.4, math.nan, 0.6], "42", "642"),
    ],
)
def test_the_newest_and_the_best_stay_as_in_lightning(
    store: CheckpointStore, newest: int, top_k: int, values: list[Any], best: str, left: str
) -> None:
    shelf = Retention(store, newest, top_k)
    for step, value in enumerate(values, start=1):
        shelf.add(save(store, step, value))
    assert "".join(name[-1] for name in shelf.best()) == best
    assert "".join(name[-1] for name in store.names()) == left
    if best:
        note = json.loads((Path(store.where) / checkpoint.BEST).read_text())
        assert note["checkpoint"][-1] == best[0] and note["value"] == values[int(best[0]) - 1]


def test_one_write_is_in_flight_and_the_next_waits_and_says_so_once(monkeypatch: Any) -> None:
    monkeypatch.setattr("stoker.checkpoints.format.WORTH_SAYING_S", 0.0)
    said, running, most = list[str](), list[int](), list[int]()
    writer = Writer(said.append)
    waited, wait = threading.Semaphore(0), writer.wait
    monkeypatch.setattr(writer, "wait", lambda **given: (waited.release(), wait(**given)))

    def write() -> None:
        running.append(1)
        most.append(len(running))
        assert waited.acquire(timeout=60)  # so each is still under way when the next one is due
        running.pop()

    for step in range(4):
        writer.make_room()
        writer.submit(f"the checkpoint of step {step}", write)
    writer.wait()
    assert most == [1, 1, 1, 1]
    assert len(said) == 1
    assert "checkpoint.every_steps" in said[0]


def test_a_failed_write_comes_up_at_the_next_look_and_only_then() -> None:
    writer = Writer(print)

    def write() -> None:
        raise OSError("disk /data is full")

    writer.submit("the checkpoint of step 1", write)
    assert writer.thread is not None
    writer.thread.join()
    with pytest.raises(OSError, match="disk /data is full"):
        writer.check()
    writer.wait()


def test_a_write_has_a_deadline(tmp_path: Path) -> None:
    writer, over, turns = Writer(print, str(tmp_path)), threading.Event(), list[int]()
    writer.submit("the checkpoint of step 7", lambda: over.wait() and None)
    writer.submit("the metrics of step 7", lambda: turns.append(1))  # waits for the one before
    text = rf"the metrics of step 7: not written within 0 s: {tmp_path} is stuck or too slow; "
    with pytest.raises(OSError, match=text):
        writer.wait(deadline_s=0.05)
    writer.wait()  # at once: the run ends, and with this cause
    over.set()
    until(lambda: turns)


class SlowUploads:
    """S3 that takes a moment for each part, and counts those on their way."""

    def __init__(self) -> None:
        self.inner, self.on_their_way, self.most = moto(), 0, 0

    def __call__(self, environ: Any, start_response: Any) -> Any:
        part = "partNumber" in environ["QUERY_STRING"]
        self.on_their_way += part
        self.most = max(self.most, self.on_their_way)
        try:
            threading.Event().wait(0.3 if part else 0)
            return self.inner(environ, start_response)
        finally:
            self.on_their_way -= part


def test_an_upload_reads_ahead_of_its_storage_by_little_and_arrives_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the file would wait in memory, and its upload in one call of which nothing can be seen."""
    monkeypatch.setattr(checkpoint_store, "_CHUNK_BYTES", 2**20)
    monkeypatch.setattr(checkpoint_store, "_AHEAD_BYTES", 10 * 2**20)
    slow = SlowUploads()
    with served(slow) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        store = open_store("s3://bucket/kept")
        weights = {"w": torch.arange(10_000_000.0)}  # 4 parts
        saved = checkpoint.save(store, Content(weights, {}, {"step": 1}))
        assert verify(store, saved.name) is None
        assert torch.equal(checkpoint.load_checkpoint(saved).weights["w"], weights["w"])
    assert 1 <= slow.most <= 2


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    device = torch.device("cpu")

    def draw() -> list[float]:
        plain = [random.random(), random.gauss(0, 1)]
        return [*plain, torch.rand(1).item(), np.random.rand(), np.random.randn()]

    draw()
    state = snapshot.rng_state(device)
    path = tmp_path / "state.pt"
    torch.save(state, path)
    expected = [draw() for _ in range(3)]
    snapshot.set_rng_state(torch.load(path, weights_only=True), device)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_with_another_number_of_train_workers_no_key_of_a_trained_record_is_lost(
    workers: int,
) -> None:
    ranks = [
        {"loss_sum": 1.0, "loss_rows": 2, "keys": [f"{rank}a", f"{rank}b"]} for rank in range(2)
    ]
    meta = {"epoch_steps": 1, "epoch_samples": 4, "next_epoch": 0, "global_batch": 4}
    keys = []
    for rank in range(workers):
        worker = Worker(Config(), None, None, 0, rank, workers, torch.device("cpu"))
        carried = snapshot.carried_progress(worker, meta, ranks)
        assert carried is not None
        keys += carried.carried_keys
    assert sorted(keys) == ["0a", "0b", "1a", "1b"]


def test_copies_are_independent_and_their_memory_is_used_again() -> None:
    copier = strategies.Copier()
    channels_last = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    tree = {"w": channels_last, "state": {0: {"step": torch.tensor(3.0), "lr": 0.1}}, "none": None}
    copied = copier.copy(tree)
    channels_last.add_(1)
    assert torch.equal(copied["w"], torch.arange(24.0).reshape(1, 2, 3, 4))
    assert copied["w"].is_contiguous() and copied["state"][0]["lr"] == 0.1
    again = copier.copy(tree)
    assert again["w"].data_ptr() == copied["w"].data_ptr() and torch.equal(again["w"], tree["w"])


def test_the_state_of_a_wrapped_optimiser_is_not_left_out_silently() -> None:
    from timm.optim.lookahead import Lookahead

    model = torch.nn.Linear(2, 1)
    inner = torch.optim.AdamW(model.parameters())
    wrapper = Lookahead(inner)
    assert strategies.full_state(model, wrapper)[1]
    model(torch.ones(1, 2)).sum().backward()
    wrapper.step()
    with pytest.raises(UsageError, match="not contain the state of AdamW, which Lookahead wraps"):
        strategies.full_state(model, wrapper)
    assert strategies.full_state(model, inner)[1]["state"]


WRITER = """
import sys
from pathlib import Path
from stoker.storage.checkpoint_store import open_store
store = open_store(sys.argv[1], synced=bool(sys.argv[2:]))
draft = store.draft()
(draft / "model.safetensors").write_bytes(b"half")
print(draft, flush=True)
sys.stdin.read()
"""


def drafted(store: CheckpointStore, step: int, value: float = 0.0) -> checkpoint.Checkpoint:
    about = {"step": step, "monitored": None}
    return checkpoint.save(store, Content({"w": torch.full((9,), value)}, {}, about))


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdin=-1, stdout=-1, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    draft = Path(process.stdout.readline().strip())
    long_ago = time.time() - 7200
    for path in (*draft.iterdir(), draft):
        os.utime(path, (long_ago, long_ago))
    yield process, draft
    process.kill()
    process.communicate()


def test_a_draft_stays_while_its_writer_lives_and_goes_when_it_was_killed(
    tmp_path: Path, other: tuple[subprocess.Popen[str], Path]
) -> None:
    process, draft = other
    store = open_store(str(tmp_path))
    drafted(store, 1)
    assert (draft / "model.safetensors").read_bytes() == b"half", "another run's, not finished yet"
    process.kill()
    process.wait()
    drafted(store, 2)
    assert not draft.exists()
    assert store.names() == ["step-00000002", "step-00000001"]


def test_of_a_killed_writer_to_storage_that_is_copied_nothing_stays_on_the_disk(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "kept"), "synced"], stdin=-1, stdout=-1, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    draft = Path(process.stdout.readline().strip())
    assert draft.is_relative_to(tmp_path) and (draft / "model.safetensors").is_file()
    process.kill()
    process.communicate()
    until(lambda: not any(tmp_path.iterdir()))


def test_a_draft_that_was_just_made_is_left_to_its_writer(tmp_path: Path) -> None:
    fresh = tmp_path / ".draft-new"
    fresh.mkdir()  # not locked yet
    drafted(open_store(str(tmp_path)), 1)
    assert fresh.is_dir()


def test_two_attempts_that_write_the_same_step_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def write(value: float) -> None:
        try:
            store = open_store(str(tmp_path))
            for _ in range(15):
                drafted(store, 7, value)
                store.write_note("best.json", "{}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(float(i),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    store = open_store(str(tmp_path))
    assert verify(store, "step-00000007") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "step-00000007"]


@pytest.fixture
def without_rights() -> Iterator[Path]:
    """A folder in which this process, also as root, may add files and remove nothing that root made."""
    folder = Path(tempfile.mkdtemp(prefix="stoker-test-"))
    folder.chmod(0o1777)  # sticky, as /tmp: only a file's owner removes it
    root = os.geteuid() == 0
    yield folder
    if root:
        os.seteuid(0)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
@pytest.mark.parametrize("left", ["", "ema.safetensors"])
def test_what_an_earlier_start_left_is_overwritten_where_nothing_may_be_removed(
    without_rights: Path, left: str
) -> None:
    """Unless a file would count as part of the new checkpoint."""
    store = open_store(str(without_rights), synced=True)
    folder = without_rights / drafted(store, 3).name
    (folder / MANIFEST).write_text("half")
    for file in folder.iterdir():
        file.chmod(0o666)
    if left:
        (folder / left).touch()
    os.seteuid(65534)
    store = open_store(str(without_rights), synced=True)
    if left:
        with pytest.raises(OSError, match=r"cannot write the checkpoint .*step-00000003"):
            drafted(store, 3, 1.0)
    else:
        drafted(store, 3, 1.0)
    os.seteuid(0)
    assert verify(store, folder.name) == ((left and "its manifest is damaged") or None)
