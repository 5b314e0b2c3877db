"""Every host: the errors that end a run, and the one line that says why. Loads neither ray nor torch."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path


class UsageError(Exception):
    """Anywhere: what the user asked for cannot be done; exit code 2, one line per problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def nearest(word: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Anywhere: the hint at the end of an error: `; did you mean epochs?`, or `otherwise` after `; `."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    hint = f"did you mean {close[0]}?" if close else otherwise
    return f"; {hint}" if hint else ""


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


_BEHIND = re.compile(r"^([\w.]+: .*)\n\nThe above exception was the direct cause", re.MULTILINE)


def explain(error: BaseException) -> str:
    """Head: the one line behind an error that Ray wrapped."""
    cause = root_cause(error)
    if isinstance(cause, STATED):
        return str(cause).splitlines()[0]
    # Ray Data's error for a user's function says only how often it was tried; the function's own is text.
    behind = _BEHIND.search(str(error)) if type(cause).__name__ == "UserCodeException" else None
    return behind[1] if behind else where_raised(cause)


def where_raised(error: BaseException) -> str:
    """Every host: an exception as `Type: message (file.py:12)`, the place being the deepest frame."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "importlib" not in f.filename]
    frame = (own or frames)[-1] if frames else None
    place = f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"
