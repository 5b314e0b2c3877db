"""Scripts with loops of their own: one import changed, the same losses, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "scripts"

COMMANDS: dict[int, str] = {}
"""Of the processes that were seen, by id."""


def run(
    script: str, *arguments: str, code: int = 0, how: tuple[str, ...] = ()
) -> set[psutil.Process]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "STOKER_"))}
    environment["PYTHONPATH"] = str(ROOT / "source_dir")
    command = [sys.executable, *how, str(SCRIPTS / script), *arguments]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        children: set[psutil.Process] = set()
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                children |= set(psutil.Process(process.pid).children(recursive=True))
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    COMMANDS[child.pid] = " ".join(child.cmdline()) or COMMANDS.get(child.pid, "")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        output.seek(0)
        text = output.read().decode()
    assert process.returncode == code, text[-3000:]
    return children


def ended(processes: set[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=120)
    return not alive


def losses(folder: Path) -> list[float]:
    return list(json.loads((folder / "losses.json").read_text()))


def test_a_classic_script_trains_alike_and_goes_on_where_it_was_killed(
    digits: Path, tmp_path: Path
) -> None:
    """It is killed in its second epoch: two epochs of 9 batches, a validation and a draw from `random` each.

    What a killed script leaves behind: tests/integration/test_other_users.py.
    """
    ours, theirs = (
        (f"--data={digits / 'images'}", f"--out={tmp_path / name}", f"--loader={name}")
        for name in ("stoker", "torch")
    )
    for name in ("stoker", "torch"):
        (tmp_path / name).mkdir()
    run("classic.py", *ours, "--die-after=13", code=-9)
    processes = run("classic.py", *ours)
    run("classic.py", *theirs)
    assert losses(tmp_path / "stoker") == losses(tmp_path / "torch")
    assert len(losses(tmp_path / "torch")) == 22
    assert ended(processes)


@pytest.mark.soak
def test_ranks_under_torchrun_share_one_cluster_and_leave_nothing() -> None:
    def folders() -> set[Path]:
        return {*Path(tempfile.gettempdir()).glob(f"stoker-ranks-{os.getuid()}/*")}

    before = folders()  # a killed run leaves its own
    started = run("ranks.py", how=("-m", "torch.distributed.run", "--nproc-per-node=2"))
    # A child has its parent's command line until it executes its own.
    names = {name for process in started if (name := COMMANDS.get(process.pid, ""))}
    assert sum("raylet/raylet" in name for name in names) == 1, names
    assert ended(started)
    assert folders() <= before
