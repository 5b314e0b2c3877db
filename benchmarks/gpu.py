"""GPU host: training of real models on JPEGs, against the same training on synthetic data.

`make bench-gpu`. timm's ResNet-50 and ViT-S/16 in bf16 train on JPEGs (500×375 → 224²) in a real job on this
machine, then on a single image made once per task, which shows the limit of the GPU. Reports images/s, input
wait and GPU utilisation of both. Skipped without a GPU.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.harness import Measure, publish
from benchmarks.jobs import run_job
from benchmarks.loaders.work import write_folder

MODELS = ("resnet50", "vit_small_patch16_224")
SAMPLE_S = 0.5


@dataclass(frozen=True)
class Size:
    """The amount of training; tests use less."""

    records: int = 12_800
    batch: int = 128
    precision: str = "bf16"
    image: int = 224


@dataclass
class Utilization:
    """GPU host: samples the first GPU's utilisation from `nvidia-smi` in a thread."""

    percent: list[float] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Utilization:
        threading.Thread(target=self._work, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()

    def _work(self) -> None:
        command = [
            "nvidia-smi",
            "--id=0",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
        ]
        while not self._over.wait(SAMPLE_S):
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=10, check=True
                )
                self.percent.append(float(done.stdout))
            except (OSError, ValueError, subprocess.SubprocessError):
                return

    def busy(self) -> float | None:
        """The median of the non-zero samples, to exclude start and end."""
        used = [value for value in self.percent if value > 0]
        return statistics.median(used) if used else None


def run() -> list[Measure]:
    """Run the benchmark and return its rows; none without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("skipped: this machine has no GPU that torch can use")
        return []
    return [row for name in MODELS for row in compare(name, Size())]


def compare(model: str, size: Size) -> list[Measure]:
    """One model on JPEGs and on synthetic data."""
    from benchmarks.per_core import photos

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_folder(folder / "data", photos(500, 375), size.records)
        found = {}
        for kind in ("JPEG", "synthetic"):
            with Utilization() as gpu:
                run_dir = run_job(folder, job_of(model, kind, folder, size), timeout_s=900)
            speed = json.loads((run_dir / "summary.json").read_text())["speed"]
            found[kind] = (
                float(speed["steady_samples_per_s"]),
                speed["input_wait_pct"],
                gpu.busy(),
            )
    jpeg, ceiling = found["JPEG"], found["synthetic"]
    rows = [
        Measure(f"training {model}: JPEG", jpeg[0], ceiling[0], "synthetic data", jpeg[0] / ceiling[0],
                None, None, "images/s")
    ]  # fmt: skip
    for at, what in ((1, "input wait"), (2, "GPU utilisation")):
        if jpeg[at] is not None and ceiling[at] is not None:
            rows.append(
                Measure(
                    f"  {model}: {what}",
                    jpeg[at],
                    ceiling[at],
                    "synthetic data",
                    None,
                    None,
                    None,
                    "%",
                )
            )
    return rows


def job_of(model: str, kind: str, folder: Path, size: Size) -> dict[str, Any]:
    """The configuration of one run."""
    return {
        "name": f"gpu-{kind.lower()}",
        "recipe": "gpu_training:GpuTraining",
        "params": {
            "data": str(folder / "data"),
            "model": model,
            "num_classes": 4,
            "image_size": size.image,
            "synthetic": kind == "synthetic",
            "records": size.records,
        },
        "train": {
            "epochs": 1,
            "batch_size": size.batch,
            "precision": size.precision,
            "channels_last": True,
            "lr": 1e-4,
        },
        "tracking": {"tensorboard": False},
    }


if __name__ == "__main__":
    if rows := run():
        publish(rows)
    sys.exit(0)
