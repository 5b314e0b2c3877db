"""Laptop: runs all or the named benchmarks: `python -m benchmarks per_core`."""

from __future__ import annotations

import importlib
import subprocess
import sys
import traceback

from benchmarks.harness import publish

ALL = (
    "per_core",
    "end_to_end",
    "cpu_per_image",
    "receiver",
    "gpu_host",
    "sleeping",
    "limits",
    "field",
    "network",
    "epoch_gap",
    "scale",
    "long_passes",
    "start_up",
    "drop_in",
    "shapes",
    "slow_samples",
    "heterogeneous",
    "s3",
    "small_objects",
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
        try:
            if len(chosen) == 1:
                publish(importlib.import_module(f"benchmarks.{name}").run())
            else:
                # In a process of its own: a failure, or a cluster's token, affects no other.
                subprocess.run([sys.executable, "-m", "benchmarks", name], check=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}; see above")
