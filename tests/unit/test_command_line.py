"""What the command line offers before a job: its version, hints for mistyped words, completion in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import stoker
from tests.command_line import type_command

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_the_packages_and_follows_semver(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, out = type_command(["--version"], capsys)
    assert (code, out) == (0, f"stoker {stoker.__version__}\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?", stoker.__version__)
    assert metadata.version("stoker") == stoker.__version__, "install again: pip install -e ."
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("statsu", "did you mean status?"),
        ("reprot", "did you mean report?"),
        ("chekc", "did you mean check?"),
        ("trian", "did you mean train.py?"),
        ("flowers", "did you mean flowers.yaml?"),
        ("qqq", "commands: run, "),
    ],
)
def test_a_mistyped_command_names_the_nearest(
    typed: str,
    meant: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "flowers.yaml"):
        Path(name).touch()
    code, lines, _ = type_command([typed, "runs/latest"], capsys)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"error: {typed}: no such command or file; ") and meant in lines[0]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("sta", {"status"}),
        ("status --", {"--help"}),
        ("job.yaml train.ep", {"train.epochs="}),
        ("job.yaml --on ra", {"ray"}),
    ],
)
@pytest.mark.long
def test_a_shell_completes_commands_keys_and_places(typed: str, offered: set[str], tmp_path: Path) -> None:
    """Through the script that `stoker --show-completion` gives bash to read."""
    program, words = tmp_path / "stoker", ["stoker", *typed.split()]
    program.write_text(f"#!{sys.executable}\nfrom launcher.submit import main\nmain()\n")
    program.chmod(0o755)
    script = f"""
        eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 stoker --show-completion bash)"
        COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _stoker_completion stoker
        printf '%s\n' "${{COMPREPLY[@]}}"
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(done.stdout.split()) == offered, done.stderr


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    from launcher.submit import app

    code, _, out = type_command(["--help"], capsys)
    assert code == 0
    assert all(
        f"\n  {command.callback.__name__} " in out for command in app.registered_commands if command.callback
    )
