"""Parts of the user's own: a collate, a sink, a strategy; what they do, and what wrong ones cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rebuilding import rebuild
from running import Outcome, run_job
from safetensors.torch import load_file


def test_a_sink_that_fails_is_left_out_and_a_strategy_that_averages_nothing_is_refused(
    ray_cluster: None, tmp_path: Path
) -> None:
    train = {"epochs": 1, "batch_size": 5, "workers": 2, "strategy": "wrong_parts:alone"}
    tracking = {"sinks": ["wrong_parts:Broken"], "tensorboard": False}
    outcome = run_job(tmp_path, recipe="rows:Counting", tracking=tracking, train=train)
    assert outcome.code == 1
    assert "its gradients would not be averaged" in str(outcome.summary.error)
    notes = [event["text"] for event in outcome.summary.events if event["event"] == "note"]
    assert [text for text in notes if "Broken failed and is dropped" in text and "no room" in text]


SECTIONS: dict[str, Any] = {
    "data": {"block_records": 16, "order": "exact", "bad_record_budget": 0.1},
    "train": {"epochs": 2, "batch_size": 6, "workers": 2, "lr": 0.01},
    "tracking": {"record_ids": True, "tensorboard": False},
}


def run(folder: Path, recipe: str, *overrides: str, **params: Any) -> Outcome:
    folder.mkdir(exist_ok=True)
    sections = {**SECTIONS, "recipe": f"collating:{recipe}", "params": params}
    return run_job(folder, *overrides, **sections)


def test_batches_made_on_cpu_hosts_train_the_same_model_also_after_an_interruption(
    ray_cluster: None, tmp_path: Path
) -> None:
    stacked = run(tmp_path / "stacked", "Plain")
    assert stacked.code == 0, stacked.summary.error
    begun = run(tmp_path / "own", "Collated", "train.max_steps=5")
    assert begun.code == 0, begun.summary.error
    whole = run(tmp_path / "rest", "Collated", f"checkpoint.resume={begun.run_dir}")
    assert whole.code == 0, whole.summary.error
    assert [event["step"] for event in whole.summary.events if event["event"] == "resumed"] == [5]
    weights = [
        load_file(outcome.run_dir / "model" / "model.safetensors") for outcome in (stacked, whole)
    ]
    assert all((weights[0][name] == values).all() for name, values in weights[1].items())
    assert whole.summary.metrics.last["val/loss"] == stacked.summary.metrics.last["val/loss"]
    collate = whole.summary.chain[-1]
    assert collate["stage"] == "collate"
    # A batch of 6 travels in whole pages of 4,096 bytes.
    assert 4096 / 6 <= collate["bytes_out"] == round(whole.summary.speed.bytes_per_sample)
    # The last step of the run, made once more on this machine.
    step = rebuild(whole.run_dir, whole.summary.steps, [])
    assert {line.key for line in step.lines} == {str(line.record["name"]) for line in step.lines}
    assert all(line.loss is not None for line in step.lines), step.notes


def test_a_collate_that_fails_ends_the_run_with_its_error(
    ray_cluster: None, tmp_path: Path
) -> None:
    outcome = run(tmp_path / "later", "Collated", fails_at=60)
    assert outcome.code == 1
    assert "collate: ValueError: this one does not fit (collating.py:" in str(outcome.summary.error)


def test_a_ray_dataset_that_fails_ends_the_run_with_its_own_error(
    ray_cluster: None, tmp_path: Path
) -> None:
    train = {"epochs": 1, "batch_size": 16, "scheduler": "none"}
    outcome = run_job(tmp_path, recipe="rows:FromRay", params={"slow_s": -1}, train=train)
    assert outcome.code == 1
    assert str(outcome.summary.error).startswith("ValueError: this row cannot be read")
