"""Laptop: runs all or the named benchmarks: `python -m benchmarks per_core`."""

from __future__ import annotations

import importlib
import sys
import traceback

from benchmarks.harness import publish

ALL = (
    "per_core",
    "end_to_end",
    "receiver",
    "sleeping",
    "limits",
    "network",
    "epoch_gap",
    "scale",
    "start_up",
    "drop_in",
    "shapes",
    "slow_samples",
    "heterogeneous",
    "s3",
    "checkpointing",
    "cache",
)

if __name__ == "__main__":
    chosen = sys.argv[1:] or ALL
    unknown = [name for name in chosen if name not in ALL]
    if unknown:
        sys.exit(f"error: no benchmark {', '.join(unknown)}; choose from: {', '.join(ALL)}")
    failed = []
    for name in chosen:
        # Isolate each benchmark, so that a failure affects no other.
        try:
            publish(importlib.import_module(f"benchmarks.{name}").run())
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}; see above")
