"""A script of the user's own as a job on this machine, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import shown_until, submit, typed

pytestmark = pytest.mark.long

TRAIN = """
import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from helper import double

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--data", type=Path)
given = parser.parse_args()


def save(*_):
    (stoker.checkpoint_dir() / f"saved-{dist.get_rank()}").touch()
    sys.exit(0)


dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    socket.create_connection(("127.0.0.2", int(os.environ["MASTER_PORT"]))).close()
    raise SystemExit("PyTorch's store listens on every address")
except ConnectionRefusedError:
    pass
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(f"rank {rank} of {dist.get_world_size()}: {double(total.item()):g}, {given.data.read_text()}")
for step in range(1, 4):
    stoker.log({"train/loss": given.lr / step, "mine": float("nan") if step == 3 else step}, step)
torch.save({"rank": rank}, stoker.checkpoint_dir() / f"rank-{rank}.pt")
same = [None, None]
dist.all_gather_object(same, (os.environ["STOKER_JOB"], os.environ["STOKER_RUN_DIR"]))
assert same[0] == same[1], same
if (stoker.checkpoint_dir() / "saved-0").exists():
    import ray

    # The job's own cluster, with its token: not one that this process starts.
    ray.init(log_to_driver=False)
    (stoker.checkpoint_dir() / f"nodes-{rank}").write_text(str(len(ray.nodes())))
    dist.barrier()
    if rank == 1:
        raise ValueError("rank 1 has no data")
    dist.barrier()
signal.signal(signal.SIGTERM, save)
dist.barrier()
print("waiting")
time.sleep(600)
"""


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "runs/latest/summary.json").read_text()))


def test_two_ranks_stop_with_sigterm_go_on_and_fail_with_their_reason(tmp_path: Path) -> None:
    """Two jobs: the first is stopped within the script, the second goes on in its run directory.

    SIGTERM to the launcher, which passes it on: tests/unit/test_launcher_signals.py.
    """
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(TRAIN)
    (tmp_path / "project" / "helper.py").write_text("def double(x): return 2 * x\n")
    (tmp_path / "data.txt").write_text("as typed")
    words = ["project/train.py", "train.workers=2", "--", "--lr", "0.5", "--data", "data.txt"]
    process = typed(*words, cwd=tmp_path)
    try:
        shown = shown_until(process, "waiting")
        assert submit("stop", "runs/latest", cwd=tmp_path).returncode == 0
        shown += process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode == 143, shown
    assert "rank 0 of 2: 6, as typed" in shown and "rank 1 of 2" not in shown
    assert "stopped: SIGTERM" in shown and "Traceback" not in shown
    run = (tmp_path / "runs/latest").resolve()
    assert (run / "checkpoints/saved-0").exists() and (run / "checkpoints/saved-1").exists()
    assert "rank 1 of 2: 6, as typed" in (run / "logs/script-rank-1.log").read_text()
    found = summary(tmp_path)
    assert (found["status"], found["script"], found["steps"]) == ("interrupted", "train.py", 3)
    assert found["args"] == ["--lr", "0.5", "--data", "data.txt"]
    assert found["metrics"]["last"] == {"train/loss": 0.5 / 3}, (
        "the last of the others is not a number"
    )
    assert found["train_workers"] == 2 and "train.workers" in (run / "config.yaml").read_text()
    logged = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["metrics"]["mine"] for e in logged if e["event"] == "metrics"] == [1, 2, None]
    assert ">train/loss</h" in (run / "report.html").read_text()
    assert list((run / "tensorboard").iterdir())

    done = submit(*words[:2], "--resume", "auto", *words[2:], cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (tmp_path / "runs/latest").resolve() == run
    assert "4 files from before" in done.stdout
    reason = "ValueError: rank 1 has no data (train.py:51) (rank 1); see logs/script-rank-1.log"
    # Rank 0, which it makes fail, may have been ended before it said so: tests/unit/test_script_ranks.py.
    assert f"error: {reason}" in done.stdout
    found = summary(tmp_path)
    assert found["status"] == "failed" and found["error"].startswith(reason)
    assert {(run / "checkpoints" / f"nodes-{rank}").read_text() for rank in (0, 1)} == {"1"}
