"""`submit.py peek` says nothing against honest data, whatever it looks like."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import honest
import pytest
from typer.testing import CliRunner

from stoker_launcher.command_line import app


@pytest.mark.parametrize("recipe", [*honest.GIVEN, *honest.MORE])
def test_peek_refuses_nothing_and_advises_nothing(recipe: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"recipe: honest:{recipe}\ntrain: {{epochs: 1, batch_size: 4, lr: 0.01}}\n")
    with mock.patch.dict(os.environ):
        result = CliRunner().invoke(app, ["peek", str(job), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "no problems found" in result.output, result.output
    assert "16 train + 8 val" in result.output and "failed" not in result.output
