"""Laptop: run all benchmarks, or those named: `python -m benchmarks per_core`."""

from __future__ import annotations

import importlib
import sys

from benchmarks.harness import publish

ALL = (
    "per_core",
    "end_to_end",
    "receiver",
    "sleeping",
    "limits",
    "network",
    "epoch_gap",
    "start_up",
    "checkpointing",
    "cache",
)

if __name__ == "__main__":
    chosen = sys.argv[1:] or ALL
    unknown = [name for name in chosen if name not in ALL]
    if unknown:
        sys.exit(f"error: no benchmark {', '.join(unknown)}; there are: {', '.join(ALL)}")
    for name in chosen:
        # Each by itself: one that fails later does not take these results along.
        publish(importlib.import_module(f"benchmarks.{name}").run())
