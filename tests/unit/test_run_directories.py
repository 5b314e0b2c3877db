"""Run directories: whose they are, which one is the newest, and whether a run still is under way in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from stoker.config.loading import load
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.hosts import run_lock
from stoker.hosts.run_lock import PROCESS_FILE
from stoker.place import ORIGINS_FILE
from stoker_launcher import notebook, run_directory
from stoker_launcher.job import Job, Project, open_job
from stoker_launcher.places import attach, local, place_named
from tests.command_line import type_command

JOB = "name: tab\nrecipe: rows:Counting\n"
ROWS = (Path(__file__).parents[1] / "recipes" / "rows.py").read_text()
NAME = "tab-20260101-120000"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config() -> Config:
    return load(None, ["name=tab"]).config


def resumed(asked: str = "auto") -> Path | None:
    return run_directory.resolve_resume(asked, place_named("local"), config()).run_dir


def a_run(name: str = NAME, **summary: object) -> Path:
    run_dir = Path("runs", name).resolve()
    (run_dir / "checkpoints" / "step-00000010").mkdir(parents=True)
    (run_dir / "summary.json").write_text(json.dumps({"status": "interrupted", **summary}))
    return run_dir


def test_the_users_own_code_folder_is_never_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {"rows.py": ROWS, "job.yaml": JOB, "notes.txt": "precious"}.items():
        Path("code").mkdir(exist_ok=True)
        Path("code", name).write_text(text)
    Path("checkpoints/step-00000010").mkdir(parents=True)
    assert resumed(".") is None, "a folder with code/ is no run"
    Path("summary.json").write_text('{"status": "failed"}')
    code, errors, _ = type_command(["code/job.yaml", "--resume", "."], capsys)
    where = Path("code").resolve()
    assert errors[1:] == [
        f"error: --resume: {where} was not staged by Stoker and stays; move it elsewhere"
    ]
    with pytest.raises(UsageError, match="was not staged by Stoker"):
        notebook.submit(notebook.plan("code/job.yaml", (), "local", resume="."))
    assert code == 2 and Path("code/notes.txt").read_text() == "precious"


def test_a_copy_that_was_cut_short_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, job = a_run(), open_job(load(None, ["name=tab"]))

    def cut(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copytree", cut)
        job.stage(run_dir / "code")
    assert not run_directory.replace_code(run_dir).exists()


def test_the_newest_run_is_the_one_that_started_last_whatever_its_name() -> None:
    a_run("tab-20261025-025000", started="2026-10-25T02:50:00+02:00")
    winter = a_run("tab-20261025-021000", started="2026-10-25T02:10:00+01:00")
    assert resumed() == winter
    of_a_notebook = a_run("tab-20261024-120000-a667", started="2026-10-26T12:00:00+01:00")
    assert resumed() == of_a_notebook
    second = a_run("tab-20261026-120000-10", started="2026-10-26T12:00:00+01:00")
    a_run("tab-20261026-120000-9", started="2026-10-26T12:00:00+01:00")
    shutil.rmtree(of_a_notebook)
    assert resumed() == second
    a_run("tab-large-20271026-120000", started="2027-10-26T12:00:00+01:00")
    assert resumed() == second


def test_stoker_run_finds_the_run_of_an_earlier_cell() -> None:
    Path("rows.py").write_text(ROWS)
    for number in range(8):
        run_dir = notebook.plan({"name": "tab", "recipe": "rows:Counting"}, (), "local").run_dir
        os.utime(a_run(run_dir.name), (number, number))
        assert resumed() == run_dir


# ---- whether a run is under way ----


def refusal(asked: str = "auto") -> str:
    with pytest.raises(UsageError) as caught:
        resumed(asked)
    (problem,) = caught.value.problems
    return problem


HOLD = """
import sys, time
from pathlib import Path
from stoker.hosts import run_lock
run_lock.hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def running(run_dir: Path, machine: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of a run, on another machine if one is named."""
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        if machine:
            file = run_dir / PROCESS_FILE
            file.write_text(f"{process.pid} {file.stat().st_ino} {machine}")
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("machine", ["", "gpu-7 an-earlier-boot pid:[1]"])
def test_a_run_is_alive_while_its_process_holds_the_lock(machine: str) -> None:
    """After SIGKILL, too; where its machine counts is that another one's process is not ours to stop."""
    run_dir = a_run(status="running", steps=12)
    run = attach(str(run_dir))
    with running(run_dir, machine) as process:
        on = " on gpu-7" if machine else ""
        assert run.status().startswith(f"running{on}  step 12")
        end = "there" if machine else f"first: stoker stop {run_dir}"
        assert refusal() == refusal(str(run_dir))
        assert refusal() == f"--resume: {run_dir} is still running{on}; stop it {end}"
        assert not run_directory.is_lost(run_dir)
        if machine:
            with pytest.raises(UsageError, match="is not of this machine: running on gpu-7"):
                run.stop()
        else:
            run.stop()
            assert process.wait() == -signal.SIGTERM
    assert run_directory.is_lost(run_dir) and run.wait() == 1 and resumed() == run_dir
    assert run.status().startswith("failed: the process exited without a result (last step: 12)")
    with pytest.raises(UsageError, match="this run has already ended"):
        run.stop()


def test_only_one_process_continues_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.1)
    run_dir = a_run()
    with running(run_dir), pytest.raises(UsageError, match="another process runs this job"):
        run_lock.hold(run_dir)


def test_what_no_lock_tells_is_said_as_the_files_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy, of a run that Stoker did not start here, and on a disk without locks."""
    run_dir = a_run(status="running")
    said = "running, as far as its files say"
    assert attach(str(run_dir)).status() == said and resumed() == run_dir
    with running(run_dir):
        copy = shutil.copytree(run_dir, Path("runs/copy").resolve())
        assert attach(str(copy)).status() == said and not run_directory.is_lost(copy)
        monkeypatch.setattr(run_lock.fcntl, "flock", mock.Mock(side_effect=OSError(95, "none")))
        assert attach(str(run_dir)).status() == said and not run_directory.is_lost(run_dir)
        assert "its disk has no file locks" in refusal()
    (run_dir / PROCESS_FILE).unlink()
    assert resumed() == run_dir


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_the_run_of_another_user_is_alive() -> None:
    run_dir = a_run(status="running")
    look = "import os, sys\nfrom stoker_launcher.run_directory import PastRun\nos.setresuid(*[65534] * 3)\n"
    look += "run = PastRun(__import__('pathlib').Path())\nprint(run.status())\nrun.stop()"
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "launcher")}
    with running(run_dir) as alive:
        done = subprocess.run(
            [sys.executable, "-c", look], cwd=run_dir, env=variables, capture_output=True, text=True
        )
        assert done.stdout == "running\n", done.stderr
        assert "this run is another user's, who has to stop it" in done.stderr
        assert alive.poll() is None


def test_a_run_of_slurm_is_asked_for_in_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = a_run(status="interrupted")
    (run_dir / "slurm.job").write_text("77\n")
    squeue = Path("squeue").resolve()
    squeue.write_text("#!/bin/sh\necho '77|PENDING|Requeued'\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=os.pathsep)
    assert "is still running; stop it first" in refusal()
    for command in (squeue, squeue.with_name("scontrol")):
        command.write_text("#!/bin/sh\necho JobState=TIMEOUT\n")
        command.chmod(0o755)
    assert resumed() == run_dir, "the job has ended"
    with running(run_dir):
        assert "is still running; stop it first" in refusal(), "continued on this machine since"


# ---- latest ----


class Short(Job):
    def stage(self, folder: Path, data_at: object = None, *, installs: bool = True) -> None:
        folder.mkdir(parents=True)
        (folder / ORIGINS_FILE).write_text("{}")
        (folder / "train.py").write_text("import time; time.sleep(0.1)")


@pytest.mark.parametrize("kind", [Path.mkdir, Path.touch])
def test_a_users_own_latest_stays(kind: object, capsys: pytest.CaptureFixture[str]) -> None:
    own = Path("runs/latest").resolve()
    own.parent.mkdir()
    kind(own)  # type: ignore[operator]
    resolved = load(None, ["name=tab"])
    run = local.submit(local.plan(Short(resolved, Project(resolved.config))))
    assert run.wait() == 0 and own.exists() and not own.is_symlink()
    assert (
        capsys.readouterr().err
        == f"note: {own} is not a link, so it stays and does not name this run\n"
    )
