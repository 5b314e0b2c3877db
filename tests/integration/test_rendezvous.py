"""What PyTorch opens for its ranks is reached at the cluster's address alone; training ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from running import run_job


@pytest.mark.parametrize("workers", [1, 2])
def test_the_ranks_of_a_recipe_open_no_port_to_the_rest_of_the_network(
    ray_cluster: None, tmp_path: Path, workers: int
) -> None:
    train = {"epochs": 1, "batch_size": 8, "workers": workers, "threads": 1}
    outcome = run_job(tmp_path, recipe="rows:Listening", train=train)
    assert outcome.code == 0, outcome.summary.error
    # Ray Train alone waits 12 s for an actor that looks for the dashboard, where there is none.
    classes = {actor["ActorClassName"] for actor in ray._private.state.actors().values()}
    assert "TrainController" in classes
    assert "PlacementGroupCleaner" not in classes
