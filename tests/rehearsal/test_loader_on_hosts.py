"""Batches of a script are made on the CPU hosts of a job, too; its losses are those of torch's loader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsals import CHEAP, PATIENT, SAME_PRIORITY, new_name

ROOT = Path(__file__).resolve().parents[2]
POINTS = """
import socket
import time

import torch
from torch.utils.data import Dataset


class Points(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        time.sleep(0.01)
        drawn = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return drawn, index % 3, socket.gethostname()
"""
TRAIN = """
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from points import Points
from torch import nn
from torch.utils.data import DataLoader

import stoker


def train(loaders, needed=frozenset()):
    # Two epochs, and as many more as the needed hosts take to start.
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = loaders(Points(), batch_size=8, shuffle=True, num_workers=2)
    losses, hosts = [], set()
    while len(losses) < 50 or not needed <= hosts:
        for points, labels, on in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            hosts |= set(on)
    return losses


torch.set_num_threads(1)
expected = train(DataLoader)
dist.init_process_group("gloo")
losses = train(stoker.DataLoader, {"algo-2"})
assert sys.argv[1:] == ["an argument"]
stoker.log({"loss": losses[-1]})
words = (Path(os.environ["SM_CHANNEL_WORDS"]) / "words.txt").read_text()
(Path(os.environ["SM_MODEL_DIR"]) / "model.txt").write_text(words)
print("runs in", Path.cwd())
(stoker.checkpoint_dir() / "losses.json").write_text(json.dumps([expected, losses]))
"""


@pytest.mark.timeout(1000)
def test_losses_are_those_of_torch_and_cpu_hosts_do_the_work(tmp_path: Path) -> None:
    """Two hosts of a rehearsal, each of which imports PyTorch."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "points.py").write_text(POINTS)
    (project / "train.py").write_text(TRAIN)
    keys = [
        *CHEAP,
        SAME_PRIORITY,
        f"name={new_name()}",
        "rehearsal.hosts=gpu=1,cpu=1",
        "rehearsal.timeout_s=500",
    ]
    command = [sys.executable, "-c", PATIENT, "project/train.py", *keys]
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "words.txt").write_text("some words")
    command += [
        "params.words=words/",
        "rehearsal.entry=container",
        "--on",
        "rehearsal",
        "--",
        "an argument",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=540)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    run = tmp_path / "runs/latest"
    expected, losses = json.loads((run / "checkpoints/losses.json").read_text())
    assert losses[:50] == expected
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == len(losses) and summary["speed"]["samples_per_s"] > 0
    assert (summary["status"], summary["place"]) == ("succeeded", "rehearsal")
    assert (summary["script"], summary["args"]) == ("train.py", ["an argument"])
    assert summary["train_workers_by_host"] == {"algo-1": 1}
    assert summary["metrics"]["last"]["loss"] == losses[-1]
    assert "runs in /opt/ml/input/data/code/script" in done.stdout
    assert (run / "model/model.txt").read_text() == "some words"
    assert (run / "logs/script-rank-0.log").is_file() and (run / "report.html").is_file()
