"""What a script's loader tells its run: how long training waited for batches."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

from stoker import DataLoader
from stoker.events.bottleneck import verdict
from stoker.events.kinds import event_of
from stoker.events.recorder import Recorder
from stoker.events.summary import Summary
from stoker.loader import pass_timer


@pytest.fixture(autouse=True)
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No optimizer has made a step, whatever earlier tests of this process did."""
    pass_timer._count_optimizer_steps()
    monkeypatch.setattr(pass_timer, "_optimizer_steps", [0])
    monkeypatch.setattr(pass_timer, "_over", [])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pass_timer.time, "perf_counter", lambda: now[0])
    return now


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_batch_counts_and_the_times_begin_with_the_first(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_EVENTS", str(tmp_path / "events"))
    one = pass_timer.PassTimer()
    for waits, trains in ((50.0, 1.0), (0.5, 1.5), (0.25, 0.75)):
        asked = clock[0]
        clock[0] += waits
        one.took(asked, 8)
        clock[0] += trains
    one.tell()
    one.tell()  # nothing new
    (event,) = told(tmp_path / "events")
    assert (event["steps"], event["samples"], event["wait_s"]) == (3, 24, 0.75)
    assert event["elapsed_s"] == 1.0 + 0.5 + 1.5 + 0.25, "between the first batch and the last"


def test_a_loop_tells_of_its_training_and_not_of_its_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_EVENTS", str(tmp_path / "events"))
    monkeypatch.setenv("STOKER_LOADER", "process")
    monkeypatch.setattr(pass_timer, "EVERY_S", 1e9)
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=4)
    for _ in range(2):
        list(loader)
        with torch.no_grad():
            list(loader)
    found = told(tmp_path / "events")
    assert [event["steps"] for event in found] == [5, 5]
    assert len({event["loader"] for event in found}) == 2
    assert all(0 <= event["wait_s"] <= event["elapsed_s"] for event in found)


@pytest.fixture
def no_step_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("STOKER_EVENTS", str(tmp_path / "events"))
    monkeypatch.setenv("STOKER_LOADER", "process")
    monkeypatch.setattr(pass_timer, "EVERY_S", 1e9)
    return tmp_path / "events"


def counted(path: Path) -> dict[int, tuple[int, int]]:
    latest = {event["loader"]: event for event in told(path)}
    return {n: (event["steps"], event["samples"]) for n, event in latest.items() if event["steps"]}


def test_a_validation_with_gradients_on_is_no_training(no_step_yet: Path) -> None:
    """As Hugging Face's Trainer and Accelerate's examples validate: before, within and after training."""
    data = TensorDataset(torch.arange(20.0))
    train, val = DataLoader(data, batch_size=4), DataLoader(data, batch_size=10)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    list(val)
    for number, (x,) in enumerate(train):
        (weight * x).sum().backward()
        optimizer.step()
        if number in (1, 3):
            for _ in val:
                with torch.no_grad():
                    assert weight is not None
    list(val)
    assert list(counted(no_step_yet).values()) == [(5, 20)]


@pytest.mark.parametrize("kind", ["batch_sampler", "accelerate", "no collation", "pairs of sizes"])
def test_samples_are_counted_as_they_come(kind: str, no_step_yet: Path) -> None:
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
    assert list(counted(no_step_yet).values()) == [wanted]


ONE = {
    "event": "loader",
    "time": 1.0,
    "rank": 0,
    "steps": 11,
    "samples": 88,
    "wait_s": 1.0,
    "elapsed_s": 4.0,
}


def test_a_pass_that_was_no_training_after_all_is_taken_out_of_the_summary(tmp_path: Path) -> None:
    summary = Summary(name="job", train_workers=1)
    recorder = Recorder(tmp_path, summary, 0.0)
    recorder.on_event(event_of(ONE | {"loader": 0}))
    recorder.on_event(
        event_of({"event": "loader", "time": 2.0, "rank": 0, "loader": 0, "steps": 0})
    )
    recorder.on_event(event_of(ONE | {"loader": 1, "samples": 352}))
    recorder.close(summary)
    assert (summary.steps, summary.speed.samples_per_s) == (11, 80.0)


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
