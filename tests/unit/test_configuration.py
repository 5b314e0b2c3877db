"""Reading, overriding and showing the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.config.loading import hyperparameter_overrides, load, resolved_yaml, schema_rows
from stoker.config.schema import Config
from stoker.errors import UsageError


def test_the_command_line_wins_over_the_file_and_origins_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: x\ntrain: {epochs: 3, lr: 1e-3}\n")
    resolved = load(path, ["train.epochs=5", "params.model=resnet18"])
    assert resolved.config.train.epochs == 5
    assert resolved.config.train.lr == 0.001
    assert resolved.config.params == {"model": "resnet18"}
    assert resolved.origins["train.epochs"] == "command line"
    assert resolved.origins["train.lr"] == str(path)


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    first = load(None, ["train.lr=0.1", "data.preprocess_on=[cpu, gpu]", "params.deep.key=[1, 2]"])
    path = tmp_path / "job.yaml"
    path.write_text(resolved_yaml(first))
    assert load(path).config == first.config


@pytest.mark.parametrize(
    "words",
    [
        ["--train__lr", "0.1"],
        ["--train.lr", "0.1"],
        ["--train.lr=0.1"],
        ["train.lr=0.1"],
        ["--train__lr=0.1"],
    ],
)
def test_hyperparameters_come_in_many_forms(words: list[str]) -> None:
    assert load(None, hyperparameter_overrides(words)).config.train.lr == 0.1


def test_a_flag_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--train.lr has no value"):
        hyperparameter_overrides(["--train.lr"])


def test_anchors_and_merges_are_read_as_yaml_has_them(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("params: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}, c: *a}\n")
    params = load(tmp_path / "job.yaml").config.params
    assert params == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}


def test_a_mapping_that_holds_itself_is_refused() -> None:
    job: dict[str, Any] = {"params": {"a": []}}
    job["params"]["a"].append(job)
    with pytest.raises(UsageError, match="configuration: an alias refers to itself"):
        load(job)


def test_every_key_has_a_meaning_to_show() -> None:
    rows = list(schema_rows(Config))
    assert len(rows) > 30
    assert not [key for key, _, info in rows if not info.description]


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(None).config.train.epochs = 3  # type: ignore[misc]


def test_the_configuration_of_an_older_run_has_keys_that_are_gone_at_their_defaults(tmp_path: Path) -> None:
    old = {
        "name": "old",
        "data": {"share": None, "max_tokens": None},
        "checkpoint": {"every_minutes": None},
        "vertex": {"entry": "container"},
        "rehearsal": {"cpu_quota": None},
        "sagemaker": {
            "channels": {"a": {"uri": "s3://b/x", "content_type": None, "distribution": "FullyReplicated"}}
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    found = load(tmp_path / "config.yaml")
    assert found.config == load({"name": "old", "sagemaker": {"channels": {"a": {"uri": "s3://b/x"}}}}).config
    assert sorted(found.origins) == ["name", "sagemaker.channels.a.uri"]


@pytest.mark.parametrize("typed", ["none", "None", "null", "'none'"])
def test_none_can_be_typed_where_it_is_a_choice(typed: str) -> None:
    config = load(None, [f"data.cache={typed}", f"train.scheduler={typed}"]).config
    assert (config.data.cache, config.train.scheduler) == ("none", "none")
