"""Every host: the errors that end a run, and the one line that says why. Loads neither ray nor torch."""

from __future__ import annotations

import traceback
from pathlib import Path


class UsageError(Exception):
    """Anywhere: what the user asked for cannot be done; exit code 2, one line per problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(RuntimeError):
    """Head and train worker: the data of this run cannot be trusted or no longer comes."""


class ScriptError(RuntimeError):
    """Train worker: the user's own script failed; the text says how, and where its output is."""


class ChainError(RuntimeError):
    """Chain worker: a stage failed for a whole batch; the run cannot go on."""


class SchemaError(ChainError):
    """Chain worker and train worker: rows that do not have the columns of their split."""


class CacheError(RuntimeError):
    """Chain worker: a host cannot keep records where the configuration says."""


class FlakyReadError(OSError):
    """Chain worker: a record could not be read here and now; the head has its shard read again elsewhere."""


class OverError(Exception):
    """Chain worker: nobody wants its blocks any more."""


STATED = (CacheError, ChainError, DataError, ScriptError, UsageError)
"""Errors whose text is the line that people are to read."""


def root_cause(error: BaseException) -> BaseException:
    """Head: what is behind an error that Ray wrapped: the first that states it for people, or the deepest."""
    cause: BaseException = error
    seen = {id(cause)}
    while not isinstance(cause, STATED):
        below = getattr(cause, "cause", None) or cause.__cause__
        if not isinstance(below, BaseException) or id(below) in seen:
            break
        seen.add(id(below))
        cause = below
    return cause


def explain(error: BaseException) -> str:
    """Head: the one line behind an error that Ray wrapped."""
    cause = root_cause(error)
    if isinstance(cause, STATED):
        return str(cause).splitlines()[0]
    return where_raised(cause)


def where_raised(error: BaseException) -> str:
    """Every host: an exception as `Type: message (file.py:12)`, the place being the deepest frame."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "importlib" not in f.filename]
    frame = (own or frames)[-1] if frames else None
    place = f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"
