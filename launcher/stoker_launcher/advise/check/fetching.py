"""Loader's workers and script's process: measures CPU seconds per batch.

Times torch's fetcher (`__getitem__` of every index, then `collate_fn`); in workers, from their
`worker_init_fn` on. Sums go to one file per process, because workers may be killed any time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITE_S = 0.2


class Fetching:
    def __init__(self, file: Path, loader: int, clock: Callable[[], float]) -> None:
        self.file, self.loader, self.clock = file, loader, clock
        self.batches = -1
        """The first batch does not count, because it imports modules and opens files."""
        self.cpu_s = self.wall_s = self.written = 0.0

    def fetch(self, original: Callable[[Any], Any], index: Any) -> Any:
        wall, cpu = time.monotonic(), self.clock()
        data = original(index)
        wall, cpu = time.monotonic() - wall, self.clock() - cpu
        self.batches += 1
        if self.batches:
            self.cpu_s += cpu
            self.wall_s += wall
            if self.batches < 3 or time.monotonic() - self.written > WRITE_S:
                self.write()
        return data

    def write(self) -> None:
        """Write atomically, because the file may be read at any time."""
        self.written = time.monotonic()
        names = ("loader", "batches", "cpu_s", "wall_s")
        draft = self.file.with_suffix(".draft")
        with contextlib.suppress(OSError):  # the check has ended and removed its folder
            draft.write_text(json.dumps({name: getattr(self, name) for name in names}))
            draft.replace(self.file)


class WorkerStart:
    """A loader's `worker_init_fn` that also starts to observe its workers, forked or spawned."""

    def __init__(self, folder: Path, loader: int, given: Callable[[int], None] | None) -> None:
        self.folder, self.loader = folder, loader
        # A loader made from another one has that one's function.
        self.given: Callable[[int], None] | None = (
            given.given if isinstance(given, WorkerStart) else given
        )

    def __call__(self, worker: int) -> None:
        if self.given is not None:
            self.given(worker)
        file = self.folder / f"fetch-{self.loader}-{os.getpid()}.json"
        observe_next_fetcher(Fetching(file, self.loader, time.process_time))


def observe_next_fetcher(fetching: Fetching) -> Callable[[], None]:
    """Time the next fetcher that torch creates here; returns a function that gives up waiting for it.

    Later ones belong to loaders within the dataset, whose cost is part of its batches.
    """
    kinds = sys.modules["torch.utils.data.dataloader"]._DatasetKind
    original = kinds.create_fetcher

    def restore() -> None:
        kinds.create_fetcher = staticmethod(original)

    def create_fetcher(*args: Any, **kwargs: Any) -> Any:
        restore()
        fetcher = original(*args, **kwargs)
        fetcher.fetch = functools.partial(fetching.fetch, fetcher.fetch)
        return fetcher

    kinds.create_fetcher = staticmethod(create_fetcher)
    return restore
