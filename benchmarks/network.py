"""Laptop: samples/s over a 1 Gb/s link: uint8 images against float32 images converted on a CPU host.

A rehearsal of a GPU host and a CPU host in separate namespaces, with links limited by `tc tbf`. Records cost
nothing to make, so the link binds.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Measure
from benchmarks.jobs import events, run_job
from benchmarks.loaders.work import rate

LINK_MBPS = 1000
BATCH, BLOCK = 64, 128
RECORDS = {"uint8": 16_384, "float32": 4_096}
BYTES = {"uint8": 224 * 224 * 3, "float32": 4 * 224 * 224 * 3}
GOAL = 3.5


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        print(f"skipped: emulating a link needs {', '.join(missing)}")
        return []
    found = {dtype: measure(dtype) for dtype in RECORDS}
    ours, peer = found["uint8"], found["float32"]
    name, unit = f"link of {LINK_MBPS} Mb/s", "samples/s"
    ratio = ours / peer
    rows = [Measure(f"{name}: uint8", ours, peer, "float32", ratio, GOAL, ratio >= GOAL, unit)]
    for dtype, samples in found.items():
        most = LINK_MBPS * 1e6 / 8 / BYTES[dtype]
        rows.append(
            Measure(
                f"  {name}, {dtype}: use",
                samples,
                most,
                "the link's rate",
                samples / most,
                None,
                None,
                unit,
            )
        )
    return rows


def measure(dtype: str) -> float:
    """Samples/s of a rehearsed job between 45 % and 95 % of its records.

    Raises:
        RuntimeError: the network is not the job's bottleneck.
    """
    job: dict[str, Any] = {
        "name": f"network-{dtype}",
        "recipe": "payload:Payload",
        "params": {"dtype": dtype, "records": RECORDS[dtype]},
        "data": {"preprocess_on": ["cpu"], "block_records": BLOCK, "shuffle": False},
        "train": {"epochs": 1, "batch_size": BATCH, "threads": 1},
        "cluster": {"object_store_mb": 700, "join_timeout_s": 120},
        "rehearsal": {
            "hosts": "gpu=1,cpu=1",
            "entry": "container",
            "shm_mb": 1024,
            "timeout_s": 240,
        },
        "tracking": {"tensorboard": False, "log_every_steps": 1},
    }
    with tempfile.TemporaryDirectory() as folder:
        run_dir = run_job(
            Path(folder),
            job,
            "--on",
            "rehearsal",
            f"rehearsal.link_mbps={LINK_MBPS}",
            timeout_s=300,
        )
        steps = events(run_dir, "step")
        summary = json.loads((run_dir / "summary.json").read_text())
    trained = summary["records"]["trained"]
    if trained != RECORDS[dtype]:
        raise RuntimeError(f"{trained} of {RECORDS[dtype]} records were trained on")
    found = rate([(step["elapsed_s"], step["epoch_samples"]) for step in steps], RECORDS[dtype])
    print(f"{dtype}: {found:.0f} samples/s; the job's verdict: {summary['bottleneck']}", flush=True)
    return found
