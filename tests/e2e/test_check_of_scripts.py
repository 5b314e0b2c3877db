"""`submit.py check train.py` as a user types it, on scripts that measure their wait themselves."""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import ROOT, submit

from tests.waiting import until

STEP_S = 0.1
"""Of every step, waiting and training together, where nothing else takes the CPUs."""
KNOWN = '''
import argparse, json, time, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

def until(moment):
    time.sleep(max(moment - time.monotonic(), 0))

class Rows(Dataset):
    def __init__(self, fetch_s): self.fetch_s = fetch_s
    def __len__(self): return 4000
    def __getitems__(self, indices):
        until(time.monotonic() + self.fetch_s)
        return [torch.ones(3) for _ in indices]

class Stream(IterableDataset):
    def __init__(self, fetch_s): self.fetch_s = fetch_s
    def __iter__(self):
        while True:
            ends = time.monotonic() + self.fetch_s
            for last in (False, False, False, True):
                until(ends if last else 0)
                yield torch.ones(3)

class Own(DataLoader):
    """A subclass whose iterator is none of torch's."""
    def _get_iterator(self):
        for _ in range(1000):
            until(time.monotonic() + self.dataset.fetch_s)
            yield torch.ones(4, 3)

def train(kind, share, step, workers, steps):
    # Workers that are late set the pace; without any, the script fetches by itself.
    late = workers if share else 0
    fetch_s = late * step if workers else share * step
    options = {"multiprocessing_context": "spawn"} if kind == "spawn" else {}
    if kind == "persistent":
        options["persistent_workers"] = True
    dataset = (Stream if kind == "stream" else Rows)(fetch_s)
    loader = (Own if kind == "own" else DataLoader)(dataset, 4, num_workers=workers, **options)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    times, batches = [], iter(loader)
    for _ in range(steps):
        asked = time.monotonic()
        if (batch := next(batches, None)) is None:
            break
        times.append((asked, time.monotonic()))
        ends = times[-1][1] + (1 - share) * step
        model(batch).sum().backward()
        optimizer.step()
        until(ends)
    return times

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--step", type=float, required=True)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--part", action="append", required=True, help="kind:share")
    given = parser.parse_args()
    found = []
    for part in given.part:
        kind, share = part.split(":")
        found.append(train(kind, float(share), given.step, given.workers, given.steps))
    with open(f"times-{given.workers}.json", "w") as file:
        json.dump(found, file)

if __name__ == "__main__":
    main()
'''
PARTS = {
    "0": ["rows:0", "stream:0.2", "own:0.5", "rows:0.9"],
    "2": ["persistent:0", "stream:0.2", "spawn:0.5", "rows:0.9"],
}
"""By number of workers: the loops of one script, each of 32 steps, and how much of them would be waiting."""
CASES = [
    (workers, number, *part.split(":"))
    for workers, ps in PARTS.items()
    for number, part in enumerate(ps)
]


def known(folder: Path, workers: str, *given: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    script = folder / f"known_{workers}.py"
    script.write_text(KNOWN)
    given = ("--workers", workers, "--step", str(STEP_S), *given)
    done = submit("check", str(script), "--json", *options, "--", *given, cwd=folder, timeout_s=500)
    # Where something else takes the CPUs, the verdict may be that there is none; the figures are compared.
    assert done.returncode in (0, 2), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def all_parts(folder: Path, workers: str) -> list[dict[str, Any]]:
    parts = [word for part in PARTS[workers] for word in ("--part", part)]
    found = known(folder, workers, "--steps", "32", *parts, options=("--steps", "900"))
    return sorted(found["loaders"], key=lambda one: one["number"])


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("known")
    with ThreadPoolExecutor(2) as pool:
        found = dict(
            zip(PARTS, pool.map(lambda workers: all_parts(folder, workers), PARTS), strict=True)
        )
    clocks = {
        workers: json.loads((folder / f"times-{workers}.json").read_text()) for workers in PARTS
    }
    return {workers: [*zip(found[workers], clocks[workers], strict=True)] for workers in PARTS}


@pytest.mark.parametrize(("workers", "number", "kind", "share"), CASES)
def test_the_share_is_that_of_the_scripts_own_clock_within_five_points(
    workers: str, number: int, kind: str, share: str, verdicts: dict[str, Any]
) -> None:
    (one, times), count = verdicts[workers][number], int(workers)
    assert one["trains"] and one["loader"]["num_workers"] == count and one["steps"] >= 20
    warm_up = 3 + 2 * count  # the first steps, and the batches that workers have fetched meanwhile
    own = range(warm_up, warm_up + one["steps"])
    whole = statistics.mean(times[i + 1][0] - times[i][0] for i in own)
    wait = statistics.mean(times[i][1] - times[i][0] for i in own)
    assert one["share"] == pytest.approx(wait / whole, abs=0.05)
    assert one["compute_s"] == pytest.approx(whole - wait, abs=0.02)
    assert one["samples"] == 4 and one["bytes"] == 4 * 3 * 4
    if kind == "own":
        assert one["cpu_s"] is None
        return
    slept = bool(float(share)) * count * STEP_S if count else float(share) * STEP_S
    assert one["blocked_s"] == pytest.approx(slept, rel=0.1, abs=0.02), "seen as waiting"
    assert one["cpu_s"] < 0.04


def test_it_ends_once_it_is_sure(tmp_path: Path) -> None:
    found = known(tmp_path, "0", "--part", "rows:0.5")
    assert found["ended"] == "enough" and found["loaders"][0]["steps"] >= 20
    assert found["verdict"][0].startswith("input-bound: ") and found["recommended"] is None


def test_the_screen_names_loaders_costs_and_what_would_help(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(KNOWN)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    hosts = ("--gpu", "ml.g5.xlarge", "--cpu", "ml.c5.xlarge", "--gpu-samples-per-s", "900")
    given = ("--workers", "0", "--step", str(STEP_S), "--steps", "40")
    parts = ("--part", "rows:0.5", "--part", "own:0")
    options = ("--steps", "500", *hosts, "--", *given, *parts)
    done = submit("check", "mine/train.py", *options, cwd=tmp_path)
    screen = done.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    # Other work may take the CPUs.
    judged = not screen.startswith("too uncertain")
    assert done.returncode == (0 if judged else 2), screen + done.stderr
    assert screen.startswith("input-bound: ") or not judged
    assert re.search(r"\n  train.py:\d+: Rows, batches of 4 samples, 0 kB, num_workers=0\n", screen)
    assert re.search(r"\n  also train.py:\d+: Rows, batches of 4 samples", screen)
    assert "CPU per sample: " in screen and len(screen.splitlines()) <= 40
    assert not judged or re.search(r"\n  num_workers=\d+ instead of 0 would fix this", screen)
    assert not judged or ("recommended: 1 × ml.g5" in screen and "estimated, prices of" in screen)


LIGHTNING = """
import lightning, time, torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.ones(3)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def training_step(self, batch, number):
        time.sleep(0.2)
        return self.layer(batch).sum()
    def validation_step(self, batch, number):
        self.layer(batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)

trainer = lightning.Trainer(max_epochs=3, logger=False, enable_checkpointing=False, accelerator="cpu")
trainer.fit(Model(), DataLoader(Rows(), 4), DataLoader(Rows(), 4))
"""


@pytest.mark.soak
def test_a_lightning_trainer_is_seen_through(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    done = submit("check", "train.py", "--steps", "12", "--json", cwd=tmp_path)
    assert done.returncode in (0, 2), done.stderr
    first, *others = json.loads(done.stdout)["loaders"]
    assert first["trains"] and first["steps"] == 12
    # Lightning's own work is part of the step.
    assert 0.2 < first["share"] < 0.8
    assert [other["trains"] for other in others] == [False], (
        "the validation that Lightning begins with"
    )


FAILS = """
import torch
from torch.utils.data import DataLoader

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        if index == 70: raise ValueError("record 70 is damaged")
        return torch.ones(3)

for batch in DataLoader(Rows(), 4, num_workers=1):
    pass
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os\n1 / 0\n", "ZeroDivisionError: division by zero"),
        (
            "import sys\nsys.exit(3)\n",
            "the script failed before 20 steps were measured: exit code 3",
        ),
        ("import os\nos.kill(os.getpid(), 9)\n", "the script was killed by SIGKILL"),
        ("import time\ntime.sleep(600)\n", "error: train.py: too few batches within --timeout 5 s"),
        (FAILS, "error: train.py: the script failed before 20 steps were measured: ValueError"),
    ],
)
def test_scripts_that_give_no_verdict(tmp_path: Path, script: str, said: str) -> None:
    """More of them: tests/unit/test_check.py."""
    (tmp_path / "train.py").write_text(script)
    limit = ("--timeout", "5") if "sleep" in script else ()
    done = submit("check", "train.py", "--steps", "20", *limit, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert said in done.stderr and done.stderr.splitlines()[-1].startswith("error: ")
    if "/ 0" in script:
        assert (
            'File "train.py", line 2, in <module>' in done.stderr and "watch.py" not in done.stderr
        )
    assert script != FAILS or "record 70 is damaged" in done.stderr


def started(folder: Path, script: str, *given: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "check", "train.py", "--", *given]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "begins\n"
    return process


def test_ctrl_c_ends_the_script_and_its_workers(tmp_path: Path) -> None:
    script = KNOWN.replace("def main():", "def main():\n    print('begins', flush=True)")
    given = ("--step", "1", "--workers", "2", "--part", "rows:0.5")
    process = started(tmp_path, script, *given)
    children = partial(psutil.Process(process.pid).children, recursive=True)
    below = until(lambda: len(found := children()) >= 3 and found, 240)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=180)
    assert process.returncode == 130
    assert psutil.wait_procs(below, timeout=120)[1] == [], "nothing is left"


def test_a_script_that_ignores_sigterm_ends_with_the_check(tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    process = started(tmp_path, f"{deaf}print('begins', flush=True)\ntime.sleep(600)\n")
    below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.communicate(timeout=180)
    assert process.returncode == 143
    assert psutil.wait_procs(below, timeout=120)[1] == []


def test_a_script_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('child', 'w').write(str(child.pid))\nos.kill(os.getpid(), 9)\n"
    )
    assert submit("check", "train.py", cwd=tmp_path).returncode == 1
    child = int((tmp_path / "child").read_text())
    until(lambda: not psutil.pid_exists(child) or is_zombie(child), 30)


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
