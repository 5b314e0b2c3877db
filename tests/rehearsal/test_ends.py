"""However the head ends: the cause is told, every host leaves by itself, nothing stays.

A host that has not left in time after the head's end is ended by the rehearsal, with exit code 137. A refusal
is in test_forming.py, a failure in test_vertex.py, other ways to fail in tests/unit/test_bootstrap_parts.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsals import CHEAP, Rehearse, new_name, processes_left

from tests.waiting import until

pytestmark = pytest.mark.long


def test_worker_hosts_leave_when_train_py_is_killed(rehearse: Rehearse) -> None:
    """SIGKILL to the head's process under the toolkit: its Ray daemons must not stay either."""
    done = rehearse("rehearsal.entry=toolkit", "rehearsal.hosts=gpu=1,cpu=1", behaviour="killed")
    assert done.code != 0
    assert done.codes["algo-2"] == 0
    assert "the head's process ended without an exit code" in done.log("algo-2")


def test_worker_hosts_leave_when_the_heads_machine_is_lost(rehearse: Rehearse) -> None:
    """The cable is cut before everything dies: no packet tells the others."""
    done = rehearse(
        "rehearsal.hosts=gpu=1,cpu=1",
        "rehearsal.faults=['kill:algo-1@/driver: task 12 done/']",
        then_s=90,
    )
    assert done.codes == {"algo-1": 137, "algo-2": 0}
    assert done.code == 137


def test_sigterm_while_waiting_for_hosts(rehearse: Rehearse) -> None:
    done = rehearse(
        "rehearsal.hosts=gpu=1,cpu=1",
        "rehearsal.join_delay={algo-2: never}",
        "rehearsal.faults=['term:all@/waiting for hosts/+1s']",
    )
    assert done.code == 143
    assert "stopped by SIGTERM before the training began" in done.run.failure_reason


SUBMITS = """
import sys
sys.path.insert(0, "tests/rehearsal")
from rehearsals import stand_in
from stoker_launcher.places import rehearsal
from rehearsals import LINGER_S
from stoker.config.loading import load
rehearsal.LINGER_S = LINGER_S
sys.exit(rehearsal.submit(rehearsal.plan(stand_in(load(None, sys.argv[1:])))).wait())
"""


def submitted(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            SUBMITS,
            *CHEAP,
            f"output_dir={folder}",
            f"name={new_name()}",
            *overrides,
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ".:launcher"},
        # A shell that runs the tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_commits_a_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    process = submitted(
        tmp_path, "rehearsal.hosts=gpu=1,cpu=1", "params.tasks=500", "params.task_s=0.5"
    )
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if "driver: task 3 done" in shown and "joined the head" in shown:
            process.send_signal(signal.SIGINT)
            break
    shown += process.communicate(timeout=300)[0]
    assert process.returncode == 130, shown
    assert "stopping all hosts" in shown
    assert "interrupted" in shown
    (run_dir,) = (path for path in tmp_path.glob("test-*") if not path.is_symlink())
    assert (run_dir / "checkpoints" / "state.json").is_file()
    report = json.loads((run_dir / "rehearsal.json").read_text())
    assert "checkpoint committed: stopped: SIGTERM" in report["failure_reason"]
    assert [host["exit_code"] for host in report["hosts"]] == [143, 0]


def test_a_killed_launcher_takes_its_hosts_along(tmp_path: Path) -> None:
    process = submitted(tmp_path, "rehearsal.hosts=gpu=1", "params.then_s=120")
    assert process.stdout is not None
    for line in process.stdout:
        if "driver: running" in line:
            process.kill()
            break
    process.communicate(timeout=120)
    until(lambda: not processes_left())
