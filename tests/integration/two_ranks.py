"""Two processes with gloo, started once: each test module that needs ranks runs its cases in them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

MODULES = (
    "test_step_on_two_ranks",
    "test_strategies",
    "test_exact_resume",
    "test_finite_on_ranks",
    "test_metrics_on_ranks",
)
"""Each has a `cases(rank, folder)` that both ranks run and whose answer its tests read."""
COLLECTIVE_TIMEOUT_S = 300
"""Only ends a rank whose partner has failed."""


def run(folder: Path) -> dict[str, list[Any]]:
    import torch

    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, __file__, str(folder)], env={**os.environ, **path}, check=True)
    parts = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
    return {name: [part[name] for part in parts] for name in MODULES}


def _process(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", timeout=limit, rank=rank, world_size=2
    )
    found: dict[str, Any] = {}
    for name in MODULES:
        try:
            found[name] = importlib.import_module(name).cases(rank, f"{folder}/{name}")
        except Exception:
            found[name] = traceback.format_exc()
    torch.save(found, Path(folder) / f"rank-{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Both ranks are forks of this process, which imports once what they need."""
    import timm.optim  # noqa: F401
    import torch

    for name in MODULES:
        importlib.import_module(name)
    torch.multiprocessing.start_processes(_process, (sys.argv[1],), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main()
