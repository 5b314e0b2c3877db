"""What a script's loader tells its run: how long training waited for batches."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

import stoker
from stoker import DataLoader
from stoker.events.bottleneck import verdict
from stoker.events.kinds import event_of
from stoker.events.recorder import Recorder
from stoker.events.summary import Summary
from stoker.loader import pass_timer


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No optimizer has made a step, whatever earlier tests of this process did."""
    pass_timer._count_optimizer_steps()
    monkeypatch.setattr(pass_timer, "_optimizer_steps", [0])
    monkeypatch.setattr(pass_timer, "EVERY_S", 1e9)
    monkeypatch.setenv("STOKER_EVENTS", str(tmp_path / "events"))
    monkeypatch.setenv("STOKER_LOADER", "process")
    return tmp_path / "events"


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_batch_counts_and_the_times_begin_with_the_first(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def batches() -> Iterator[Any]:
        for wait in (50.0, 0.5, 0.25):
            now[0] += wait
            yield range(8)

    for _ in stoker.timed(batches()):
        now[0] += 1.5
    (event,) = told(events)
    assert (event["steps"], event["samples"], event["wait_s"]) == (3, 24, 0.75)
    assert event["elapsed_s"] == 1.5 + 0.5 + 1.5 + 0.25, "between the first batch and the last"


def test_a_validation_is_no_training_even_with_gradients_on(events: Path) -> None:
    """As Hugging Face's Trainer and Accelerate's examples validate, within and after training."""
    data = TensorDataset(torch.arange(20.0))
    train, val = DataLoader(data, batch_size=4), DataLoader(data, batch_size=10)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        for number, (x,) in enumerate(train):
            (weight * x).sum().backward()
            optimizer.step()
            if number in (1, 3):
                for _ in val:
                    with torch.no_grad():
                        assert weight is not None
        with torch.no_grad():
            list(val)
    list(val)
    found = told(events)
    assert [(event["steps"], event["samples"]) for event in found] == [(5, 20)] * 2
    assert all(0 <= event["wait_s"] <= event["elapsed_s"] for event in found)


@pytest.mark.parametrize("kind", ["batch_sampler", "accelerate", "no collation", "pairs of sizes"])
def test_samples_are_counted_as_they_come(kind: str, events: Path) -> None:
    accelerate = pytest.importorskip("accelerate") if kind == "accelerate" else None
    data = TensorDataset(torch.arange(22.0))
    sampler = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    if kind == "pairs of sizes":
        loader: Any = DataLoader(data, batch_sampler=[[0, 1], [2, 3, 4], [5]])
    elif kind == "no collation":
        loader = DataLoader(data, batch_size=None)
    else:
        loader = DataLoader(data, batch_sampler=sampler)
    if accelerate:
        loader = accelerate.Accelerator(cpu=True).prepare(loader)
    assert len(list(loader)) > 2
    wanted = {"pairs of sizes": (3, 6), "no collation": (22, 22)}.get(kind, (6, 22))
    (event,) = told(events)
    assert (event["steps"], event["samples"]) == wanted


ONE = {
    "event": "loader",
    "time": 1.0,
    "rank": 0,
    "steps": 11,
    "samples": 88,
    "wait_s": 1.0,
    "elapsed_s": 4.0,
}


def number_in_a_new_process() -> int:
    spec = importlib.util.find_spec(pass_timer.__name__)
    assert spec and spec.loader
    spec.loader.exec_module(fresh := importlib.util.module_from_spec(spec))
    return int(fresh.PassTimer().number)


def test_a_script_that_is_started_again_adds_to_what_it_did_before(tmp_path: Path) -> None:
    summary, found = Summary(name="job", train_workers=1), []
    recorder = Recorder(tmp_path, summary, 0.0)
    for number in (number_in_a_new_process(), number_in_a_new_process()):
        for steps in (3, 11):
            recorder.on_event(
                event_of(ONE | {"loader": number, "steps": steps, "samples": 8 * steps})
            )
            found.append(summary.steps)
    assert found == [3, 11, 14, 22]


def test_the_summary_has_the_share_and_the_rate_of_all_ranks(tmp_path: Path) -> None:
    summary = Summary(name="job", place="local", started="", train_workers=2)
    recorder = Recorder(tmp_path, summary, 0.0)
    recorder.on_event(event_of(ONE | {"loader": 0}))
    recorder.on_event(
        event_of(ONE | {"loader": 1, "rank": 1, "wait_s": 3.0})
    )  # ranks do alike: the first tells for all
    recorder.on_event(
        event_of(ONE | {"loader": 1, "steps": 31, "samples": 248, "wait_s": 3.0, "elapsed_s": 12.0})
    )
    recorder.on_event(
        event_of({"event": "metrics", "time": 2.0, "rank": 0, "step": 1, "metrics": {"loss": 0.5}})
    )
    recorder.close(summary)
    assert summary.steps == 42, "all batches, also those that no time is measured for"
    assert summary.speed.input_wait_pct == 25.0 and summary.speed.samples_per_s == 40.0
    terms = summary.speed.step_terms_ms
    assert (terms["wait_production"], terms["compute"]) == (100.0, 300.0), "they add up to a step"
    assert "25 % of each step waits for data" in verdict(summary).headline
