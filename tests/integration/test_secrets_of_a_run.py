"""Whole runs: nothing one leaves behind holds a secret, and a forged checkpoint executes nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import Attack
from running import Outcome, run_job

from stoker.checkpoints import format as checkpoint
from stoker.config import redaction
from stoker.storage.checkpoint_store import MANIFEST, sha256

TOKEN, PASSWORD, TAG, VARIABLE = "tok-4f9a1c77", "Corr3ct horse", "tag-secret-81", "env-secret-52"
DIGITS = str(time.time())[:6]
"""As every time in a run's files has them."""


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())


def job(folder: Path, *overrides: str, **train: Any) -> Outcome:
    folder.mkdir(exist_ok=True)
    return run_job(
        folder,
        *overrides,
        recipe="secretive:Connects",
        params={
            "train_records": 96,
            "hf_token": TOKEN,
            "database": {"user": "ann", "password": PASSWORD, "pin_password": DIGITS},
        },
        data={"bad_record_budget": 0.1},
        train={"epochs": 1, "batch_size": 16, **train},
        tracking={"mlflow": {"uri": f"sqlite:///{folder}/mlflow.db", "tags": {"api_key": TAG, "team": "a"}}},
        sagemaker={"environment": {"HF_TOKEN": VARIABLE}, "hyperparameters": {"params.hf_token": TOKEN}},
    )


def test_no_file_of_a_run_holds_a_secret_and_a_forged_checkpoint_executes_nothing(
    ray_cluster: None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    forget: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow's artefacts lie here
    outcome = job(tmp_path / "first")
    assert outcome.code == 0, outcome.summary.error
    assert outcome.summary.records.quarantined == 1
    run_dir = outcome.run_dir
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    expected = {
        "config.yaml",
        "summary.json",
        "events.jsonl",
        "quarantine.jsonl",
        "report.html",
        "console.log",
    }
    expected |= {"driver.log", "meta.json", "model.json", "mlflow.db", "mlflow.json"}
    assert expected <= {path.name for path in written}
    assert any("tfevents" in path.name for path in written)
    job_file = tmp_path / "first" / "job.yaml"  # the user's own
    for secret in (TOKEN, PASSWORD, TAG, VARIABLE):
        holding = [str(path) for path, content in written.items() if secret.encode() in content]
        assert [name for name in holding if name != str(job_file)] == []
    shown = capfd.readouterr()
    assert not [secret for secret in (TOKEN, PASSWORD, TAG, VARIABLE) if secret in shown.out + shown.err]
    config = (run_dir / "config.yaml").read_text()
    assert config.count("(redacted)") == 6 and "team: a" in config and "user: ann" in config
    assert all(json.loads(line)["time"] > 1e9 for line in (run_dir / "events.jsonl").read_text().splitlines())
    reason = json.loads((run_dir / "quarantine.jsonl").read_text().splitlines()[0])["reason"]
    assert "401 for https://host/x?token=(redacted)" in reason

    kept = run_dir / "checkpoints"
    newest = sorted(kept.glob("step-*"))[-1]
    mark = tmp_path / "executed"
    state = torch.load(newest / checkpoint.STATE, weights_only=True)
    torch.save({**state, "scheduler": Attack(mark)}, newest / checkpoint.STATE)
    sums = json.loads((newest / MANIFEST).read_text())
    sums[checkpoint.STATE] = sha256(newest / checkpoint.STATE)
    (newest / MANIFEST).write_text(json.dumps(sums))
    second = job(tmp_path / "second", f"checkpoint.resume={run_dir}", "tracking.mlflow.uri=null", epochs=2)
    assert second.code == 1
    assert not mark.exists()
    error = second.summary.error or ""
    assert "could run code; not loaded" in error and str(newest) in error and "\n" not in error
    assert second.summary.steps == 6, "nothing was trained"
