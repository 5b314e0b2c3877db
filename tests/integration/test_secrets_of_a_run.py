"""A whole run: nothing that it leaves behind holds a secret."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from running import run_job

from stoker.config import redaction

TOKEN, PASSWORD, TAG, VARIABLE = "tok-4f9a1c77", "Corr3ct horse", "tag-secret-81", "env-secret-52"
DIGITS = str(time.time())[:6]
"""As every time in a run's files has them."""


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())


def test_no_file_of_a_run_holds_a_secret(
    ray_cluster: None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    forget: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow's artefacts lie here
    (folder := tmp_path / "job").mkdir()
    outcome = run_job(
        folder,
        recipe="secretive:Connects",
        params={
            "train_records": 96,
            "hf_token": TOKEN,
            "database": {"user": "ann", "password": PASSWORD, "pin_password": DIGITS},
        },
        data={"bad_record_budget": 0.1},
        train={"epochs": 1, "batch_size": 16},
        tracking={
            "mlflow": {
                "uri": f"sqlite:///{folder}/mlflow.db",
                "tags": {"api_key": TAG, "team": "a"},
            }
        },
        sagemaker={
            "environment": {"HF_TOKEN": VARIABLE},
            "hyperparameters": {"params.hf_token": TOKEN},
        },
    )
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
    expected |= {"driver.log", "manifest.json", "model.json", "mlflow.db", "mlflow.json"}
    assert expected <= {path.name for path in written}
    assert any("tfevents" in path.name for path in written)
    job_file = folder / "job.yaml"  # the user's own
    for secret in (TOKEN, PASSWORD, TAG, VARIABLE):
        holding = [str(path) for path, content in written.items() if secret.encode() in content]
        assert [name for name in holding if name != str(job_file)] == []
    shown = capfd.readouterr()
    assert not [
        secret for secret in (TOKEN, PASSWORD, TAG, VARIABLE) if secret in shown.out + shown.err
    ]
    config = (run_dir / "config.yaml").read_text()
    assert config.count("(redacted)") == 6 and "team: a" in config and "user: ann" in config
    assert all(
        json.loads(line)["time"] > 1e9
        for line in (run_dir / "events.jsonl").read_text().splitlines()
    )
    reason = json.loads((run_dir / "quarantine.jsonl").read_text().splitlines()[0])["reason"]
    assert "401 for https://host/x?token=(redacted)" in reason
