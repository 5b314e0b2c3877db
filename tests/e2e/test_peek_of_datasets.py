"""`submit.py peek JOB` of a recipe that reads a `ray.data.Dataset`, as a user types it."""

from __future__ import annotations

from pathlib import Path

from commands import submit

RECIPE = """
from stoker.recipe import Recipe

class Own(Recipe):
    fails: bool = False

    def read(self, split):
        import ray

        rows = ray.data.range(2000 if split == "train" else 20)
        return rows.map(broken if self.fails else doubled)

    def preprocess(self, split):
        return [plus_one]

def doubled(row):
    return {"x": 2.0 * row["id"], "label": row["id"] % 5}

def broken(row):
    raise KeyError("no such file")

def plus_one(batch):
    return {**batch, "y": batch["x"] + 1}
"""


def test_the_first_rows_of_a_dataset_before_and_after_the_chain(tmp_path: Path) -> None:
    """Ray starts on this machine for them, twice here: about 10 s each."""
    (tmp_path / "own.py").write_text(RECIPE)
    (tmp_path / "job.yaml").write_text("name: rows\nrecipe: own:Own\n")
    done = submit("peek", "job.yaml", "-n", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rows: unknown train + unknown val records from a ray.data.Dataset" in done.stdout
    assert "examined 512 train records" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["plus_one", "y", "float64", "0", "1", "…", "1023"] in [line[:7] for line in lines]
    assert (tmp_path / "peek.html").read_text().count('class="tile') == 5
    assert not done.stderr, "nothing of Ray's own chatter"
    failed = submit("peek", "job.yaml", "params.fails=true", cwd=tmp_path)
    assert failed.returncode == 2
    assert "peek: the train dataset failed: KeyError: 'no such file'" in failed.stderr
