"""One line for how a script failed: of the rank that failed first, with the last line of its traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.scripts.supervisor import Exit, first_failure, last_error, reason_of

LOST = "RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:49373 (train.py:6)"


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("def f():\n    raise ValueError('no  data')\n\nf()\n", "ValueError: no data (train.py:2)"),
        (
            "import json\njson.loads('x')\n",
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0) (train.py:2)",
        ),
        (
            "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(1) from e\n",
            "KeyError: 1 (train.py:4)",
        ),
        ("import atexit\natexit.register(print, 'bye')\nraise OSError\n", "OSError (train.py:3)"),
        ("x = (\n", "SyntaxError: '(' was never closed"),
        ("raise Exception('two\\nlines')\n", "Exception: two (train.py:1)"),
        ("import sys\nsys.exit('no data')\n", ""),
    ],
)
def test_the_last_line_of_the_last_traceback_with_the_scripts_own_line(
    tmp_path: Path, program: str, line: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 1
    assert last_error(done.stdout, "train.py") == line


def test_pytorchs_mark_of_the_rank_is_no_part_of_the_line() -> None:
    text = 'Traceback (most recent call last):\n  File "/a/train.py", line 5, in <module>\nValueError: no\n'
    marked = "".join(f"[rank1]: {line}\n" for line in text.splitlines())
    assert last_error(marked, "train.py") == "ValueError: no (train.py:5)"


def test_the_reason_names_rank_and_log() -> None:
    assert reason_of("train.py", Exit(1, 3)) == (
        "train.py exited with code 3 (rank 1); see logs/script-rank-1.log"
    )
    assert reason_of("train.py", Exit(0, 1, line="OSError (train.py:3)")) == (
        "OSError (train.py:3) (rank 0); see logs/script-rank-0.log"
    )
    assert reason_of("train.py", Exit(2, -9)).startswith(
        "train.py was killed by SIGKILL, as when memory runs out"
    )
    assert "SIGSEGV (rank 2)" in reason_of("train.py", Exit(2, -11))


def test_a_rank_that_only_lost_the_other_is_not_the_cause() -> None:
    lost, cause = Exit(0, 1, line=LOST), Exit(1, 1, line="ValueError: no")
    assert first_failure([lost, cause]) is cause
    assert first_failure([lost, Exit(1, -9)]) == Exit(1, -9)
    assert first_failure([lost, Exit(1, -15, asked=True)]) is lost
    assert first_failure([Exit(0, 0), Exit(1, -15, asked=True)]) is None
