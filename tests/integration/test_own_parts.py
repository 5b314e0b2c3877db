"""Parts of the user's own that are wrong: what they cost."""

from __future__ import annotations

from pathlib import Path

from running import run_job


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
