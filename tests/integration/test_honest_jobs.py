"""Jobs on honest data end well and without a word about it."""

from __future__ import annotations

from pathlib import Path

import honest
import pytest
from running import run_job


@pytest.mark.parametrize(
    "recipe", [*honest.GIVEN, *(pytest.param(name, marks=pytest.mark.soak) for name in honest.MORE)]
)
def test_an_honest_recipe_trains_without_a_note(
    ray_cluster: None, tmp_path: Path, recipe: str
) -> None:
    train = {"epochs": 1, "batch_size": 4, "workers": 1, "lr": 0.01}
    outcome = run_job(tmp_path, recipe=f"honest:{recipe}", train=train)
    assert outcome.code == 0, outcome.summary.error
    assert (outcome.summary.records.read, outcome.summary.records.trained) == (16, 16)
    assert [event["text"] for event in outcome.summary.events if event["event"] == "note"] == []
