"""A worker with a runtime environment starts without Ray's own set-up where that would do nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.hosts.forks import setup_worker

FOUND = "import json, os, sys; print(json.dumps([os.getcwd(), os.environ['OWN'], sys.argv[1:]]))"


def test_it_has_its_variables_and_runs_in_its_folder(tmp_path: Path) -> None:
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
def test_anything_else_is_left_to_ray(context: dict[str, Any]) -> None:
    assert not setup_worker.is_simple(context)
    assert setup_worker.is_simple({"env_vars": {"OWN": "yes"}, "py_executable": sys.executable})
