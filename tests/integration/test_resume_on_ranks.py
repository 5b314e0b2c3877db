"""Ranks of torch.distributed that continue a pass that other ranks began, by the state of rank 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "fewer_ranks.py"


@pytest.mark.long
@pytest.mark.parametrize("how", ["sampler", "prepared", "dispatch"])
def test_fewer_ranks_have_what_more_have_left_of_a_pass(how: str, tmp_path: Path) -> None:
    """With DistributedSampler, and with Accelerate, which divides batches or reads them on rank 0 alone."""
    if how != "sampler":
        pytest.importorskip("accelerate")
    for ranks, steps in ((3, 2), (2, 4), (1, 1000)):
        started = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                f"--nproc-per-node={ranks}",
                *(str(SCRIPT), how, str(tmp_path), str(steps)),
            ],
            env=os.environ | {"STOKER_LOADER": "process", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert started.returncode == 0, started.stderr
    found = [number for file in tmp_path.glob("*.json") for number in json.loads(file.read_text())]
    assert sorted(found) == [*range(100)]
