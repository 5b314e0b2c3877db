"""Writers that share a folder leave each other's drafts alone; what cannot be removed is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Content, Retention
from stoker.storage.checkpoint_store import CheckpointStore, open_store, verify

WRITER = """
import sys
from pathlib import Path
from stoker.storage.checkpoint_store import open_store
draft = open_store(sys.argv[1]).draft()
(draft / "model.safetensors").write_bytes(b"half")
print(draft, flush=True)
sys.stdin.read()
"""


def save(store: CheckpointStore, step: int, value: float = 0.0) -> checkpoint.Checkpoint:
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
    save(store, 1)
    assert (draft / "model.safetensors").read_bytes() == b"half", "another run's, not finished yet"
    process.kill()
    process.wait()
    save(store, 2)
    assert not draft.exists()
    assert store.names() == ["step-00000002", "step-00000001"]


def test_a_draft_that_was_just_made_is_left_to_its_writer(tmp_path: Path) -> None:
    fresh = tmp_path / ".draft-new"
    fresh.mkdir()  # not locked yet
    save(open_store(str(tmp_path)), 1)
    assert fresh.is_dir()


def test_two_attempts_that_write_the_same_step_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def write(value: float) -> None:
        try:
            store = open_store(str(tmp_path))
            for _ in range(15):
                save(store, 7, value)
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
def test_a_checkpoint_that_cannot_be_removed_is_said_once_and_the_run_goes_on(without_rights: Path) -> None:
    store = open_store(str(without_rights))
    said: list[str] = []
    shelf = Retention(store, newest=1, top_k=0, tell=said.append)
    for step in (1, 2):  # of an earlier start, as another user
        save(store, step)
    shelf.fill(upto=2)
    os.seteuid(65534)
    shelf.add(save(store, 3))
    shelf.add(save(store, 4))
    assert [name[-1] for name in store.names()] == ["4", "2", "1"], "its own it may remove"
    assert len(said) == 1
    assert "cannot remove checkpoint" in said[0] and str(without_rights) in said[0]
    os.seteuid(0)
    assert all(verify(store, name) is None for name in store.names())
