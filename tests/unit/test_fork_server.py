"""Ray's workers are forked from one process; without it, each starts by itself, once and at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.hosts import forks
from stoker.hosts.forks import setup_worker
from stoker.hosts.machine import runs
from stoker.hosts.requirements import at_least, installed
from tests.waiting import until

FORKS = forks.POSSIBLE and at_least(installed("ray"), forks.FIRST_RAY)
pytestmark = pytest.mark.skipif(
    not FORKS, reason="workers are forked on Linux and newer versions of Ray only"
)
WORKER = Path(forks.__file__).with_name("forked_worker.py")
STARTED = """
import os, pathlib, random, sys
numpy = sys.modules.get("numpy")
drawn = [random.random(), numpy.random.rand() if numpy else 0]
with open(sys.argv[1], "a") as file:
    print(os.getppid(), os.getcwd(), os.environ.get("OWN"), drawn, file=file)
print("its output")
sys.exit(3)
"""
SAME_IDS = "import ray\nray.ObjectID.from_random()\n"


@pytest.fixture
def serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., forks.ForkServer]]:
    started: list[forks.ForkServer] = []
    monkeypatch.setenv("STOKER_RAY_WORKERS", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "default_worker.py").write_text(STARTED)

    def serve(*modules: str) -> forks.ForkServer:
        server = forks.started(modules, tmp_path)
        assert server is not None
        monkeypatch.setenv(forks.SOCKET_VARIABLE, server.socket)
        started.append(server)
        return server

    yield serve
    for server in started:
        server.stop()


def work(folder: Path, name: str, **variables: str) -> tuple[list[str], str]:
    """What a worker, started as Ray starts it, has noted, and its output."""
    command = [sys.executable, str(WORKER), str(folder / name)]
    (folder / "job").mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=folder / "job",
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        timeout=60,
    )
    until(lambda: (folder / name).is_file() and (folder / name).read_text().endswith("\n"))
    return (folder / name).read_text().splitlines(), done.stdout.decode()


def test_a_worker_is_a_fork_with_the_environment_folder_and_output_of_its_own(
    tmp_path: Path, serve: Callable[..., forks.ForkServer]
) -> None:
    server = serve("numpy")  # still imports while workers ask
    (one,), output = work(tmp_path, "one", OWN="yes")
    (two,), _ = work(tmp_path, "two")
    assert one.split()[:3] == [str(server.pid), str(tmp_path / "job"), "yes"]
    assert two.split()[:3] == [str(server.pid), str(tmp_path / "job"), "None"]
    assert not {*one.split()[3:]} & {*two.split()[3:]}, "no number is drawn twice"
    assert output == "its output\n"


def test_modules_are_imported_ahead_from_any_folder(
    tmp_path: Path, serve: Callable[..., forks.ForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run 12:30"
    folder.mkdir()
    (folder / "ahead.py").write_text(f"import stoker; open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.syspath_prepend(str(folder))
    serve("ahead")
    until((tmp_path / "imported").exists)


def test_workers_are_forked_where_the_job_began_with_signals_of_children_ignored(
    tmp_path: Path, serve: Callable[..., forks.ForkServer]
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        server = serve("numpy")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert work(tmp_path, "one")[0][0].split()[0] == str(server.pid)


def test_where_two_forks_would_draw_the_same_ids_workers_start_by_themselves(
    tmp_path: Path, serve: Callable[..., forks.ForkServer], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "drawsids.py").write_text(SAME_IDS)
    server = serve("drawsids")
    (noted,), _ = work(tmp_path, "one")
    assert noted.split()[0] == str(os.getpid())
    server.stop()
    assert "ended early, so they started slowly" in capfd.readouterr().out


def test_a_killed_server_that_still_imports_does_not_delay_a_worker(
    tmp_path: Path, serve: Callable[..., forks.ForkServer]
) -> None:
    (tmp_path / "neverends.py").write_text("import time\ntime.sleep(100)\n")
    server, began = serve("neverends"), time.monotonic()
    worker = subprocess.Popen([sys.executable, str(WORKER), str(tmp_path / "one")])
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(timeout=2)
    os.kill(server.pid, signal.SIGKILL)
    assert worker.wait(timeout=30) == 3 and time.monotonic() - began < 30
    assert (tmp_path / "one").read_text().split()[0] == str(os.getpid())


def test_a_worker_that_has_given_up_is_not_started_a_second_time(
    tmp_path: Path, serve: Callable[..., forks.ForkServer]
) -> None:
    server = serve()
    work(tmp_path, "warm")
    os.kill(server.pid, signal.SIGSTOP)
    command = [str(tmp_path / "default_worker.py"), str(tmp_path / "late")]
    asked = json.dumps(
        {"command": command, "environment": dict(os.environ), "folder": str(tmp_path)}
    )
    with socket.socket(socket.AF_UNIX) as late:
        late.connect(server.socket)
        socket.send_fds(late, [asked.encode() + b"\n"], [0, 1, 2])
    os.kill(server.pid, signal.SIGCONT)
    (noted,), _ = work(tmp_path, "next")  # requests are answered in order
    assert noted.split()[0] == str(server.pid) and not (tmp_path / "late").exists()


def test_the_server_ends_with_its_parent_even_if_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from stoker.hosts import forks\n"
        "print(forks.started((), pathlib.Path(sys.argv[1])).pid, flush=True); time.sleep(100)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    assert runs(server)
    parent.kill()
    until(lambda: not runs(server))
    parent.communicate()


FOUND = "import json, os, sys; print(json.dumps([os.getcwd(), os.environ['OWN'], sys.argv[1:]]))"


def test_a_worker_with_an_environment_of_its_own_has_it_without_rays_set_up(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    worker = tmp_path / "forked_worker.py"
    worker.write_text(FOUND)
    context = {"env_vars": {"OWN": "yes"}, "command_prefix": ["cd", str(tmp_path / "job"), "&&"]}
    command = [str(worker), "--node", f"--serialized-runtime-env-context={json.dumps(context)}"]
    done = subprocess.run(
        [sys.executable, setup_worker.__file__, *command, "--language=PYTHON"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == [str(tmp_path / "job"), "yes", ["--node"]], done.stderr


@pytest.mark.parametrize(
    "context",
    [
        {"command_prefix": ["cd", "/no/such/folder", "&&"]},
        {"command_prefix": ["conda", "activate", "own", "&&"]},
        {"command_prefix": ["cd", "/", "&&", "cd", "/tmp", "&&"]},
        {"env_vars": {"PATH": "/own:${PATH}"}},
        {"py_executable": "/own/python"},
        {"override_worker_entrypoint": "/own/worker.py"},
    ],
    ids=lambda context: str(next(iter(context.values())))[:30],
)
def test_any_other_environment_is_left_to_ray(context: dict[str, Any]) -> None:
    assert not setup_worker.is_simple(context)
    assert setup_worker.is_simple({"env_vars": {"OWN": "yes"}, "py_executable": sys.executable})
