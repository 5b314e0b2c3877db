"""Which service a host belongs to, before anything is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.bootstrap import requirements
from stoker.bootstrap.requirements import ConflictError

TRAIN = Path(requirements.__file__).parents[2] / "train.py"


def start(base: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "SAGEMAKER_BASE_DIR": str(base), **environment}
    return subprocess.run([sys.executable, TRAIN], capture_output=True, text=True, timeout=120, env=given)


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_hosts_that_are_described_wrongly_fail_with_the_reason(tmp_path: Path, content: str) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text(content)
    done = start(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: resourceconfig.json: cannot be read")
    assert (tmp_path / "output" / "failure").read_text() in done.stderr


def test_hosts_that_outlive_the_job_get_nothing_installed(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("pytest\nno-such-package\n")
    with pytest.raises(ConflictError, match="no-such-package not installed for"):
        requirements.ensure(tmp_path, install=False)
