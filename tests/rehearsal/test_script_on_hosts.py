"""A script of the user's own on emulated SageMaker hosts: one that trains, one that only has CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rehearsals import CHEAP, new_name

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import os
import socket
import sys
from pathlib import Path

import ray
import torch.distributed as dist

import stoker

dist.init_process_group("gloo")
ray.init(log_to_driver=False)


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def where():
    import stoker  # the job's code is there, too

    return socket.gethostname() if stoker.__version__ else ""


groups = {node["Labels"]["stoker.group"]: node["NodeID"] for node in ray.nodes()}
on = [where.options(label_selector={"stoker.group": group}).remote() for group in sorted(groups)]
hosts = ray.get(on, timeout=120)
data = (Path(os.environ["SM_CHANNEL_WORDS"]) / "words.txt").read_text()
(Path(os.environ["SM_MODEL_DIR"]) / "model.txt").write_text(data)
(stoker.checkpoint_dir() / "last.txt").write_text(sys.argv[1])
stoker.log({"loss": 0.5})
print("tasks on", len(set(hosts)), "hosts of", sorted(groups), Path.cwd())
"""


def test_it_trains_on_the_gpu_host_and_reaches_every_host(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(TRAIN)
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "words.txt").write_text("some words")
    keys = [*CHEAP, f"name={new_name()}", "rehearsal.hosts=gpu=1,cpu=1", "rehearsal.timeout_s=280"]
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "project/train.py", *keys]
    command += ["params.words=words/", "rehearsal.entry=container", "--on", "rehearsal", "--", "given"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    run = tmp_path / "runs/latest"
    assert "tasks on 2 hosts of ['cpu', 'gpu'] /opt/ml/input/data/code/script" in done.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["backend"]) == ("succeeded", "rehearsal")
    assert summary["train_workers_by_host"] == {"algo-1": 1}
    assert (summary["script"], summary["args"]) == ("train.py", ["given"])
    assert (run / "checkpoints/last.txt").read_text() == "given"
    assert (run / "model/model.txt").read_text() == "some words"
    assert (run / "logs/script-rank-0.log").is_file() and (run / "report.html").is_file()
