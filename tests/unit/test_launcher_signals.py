"""A local run's launcher: signals that reach it alone, and what it begins first.

Ctrl-C in a terminal: tests/e2e/test_a_run_under_way.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.config.loading import load
from stoker_launcher.job import Job, Project
from stoker_launcher.places import local

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = """
import sys
from stoker_launcher.places import local
from stoker_launcher.job import Job, Project
from stoker.config.loading import load

JOB = '''
import signal, sys, time
def stop(number, frame):
    print("the job writes a checkpoint", flush=True)
    time.sleep(0.5)
    sys.exit(143)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
print("the job trains", flush=True)
while True:
    time.sleep(0.05)
'''

class Endless(Job):
    def stage(self, folder, data_at=None, installs=True):
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(JOB)

resolved = load(None, [f"output_dir={sys.argv[1]}", "name=endless"])
job = Endless(resolved, Project(resolved.config))
sys.exit(local.submit(local.plan(job)).wait())
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_a_signal_reaches_the_job_once_and_its_checkpoint_is_waited_for(
    number: int, send: Callable[[int, int], None], tmp_path: Path
) -> None:
    """Whether it is sent to the launcher alone, as by `kill`, or to its group, as by a terminal."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "launcher")},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "the job trains\n"
    send(process.pid, number)
    rest, _ = process.communicate(timeout=60)
    assert rest == "the job writes a checkpoint\n", "once"
    assert process.returncode == 143


class Short(Job):
    def stage(self, folder: Path, data_at: object = None, *, installs: bool = True) -> None:
        folder.mkdir(parents=True)
        (folder / "train.py").write_text("import time; time.sleep(1)")


def short(folder: Path) -> Job:
    resolved = load(None, [f"output_dir={folder}", "name=short"])
    return Short(resolved, Project(resolved.config))


@pytest.mark.long
def test_a_job_outlasts_the_thread_that_started_it(tmp_path: Path) -> None:
    job, started = (
        short(tmp_path),
        list[local.LocalRun](),
    )
    thread = threading.Thread(target=lambda: started.append(local.submit(local.plan(job))))
    thread.start()
    thread.join()
    assert started[0].process.wait() == 0


def test_two_runs_that_were_planned_for_the_same_folder_get_one_each(tmp_path: Path) -> None:
    job = short(tmp_path)
    request = local.plan(job)
    first, second = local.submit(request), local.submit(request)
    assert (first.run_dir, second.run_dir) == (request.run_dir, Path(f"{request.run_dir}-2"))
    assert (first.wait(), second.wait()) == (0, 0)
