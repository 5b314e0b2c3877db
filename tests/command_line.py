"""The command line in this process: what a user types, the exit code, and what stands on the screen."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from stoker_launcher import command_line


def type_command(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str], str]:
    """(exit code, lines on stderr, stdout) of `python launcher/submit.py …`."""
    capsys.readouterr()
    with (
        mock.patch.object(sys, "argv", ["submit.py", *arguments]),
        pytest.raises(SystemExit) as ended,
    ):
        command_line.main()
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err + shown.out
    return int(ended.value.code or 0), shown.err.splitlines(), shown.out
