"""A job whose blocks are large beside the store that holds them comes to its end."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.commands import submit

RECIPE = '''
import numpy as np
import ray

from rows import Counting, Numbers


class Wide(Counting):
    """Records of 64 KB, so that a block of 128 has 8 MB: sixteen of them are more than the store takes.

    Their number comes from Ray, so they cannot be opened before Ray is there.
    """

    def read(self, split):
        return Numbers(ray.get(ray.put(self.train_records if split == "train" else self.val_records)))

    def preprocess(self, split):
        return [("widen", lambda batch: {**batch, "wide": np.zeros((len(batch["x0"]), 65536), np.uint8)})]
'''


def test_blocks_that_fill_a_small_store_do_not_end_the_flow(tmp_path: Path) -> None:
    """Ray Data would keep room for all the blocks that a task may have ready, and wait for it for ever."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "wide.py").write_text(RECIPE)
    rows = Path(__file__).resolve().parents[1] / "recipes" / "rows.py"
    (tmp_path / "own" / "rows.py").write_text(rows.read_text())
    job = {
        "recipe": "wide:Wide",
        "params": {"train_records": 1280, "val_records": 128},
        "data": {"block_records": 128},
        "train": {"epochs": 2, "batch_size": 64},
        "cluster": {"cpus": 2, "object_store_mb": 100},
        "tracking": {"tensorboard": False},
    }
    (tmp_path / "own.yaml").write_text(json.dumps(job))
    done = submit("own.yaml", "--source-dir", "own", cwd=tmp_path, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs/latest/summary.json").read_text())
    assert summary["records"]["trained"] == 2 * 1280
