"""Every host: errors that end a run, and what they say. Imports neither ray nor torch.

An error whose message is meant for users is a `StokerError`. What fails somewhere travels as a `Failure`: from
the chain worker to the service, to the train workers, to the driver, to the screen.
"""

from __future__ import annotations

import difflib
import shlex
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OF_TRAIN = {"cv2", "numpy", "pandas", "PIL", "pyarrow", "ray", "safetensors", "simplejpeg", "timm"}
OF_TRAIN |= {"torch", "torchmetrics", "torchvision"}
"""Modules of the extra `train`, which the launcher does without."""
INSTALL_TRAIN = "pip install 'stoker[train]'"


class ErrorLine(str):
    """One line for users: what, where, what to do."""

    key: str
    """The configuration key, option or file that it is about."""

    def __new__(cls, text: str, key: str = "") -> ErrorLine:
        """A text begins with its key and a colon, unless `key` is given."""
        problem = super().__new__(cls, text)
        about, colon, _ = text.partition(": ")
        problem.key = key or (about.split()[0].rstrip(",") if colon and about.strip() else "")
        return problem

    @property
    def rest(self) -> str:
        """The text behind its key and the colon."""
        return self.removeprefix(f"{self.key}: ")


@dataclass(frozen=True)
class Failure:
    """Why work, an attempt or a run failed; the same value on every host that it passes."""

    kind: str
    """Key of the error, else class of the exception; pickled itself, it would lose its traceback."""
    where: str = ""
    """File and line, unless the text is complete without."""
    text: str = ""
    record: str = ""
    """Key of the record that was in progress, if one was."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """From any exception, also one that Ray or Ray Train wraps."""
        error = cause_of(error)
        return error.failure if isinstance(error, StokerError) else cls.raised(error)

    @classmethod
    def raised(cls, error: BaseException) -> Failure:
        """From an exception of code that is not Stoker's, with its place: the user's frames first."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            f for f in frames if "site-packages" not in f.filename and "importlib" not in f.filename
        ]
        frame = (own or frames)[-1] if frames else None
        where = f"{Path(frame.filename).name}:{frame.lineno}" if frame else ""
        kind, text = type(error).__name__, " ".join(str(error).split())
        return cls(kind, where, f"{kind}: {text}" if text else kind)

    def error(self) -> DataError:
        """To raise on another host."""
        error = DataError(str(self), key=self.kind)
        error.failure = self
        return error

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.record and f"record {self.record}", self.where)))
        return f"{self.text} ({place})" if place else self.text


class StokerError(Exception):
    """Root of the errors whose message is meant for users, one line per problem."""

    exit_code = 1
    failure: Failure

    def __init__(self, *problems: str, key: str = "", record: str = "") -> None:
        """`key` is for a single problem whose text does not begin with it."""
        super().__init__("\n".join(problems))
        self.problems = tuple(
            p if isinstance(p, ErrorLine) else ErrorLine(p, key) for p in problems
        )
        text = "; ".join(problem.partition("\n")[0] for problem in problems)
        self.failure = Failure(self.key or type(self).__name__, text=text, record=record)

    @property
    def key(self) -> str:
        return self.problems[0].key if self.problems else ""


class UsageError(StokerError):
    """Invalid usage, configuration or data; exit code 2.

    Whatever checks what a user gives may raise it, so docstrings do not repeat it.
    """

    exit_code = 2


class DataError(StokerError):
    """Head and train worker: the data of this run is inconsistent or has stopped arriving."""


class ScriptError(StokerError):
    """Train worker: the user's script failed; the message says how, and names its log."""


class ChainError(StokerError):
    """Chain worker: a stage failed for a whole batch, which ends the run."""


class SchemaError(ChainError):
    """Chain worker and train worker: rows do not match the schema of their split."""


class CacheError(StokerError):
    """Chain worker: the configured cache cannot be used on this host."""


class CheckpointError(StokerError, OSError):
    """Train worker: a checkpoint or the model cannot be written or read."""


class NotFiniteError(StokerError, FloatingPointError):
    """Train worker: the loss or the weights are not finite."""


class FlakyReadError(StokerError, OSError):
    """Chain worker: a record could not be read, but perhaps can be on another host."""


_INNER = ("cause", "_base_exc", "health_check_failure", "controller_failure")
"""Attributes of Ray's and Ray Train's exceptions that hold the one that they wrap."""


def cause_of(error: BaseException) -> BaseException:
    """The exception that those of Ray wrap."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = next((inner for name in _INNER if (inner := getattr(error, name, None))), None)
        error = inner if isinstance(inner, BaseException) else error
    return error


def where_raised(error: BaseException) -> str:
    """Format an exception as `Type: message (file.py:12)`, preferring the user's frames."""
    return str(Failure.raised(error))


class Problems:
    """Collects what several checks refuse, to report all of it at once.

    problems = Problems()
    with problems:
        check()
    problems.refuse()
    """

    def __init__(self) -> None:
        self._problems: dict[ErrorLine, None] = {}

    def add(self, *lines: str) -> None:
        self._problems |= dict.fromkeys(UsageError(*lines).problems)

    def __bool__(self) -> bool:
        return bool(self._problems)

    def about(self, key: str) -> bool:
        return any(problem.key == key for problem in self._problems)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, UsageError):
            self._problems |= dict.fromkeys(error.problems)
            return True
        # What fails otherwise after a refusal is probably its consequence.
        return bool(self._problems) and isinstance(error, Exception)

    def refuse(self) -> None:
        """Raise one UsageError with all problems, each once."""
        if self:
            raise UsageError(*self._problems)


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
