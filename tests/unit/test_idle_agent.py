"""The process that stands in for Ray's idle agent never outlives its raylet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

AGENT = Path(__file__).resolve().parents[2] / "source_dir/stoker/hosts/forks/agent.py"


def test_it_ends_where_the_raylet_was_killed_before_it_began(tmp_path: Path) -> None:
    given = ["--minimal", f"--session-dir={tmp_path}", "--node-id=n"]
    done = subprocess.run([sys.executable, "-S", str(AGENT), "agent.py", *given], timeout=60)
    assert done.returncode == 0
    assert not list(tmp_path.iterdir()), "nobody waits for its ports"
