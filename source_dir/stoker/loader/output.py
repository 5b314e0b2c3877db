"""Chain worker → script: what a dataset and `collate_fn` print and warn, shown where the script runs."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

Said = list[tuple[str, str]]
"""Texts in their order, each with the name of its stream: `stdout` or `stderr`."""
MOST = 100_000
"""Characters per block; the rest is left out."""


class Listener(io.TextIOBase):
    """Chain worker: stands in for a stream.

    Args:
        name: of the stream.
        said: takes its texts.
    """

    def __init__(self, name: str, said: Said) -> None:
        self._name, self._said, self._left = name, said, MOST

    def write(self, text: str) -> int:
        """Keep a text for the script."""
        if self._left > 0:
            self._said.append((self._name, text if len(text) <= self._left else text[: self._left] + " …\n"))
            self._left -= len(text)
        return len(text)


@contextlib.contextmanager
def heard(said: Said) -> Iterator[None]:
    """Chain worker: a context whose prints and warnings are appended to `said`."""
    out, error = Listener("stdout", said), Listener("stderr", said)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        yield


def repeat(said: Said) -> None:
    """Script: print what was said elsewhere."""
    for name, text in said:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no such stream, or a closed one
            getattr(sys, name).write(text)
