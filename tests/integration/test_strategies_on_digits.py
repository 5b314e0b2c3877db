"""The digits job on one train worker, and on two with ddp or fsdp: one training, three ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run_job

TOLERANCE = 1e-3
"""Of the final losses, relative: AdamW makes rounding errors larger; seen were 2e-7 and 1.2e-5."""
GLOBAL_BATCH, STEPS = 64, 22


@pytest.mark.soak
def test_ddp_fsdp_and_a_single_worker_reach_the_same_losses(
    ray_cluster: None, digits: Path, tmp_path: Path
) -> None:
    found = {}
    for name, strategy, workers in (("single", "ddp", 1), ("ddp", "ddp", 2), ("fsdp", "fsdp", 2)):
        (tmp_path / name).mkdir()
        outcome = run_job(
            tmp_path / name,
            recipe="normless:Digits",
            params={"data": str(digits / "parquet")},
            data={"order": "exact"},
            train={
                "strategy": strategy,
                "workers": workers,
                "batch_size": GLOBAL_BATCH // workers,
                # Whole steps: of an epoch's last 29 records two train workers leave one.
                "max_steps": STEPS,
                "epochs": 1,
                "optimizer": "adamw",
                "lr": 0.003,
                "scheduler": "cosine",
                "threads": 1,
            },
        )
        assert outcome.code == 0, outcome.summary.error
        assert outcome.summary.steps == STEPS
        found[name] = outcome.summary.metrics.last
        print(name, {key: value for key, value in found[name].items() if key.startswith(("train", "val"))})
    for metric in ("train/loss", "val/loss"):
        for name in ("ddp", "fsdp"):
            assert found[name][metric] == pytest.approx(found["single"][metric], rel=TOLERANCE)
    assert found["single"]["val/loss"] < 2.0, "it has learnt: ten classes by chance are 2.3"
