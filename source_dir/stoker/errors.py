"""Every host: errors that end a run, and their one-line explanations. Imports neither ray nor torch."""

from __future__ import annotations

import difflib
import re
import shlex
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """Invalid usage, configuration or data; exit code 2, one line per problem.

    Whatever checks what a user gives may raise it, so docstrings do not repeat it.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Problems:
    """Collects what several checks refuse, to report all of it at once.

    problems = Problems()
    with problems:
        check()
    problems.refuse()
    """

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, UsageError):
            self._found |= dict.fromkeys(error.problems)
            return True
        # What fails otherwise after a refusal is probably its consequence.
        return bool(self._found) and isinstance(error, Exception)

    def refuse(self) -> None:
        """Raise one UsageError with all problems, each once."""
        if self._found:
            raise UsageError(*self._found)


def nearest(word: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """A hint to append to an error: `; did you mean epochs?`, or `; ` and `otherwise`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    hint = f"did you mean {close[0]}?" if close else otherwise
    return f"; {hint}" if hint else ""


def nearest_file(name: str, folder: Path, pattern: str, shown: Path | None = None) -> str:
    """As `nearest`, for files of a folder: a path to paste, in the folder as the user names it."""
    hint = difflib.get_close_matches(
        name, [path.name for path in folder.glob(pattern)], n=1, cutoff=0.5
    )
    return f"; did you mean {shlex.quote(str((shown or folder) / hint[0]))}?" if hint else ""


class DataError(RuntimeError):
    """Head and train worker: the data of this run is inconsistent or has stopped arriving."""


class ScriptError(RuntimeError):
    """Train worker: the user's script failed; the message says how, and names its log."""


class ChainError(RuntimeError):
    """Chain worker: a stage failed for a whole batch, which ends the run."""


class SchemaError(ChainError):
    """Chain worker and train worker: rows do not match the schema of their split."""


class CacheError(RuntimeError):
    """Chain worker: the configured cache cannot be used on this host."""


class FlakyReadError(OSError):
    """Chain worker: a transient read error; the head reschedules the shard on another host."""


class OverError(Exception):
    """Chain worker: its blocks are no longer needed."""


STATED = (CacheError, ChainError, DataError, ScriptError, UsageError)
"""Errors whose message is meant for users."""


def root_cause(error: BaseException) -> BaseException:
    """Unwrap an error from Ray: the first cause written for users, or else the deepest."""
    cause: BaseException = error
    seen = {id(cause)}
    while not isinstance(cause, STATED):
        below = getattr(cause, "cause", None) or cause.__cause__
        if not isinstance(below, BaseException) or id(below) in seen:
            break
        seen.add(id(below))
        cause = below
    return cause


_BEHIND = re.compile(r"^([\w.]+: .*)\n\nThe above exception was the direct cause", re.MULTILINE)


def explain(error: BaseException) -> str:
    """An error from Ray in one line."""
    cause = root_cause(error)
    if isinstance(cause, STATED):
        return str(cause).splitlines()[0]
    # Ray Data's UserCodeException only counts attempts; the user's own error is in its text.
    behind = _BEHIND.search(str(error)) if type(cause).__name__ == "UserCodeException" else None
    return behind[1] if behind else where_raised(cause)


def where_raised(error: BaseException) -> str:
    """Format an exception as `Type: message (file.py:12)`, preferring the user's frames."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "importlib" not in f.filename]
    frame = (own or frames)[-1] if frames else None
    place = f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"
