"""Chain worker → script: what a dataset and `collate_fn` print and warn, shown where the script runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

Said = list[tuple[str, str]]
"""Texts in their order, each with the name of its stream: `stdout` or `stderr`."""
MOST = 100_000
"""Characters per block; the rest is left out."""


class Listener:
    """Chain worker: stands in for a stream; all but its texts is that of the stream (`fileno`, `encoding`).

    There is one per process and stream, because handlers of `logging` keep the stream that they find.
    """

    def __init__(self, name: str) -> None:
        self._name, self._stream = name, getattr(sys, name)
        self.said: Said | None = None
        """Takes the texts; None: the stream does."""
        self.left = MOST

    def write(self, text: str) -> int:
        """Keep a text for the script."""
        if self.said is None:
            return int(self._stream.write(text))
        if self.left > 0:
            self.said.append((self._name, text if len(text) <= self.left else text[: self.left] + " …\n"))
            self.left -= len(text)
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """Keep texts for the script."""
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_listeners: dict[str, Any] = {}


@contextlib.contextmanager
def heard(said: Said) -> Iterator[None]:
    """Chain worker: a context whose prints and warnings are appended to `said`."""
    if not _listeners:
        _listeners.update({name: Listener(name) for name in ("stdout", "stderr")})
    for listener in _listeners.values():
        listener.said, listener.left = said, MOST
    out, error = _listeners["stdout"], _listeners["stderr"]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            yield
    finally:
        for listener in _listeners.values():
            listener.said = None


def repeat(said: Said) -> None:
    """Script: print what was said elsewhere."""
    for name, text in said:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no such stream, or a closed one
            getattr(sys, name).write(text)
