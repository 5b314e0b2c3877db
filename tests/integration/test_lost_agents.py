"""The agent of a host that dies is started again, and that is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.fakes.ray_nodes import RayNodes

HERE = Path(__file__).resolve().parent


def test_an_agent_that_dies_is_started_again_and_noted(nodes: RayNodes) -> None:
    """Long: an agent waits a few seconds before it is started again, so that a cache is removed first."""
    done = subprocess.run(
        [sys.executable, str(HERE / "lost_agents.py")],
        env=nodes.environment | {"STOKER_TEST_NODES": json.dumps(nodes.address())},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["ports"]) == 3, "three agents of one host, one after the other"
    died = [text for text in found["notes"] if "died" in text]
    assert len(died) == 2
    assert all("the agent on host" in text and "restarting it" in text for text in died)
    assert "its process ended" in died[0]
    assert found["rows"] == 200
    assert found["sampled"], "its CPUs, too"
