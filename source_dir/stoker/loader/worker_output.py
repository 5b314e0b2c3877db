"""What chain workers share with their script: its screen, and modules that it has reloaded."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from stoker.read.generators import is_own_file

Said = list[tuple[str, str]]
"""Texts in their order, each with the name of its stream: `stdout` or `stderr`."""
UNSENT = "unsent"
"""Instead of a stream: what the script has set and could not send."""


class CapturedStream:
    """One per process and stream, because handlers of `logging` keep the stream that they find."""

    def __init__(self, name: str) -> None:
        self._name, self._stream = name, getattr(sys, name)
        self.said: Said | None = None
        """Takes the texts; None: the stream does."""

    def write(self, text: str) -> int:
        if self.said is None:
            return int(self._stream.write(text))
        self.said.append((self._name, text))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_listeners: dict[str, Any] = {}


@contextlib.contextmanager
def heard(said: Said) -> Iterator[None]:
    """A context whose prints and warnings are appended to `said`."""
    if not _listeners:
        _listeners.update({name: CapturedStream(name) for name in ("stdout", "stderr")})
    for listener in _listeners.values():
        listener.said = said
    out, error = _listeners["stdout"], _listeners["stderr"]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            yield
    finally:
        for listener in _listeners.values():
            listener.said = None


def repeat(said: Said) -> None:
    for name, text in said:
        if name == UNSENT:
            warnings.warn(f"stoker.DataLoader: {text}", stacklevel=2)
            continue
        with contextlib.suppress(
            AttributeError, OSError, ValueError
        ):  # no such stream, or a closed one
            getattr(sys, name).write(text)


_specs: dict[str, Any] = {}
"""The specification of each own module; loading one again makes a new one."""
_times: dict[str, int] = {}
_done: dict[str, int] = {}
"""How often it has loaded modules again."""


def reloaded() -> dict[str, int]:
    """How often each of its own modules was loaded again since its first loader."""
    for name, module in list(sys.modules.items()):
        about = getattr(module, "__dict__", {})
        spec = about.get("__spec__")
        if spec is None or not is_own_file(about.get("__file__")):
            continue
        if _specs.setdefault(name, spec) is not spec:
            _specs[name], _times[name] = spec, _times.get(name, 0) + 1
    return dict(_times)


def reload(times: dict[str, int]) -> None:
    """Load modules again that the script has; those that others import come first."""
    for name in reversed([name for name in sys.modules if times.get(name, 0) > _done.get(name, 0)]):
        importlib.reload(sys.modules[name])
    _done.update(times)
