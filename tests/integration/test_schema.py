"""The schema of a split on a real cluster: fixed on the head, checked wherever blocks go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import run_job
from streaming import Train

from stoker.config.loading import Resolved
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.serve.opening import discover, open_data


def config(recipe: str, **changes: Any) -> Config:
    data = {"block_records": 8, "bad_record_budget": 0.5, "order": "exact", **changes}
    return Config.model_validate(
        {"recipe": recipe, "data": data, "train": {"epochs": 1, "batch_size": 16}, "seed": 1}
    )


def batches(train: Train) -> dict[str, list[Any]]:
    ids = [list(step) for step in train.steps("train", 0)]
    found: dict[str, list[Any]] = {}
    for batch in train.kept():
        for name, column in batch.items():
            found.setdefault(name, []).extend(
                column if isinstance(column, list) else column.tolist()
            )
    assert found["__id"] == [one for step in ids for one in step]
    return found


def test_rows_of_a_ray_dataset_with_a_null_keep_their_numbers(ray_cluster: None) -> None:
    train = Train(config("holes:RayRows", shuffle=False), keeps=True)
    found = batches(train)
    (bad,) = train.events("quarantined")
    train.close()
    assert (bad["key"], bad["reason"]) == ("k7", "column 'x' is None")
    rows = [i for i in range(60) if i != 7]
    assert found["x"] == [2**53 + i for i in rows][: len(found["x"])]
    assert found["word"] == [f"w{i}" for i in rows]
    assert found["v"] == [[i / 2, i / 4] for i in rows]


def test_text_labels_of_a_ray_dataset_are_classes(ray_cluster: None) -> None:
    def worded(**params: Any) -> Config:
        params = {"data": "dog", "image_size": 8, "augment": "none", **params}
        return discover(
            Resolved(
                config("holes:Worded", shuffle=False).model_copy(update={"params": params}), {}
            )
        )

    columns = {"image_column": "img", "label_column": "what"}
    job = worded(**columns)
    assert (job.params["num_classes"], job.params["class_names"]) == (2, ["cat", "dog"])
    train = Train(job, keeps=True)
    found = batches(train)
    train.close()
    assert found["label"] == [1, 0, 1] * 4
    with pytest.raises(
        UsageError, match="val has the label bird, which is no class of train: cat, dog"
    ):
        worded(data="bird", **columns)
    with pytest.raises(UsageError) as refused:
        worded()
    assert "params.label_column" in refused.value.problems[1]


def test_records_that_lack_a_column_are_quarantined_by_every_task(ray_cluster: None) -> None:
    train = Train(config("holes:Optional"), keeps=True)
    found = batches(train)
    bad = train.events("quarantined")
    train.close()
    assert {one["key"] for one in bad} == {str(i) for i in range(101) if i % 3 == 1}
    assert {one["reason"] for one in bad} == {"no column 'more', which other records have"}
    assert set(found["more"]) == {1} and len(found["more"]) + len(bad) == 101


def test_a_first_record_that_ends_its_process_does_not_end_the_head(ray_cluster: None) -> None:
    data = open_data(config("holes:FirstKills"))
    assert data.chains["train"].schemas == ()
    assert [sorted(schema.columns) for schema in data.chains["val"].schemas] == [
        ["__id", "x0", "x1", "y"]
    ]


def test_a_chain_that_other_processes_cannot_load_does_not_end_the_head(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends a process that cancels a task while its error arrives; so none is cancelled."""
    monkeypatch.setattr("ray.cancel", lambda *_, **__: pytest.fail("cancelled"))
    data = open_data(config("holes:OnlyHere"))
    assert data.chains["train"].schemas == ()
    assert data.chains["val"].schemas


@pytest.mark.parametrize("shift", ["0", "1"])
def test_a_resumed_run_compares_the_block_that_it_makes_again(
    ray_cluster: None, tmp_path: Path, shift: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"recipe": "rows:Shifted", "data": {"order": "exact", "block_records": 32}}
    train = {"epochs": 1, "batch_size": 10}
    monkeypatch.setenv("SHIFT", "0")
    begun = run_job(tmp_path, train={**train, "max_steps": 2}, **job)
    assert begun.code == 0, begun.summary.error
    monkeypatch.setenv("SHIFT", shift)
    resumed = {"train": train, "checkpoint": {"resume": str(begun.run_dir)}}
    ended = run_job(tmp_path, run_dir=tmp_path / "resumed", **resumed, **job)
    assert ended.code == 0, ended.summary.error
    lines = (ended.run_dir / "events.jsonl").read_text().splitlines()
    assert sum("has other values than before" in line for line in lines) == int(shift)
