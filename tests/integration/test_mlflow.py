"""Metrics, files and models in MLflow: a real server on loopback, which is also down, slow and forgetful."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from running import run_job

from stoker.config.schema import MlflowConfig
from stoker.events import mlflow
from stoker.events.kinds import StepLogged
from stoker.events.mlflow import MlflowSink
from stoker.events.summary import Metrics, Summary
from stoker.storage.checkpoint_store import CheckpointStore, open_store
from tests.fakes.aws import moto_server
from tests.fakes.mlflow_server import MlflowServer, latest, pairs
from tests.waiting import until

pytestmark = pytest.mark.long

LOAD = """
import sys, mlflow, numpy as np, torch
mlflow.set_tracking_uri(sys.argv[1])
images = np.load(sys.argv[2])
answer = mlflow.pyfunc.load_model(sys.argv[3]).predict(images)
program = mlflow.pytorch.load_model(sys.argv[3])
assert np.array_equal(program(torch.from_numpy(images)).detach().numpy(), answer)
assert "stoker" not in sys.modules
np.save(sys.argv[4], answer)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    made = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    made.start()
    with pytest.MonkeyPatch.context() as patch:
        # One slow commit of the server must not count as a failure.
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
        patch.setattr(mlflow, "INTERRUPTED_S", 200.0)
        yield made
    made.stop()


def test_a_run_with_its_model_stands_in_mlflow_and_tensorboard(
    server: MlflowServer, ray_cluster: None, digits: Path, tmp_path: Path
) -> None:
    tracked = {
        "uri": server.uri,
        "registered_model": "digits",
        "tags": {"team": "numbers"},
        "close_timeout_s": 500,
    }
    outcome = run_job(
        tmp_path,
        name="digits",
        recipe="recipes.digits:Digits",
        params={"data": str(digits / "webdataset")},
        train={
            "epochs": 2,
            "batch_size": 64,
            "optimizer": "adamw",
            "lr": 0.003,
            "scheduler": "cosine",
        },
        tracking={"log_every_steps": 5, "mlflow": tracked},
        export=["safetensors"],
    )
    assert outcome.code == 0, outcome.summary.error
    summary = outcome.summary

    # The files answered like the model; other forms: tests/unit/test_export.py.
    assert [e["format"] for e in summary.exports] == ["safetensors", "torch_export"]
    for entry in summary.exports:
        assert entry["error"] is None
        assert entry["max_abs_diff"] < 1e-4
        assert (outcome.run_dir / "model" / entry["path"]).stat().st_size == entry["bytes"]

    # MLflow: metrics against the global step, parameters, tags, files.
    (run,) = server.runs("digits")
    assert run["info"]["status"] == "FINISHED"
    assert run["info"]["run_name"] == outcome.run_dir.name
    assert summary.tracking["mlflow"]["run_id"] == run["info"]["run_id"]
    shown = latest(run)
    for name, value in summary.metrics.last.items():
        assert shown[name] == pytest.approx(value), name
    assert {name: shown[f"best/{name}"] for name in summary.metrics.best} == pytest.approx(
        summary.metrics.best
    )
    assert shown["data/quarantined"] == 0
    assert any(name.startswith("system/") and "cpu_utilization" in name for name in shown)
    events = [
        json.loads(line) for line in (outcome.run_dir / "events.jsonl").read_text().splitlines()
    ]
    steps = [(e["step"], e["loss"]) for e in events if e["event"] == "step"]
    assert server.history(run, "train/step_loss") == steps
    epochs = [(e["step"], e["metrics"]["val/acc1"]) for e in events if e["event"] == "epoch"]
    assert server.history(run, "val/acc1") == epochs
    assert len(epochs) == 2
    params, tags = pairs(run, "params"), pairs(run, "tags")
    assert params["train.lr"] == "0.003"
    assert params["recipe"] == "recipes.digits:Digits"
    assert tags["team"] == "numbers"
    assert tags["stoker.place"] == "local"
    assert tags["stoker.status"] == "succeeded"
    files = server.ask("artifacts/list", run_id=run["info"]["run_id"])["files"]
    assert {"config.yaml", "summary.json"} <= {file["path"] for file in files}

    # The registered model predicts in a process that knows neither Stoker nor the recipe.
    import numpy as np
    import torch

    registered = server.ask("registered-models/get", name="digits")["registered_model"]
    assert [v["version"] for v in registered["latest_versions"]] == ["1"]
    images = np.random.default_rng(0).integers(0, 256, (7, 1, 32, 32), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    words = [
        server.uri,
        str(tmp_path / "images.npy"),
        "models:/digits/1",
        str(tmp_path / "answer.npy"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    program = torch.export.load(outcome.run_dir / "model/model.pt2").module()
    expected = program(torch.from_numpy(images)).detach().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "answer.npy"), expected, rtol=1e-4, atol=1e-4)

    # TensorBoard: the same names, steps and values.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(outcome.run_dir / "tensorboard")).Reload()
    drawn = [(e.step, e.value) for e in board.Scalars("train/step_loss")]
    assert drawn == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in steps]
    for name, value in summary.metrics.last.items():
        assert board.Scalars(name)[-1].value == pytest.approx(value, rel=1e-5), name
        assert board.Scalars(name)[-1].step == summary.steps
    assert {"data/quarantined", "perf/input_wait_pct"} <= set(board.Tags()["scalars"])


def test_a_job_whose_server_is_down_ends_well_and_names_what_is_missing(
    ray_cluster: None, tmp_path: Path
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but nobody listens: the connection is refused
        nowhere = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        outcome = run_job(
            tmp_path,
            name="later",
            recipe="rows:Counting",
            train={"epochs": 1, "batch_size": 20},
            tracking={"mlflow": {"uri": nowhere}},
        )
    assert outcome.code == 0
    assert outcome.summary.status == "succeeded"
    log = (outcome.run_dir / "logs/console.log").read_text()
    (missing,) = [line for line in log.splitlines() if "lacks part of this run" in line]
    assert re.search(r": \d+ metric values, and the tags, files, ", missing)
    assert str(outcome.run_dir) in missing
    assert "Traceback" not in log


def recorded(folder: Path, name: str) -> Path:
    run_dir = folder / name
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(
        yaml.safe_dump({"name": "recorded", "train": {"epochs": 9}})
    )
    return run_dir


def train(sink: MlflowSink, steps: range) -> None:
    for step in steps:
        rates = {"epoch_samples": 10 * step, "elapsed_s": 1.0 * step, "wait_s": 0.1 * step}
        sink.on_event(
            StepLogged(time=1.7e9 + step, epoch=0, step=step, loss=1 / step, lr=0.1, **rates)
        )


def finished(steps: int, status: str = "succeeded") -> Summary:
    return Summary(status=status, steps=steps, metrics=Metrics(best={"train/loss": 0.5}))  # type: ignore[arg-type]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointStore]:
    """Checkpoints that go straight to S3: of the host nothing else outlives the run."""
    import boto3

    with moto_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="kept")
        yield open_store("s3://kept/run")


def test_what_a_server_missed_in_mid_run_is_sent_when_it_is_back_and_the_same_run_goes_on(
    server: MlflowServer, tmp_path: Path, kept: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow, "SEND_EVERY_S", 0.2)
    monkeypatch.setattr(mlflow, "RETRY_EVERY_S", 0.5)
    settings = MlflowConfig(uri=server.uri, run_name="restarted", close_timeout_s=500)
    said: list[str] = []
    sink = MlflowSink(
        settings, "recorded", recorded(tmp_path, "first"), {}, kept=kept, tell=said.append
    )
    train(sink, range(1, 301))
    until(lambda: not sink.rows)

    def told() -> str:
        return "\n".join(said)

    server.stop()
    train(sink, range(301, 401))
    until(lambda: "does not accept data" in told())
    time.sleep(2)  # several attempts more
    assert told().count("does not accept data") == 1
    server.start()
    until(lambda: "answers again" in told())
    sink.close(finished(400, "interrupted"))
    (run,) = server.runs("recorded")
    assert run["info"]["status"] == "KILLED"
    assert server.history(run, "train/step_loss") == [(s, 1 / s) for s in range(1, 401)]
    assert len(said) == 2

    # A restart on another host finds the run through what was kept with the checkpoints.
    again = recorded(tmp_path, "second")
    (again / "config.yaml").write_text(
        yaml.safe_dump({"name": "recorded", "train": {"epochs": 12}})
    )
    second = MlflowSink(
        settings, "recorded", again, {}, kept=open_store(kept.where), tell=said.append
    )
    train(second, range(401, 411))
    second.close(finished(410))
    assert len(said) == 2, "nothing more was to be said"
    (run,) = server.runs("recorded")
    assert run["info"]["status"] == "FINISHED"
    assert len(server.history(run, "train/step_loss")) == 410
    assert pairs(run, "params")["train.epochs"] == "9"
    assert pairs(run, "tags")["stoker.changed.train.epochs"] == "12"


def test_a_server_that_never_answers_costs_the_end_no_more_than_its_deadline(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = MlflowConfig(uri=uri, timeout_s=300, close_timeout_s=1.5)
        told: list[str] = []
        sink = MlflowSink(settings, "recorded", recorded(tmp_path, "silent"), {}, tell=told.append)
        train(sink, range(1, 50))
        started = time.monotonic()
        sink.close(finished(49))
        assert time.monotonic() - started < 100, "not the deadline of a request"
        (said,) = told
        assert said.startswith(
            f"MLflow at {uri} lacks part of this run (not done within 2 s): 196 metric values"
        )
