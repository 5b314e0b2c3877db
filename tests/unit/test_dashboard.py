"""Ray's dashboard: where it has no meaning, and what it needs, is said before anything starts."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.submit import app
from stoker.config.loading import load
from stoker.config.schema import refuse_missing
from stoker.errors import UsageError
from stoker.hosts.cluster import write_token

DIGITS = str(Path(__file__).resolve().parents[2] / "source_dir/configs/digits.yaml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dashboard", "--on", "rehearsal"], "--dashboard: is not supported with --on rehearsal"),
        (["--dashboard", "--on", "sagemaker"], "--dashboard: is not supported with --on sagemaker"),
        (["cluster.dashboard=true", "--on", "rehearsal"], "cluster.dashboard: only for local runs"),
    ],
)
def test_elsewhere_than_here_it_is_refused(arguments: list[str], said: str) -> None:
    shown = CliRunner().invoke(app, ["run", DIGITS, "--dry-run", *arguments])
    assert isinstance(shown.exception, UsageError) and said in str(shown.exception)


def test_without_its_packages_one_line_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def absent(name: str, *more: Any) -> Any:
        return None if name in ("aiohttp_cors", "opencensus") else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(UsageError) as refused:
        refuse_missing(load(None, ["cluster.dashboard=true"]).config)
    (problem,) = refused.value.problems
    assert problem.startswith("cluster.dashboard needs packages")
    assert problem.endswith("pip install 'ray[default]'")
    refuse_missing(load(None, []).config)


def test_the_token_is_for_this_users_eyes_alone(tmp_path: Path) -> None:
    file = tmp_path / "run" / "token"
    write_token(file, "a" * 64)
    file.chmod(0o644)
    write_token(file, "b" * 64)
    assert file.read_text() == "b" * 64 + "\n" and stat.S_IMODE(file.stat().st_mode) == 0o600
