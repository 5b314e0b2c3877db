"""The agent of a host that dies is started again, and that is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_an_agent_that_dies_is_started_again_and_noted() -> None:
    folders = [HERE, HERE.parent / "recipes", HERE.parent.parent, HERE.parent.parent / "source_dir"]
    done = subprocess.run(
        [sys.executable, str(HERE / "lost_agents.py")],
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        },
        capture_output=True,
        text=True,
        timeout=270,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["ports"]) == 3, "three agents of one host, one after the other"
    died = [text for text in found["notes"] if "the agent on host cpu-1 died" in text]
    assert len(died) == 2
    assert "it is started again" in died[0] and "its process ended" in died[0]
    assert found["rows"] == 200
    assert found["sampled"], "the CPUs of both hosts"
