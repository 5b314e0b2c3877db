"""Laptop: run all benchmarks, or those named: `python -m benchmarks per_core`."""

from __future__ import annotations

import importlib
import sys

from benchmarks.harness import publish

ALL = ("per_core", "start_up", "sleeping", "limits", "receiver", "checkpointing", "cache")

if __name__ == "__main__":
    chosen = sys.argv[1:] or ALL
    unknown = [name for name in chosen if name not in ALL]
    if unknown:
        sys.exit(f"error: no benchmark {', '.join(unknown)}; there are: {', '.join(ALL)}")
    publish([row for name in chosen for row in importlib.import_module(f"benchmarks.{name}").run()])
