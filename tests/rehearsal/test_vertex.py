"""Emulated hosts of a Vertex AI custom job: worker pools in CLUSTER_SPEC, outputs where AIP_… say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rehearsals import CHEAP, Rehearse
from test_digits import rehearse_digits

from tests.summaries import trained

pytestmark = pytest.mark.long

LIKE = ("rehearsal.like=vertex", "vertex.environment={RAY_worker_niceness: '0'}")


@pytest.mark.soak
def test_digits_train_on_the_second_pool_and_leave_their_results_in_the_bucket(
    tmp_path: Path,
) -> None:
    """The first pool has no GPU, so the job ends with a host that does not train."""
    options = (*LIKE, "train.epochs=1", "tracking.record_ids=true", "data.preprocess_on=[cpu]")
    code, screen, summary, report = rehearse_digits(tmp_path, *options, hosts="cpu=1,gpu=1")
    assert code == 0
    assert summary["status"] == "succeeded"
    cpu, gpu = (f"cmle-training-workerpool{number}-4c1d6d97d0-0" for number in (0, 1))
    groups = {host["host"]: (host["group"], host["type"]) for host in summary["cluster"]["hosts"]}
    assert groups == {gpu: ("gpu", "g2-standard-8"), cpu: ("cpu", "c2-standard-8")}
    assert summary["train_workers_by_host"] == {gpu: 1}
    assert summary["chain_tasks_by_host"].keys() == {cpu}
    assert summary["records"]["read"] == summary["records"]["trained"] == 1437
    assert summary["cost"]["usd_per_hour"] == pytest.approx(1.462, abs=1e-3), "Google's prices"
    run = tmp_path / "runs" / "latest"
    assert trained(run, 0) == 1437
    assert f"[gpu {gpu} head] epoch 1/1 done" in screen
    assert [host["exit_code"] for host in report["hosts"]] == [0, 0]
    assert summary["model"].startswith("/gcs/rehearsal/"), "the mounted bucket of AIP_MODEL_DIR"
    for file in (
        "model/model.safetensors",
        "config.yaml",
        "events.jsonl",
        "report.html",
        "logs/driver.log",
    ):
        assert (run / file).is_file(), file
    assert list((run / "tensorboard").glob("events.*")), "from AIP_TENSORBOARD_LOG_DIR"
    assert list((run / "checkpoints").glob("step-*/manifest.json")), "from AIP_CHECKPOINT_DIR"


def test_the_first_host_ends_the_job_with_the_heads_exit_code(rehearse: Rehearse) -> None:
    """A worker host that always left with 0 would turn the failure into a success."""
    done = rehearse(*CHEAP, *LIKE, "rehearsal.hosts=cpu=1,gpu=1", behaviour="fail")
    first, second = done.codes.values()
    assert first == 1 and second in (0, 1)
    assert done.code == 1
    assert "loss is NaN at step 12" in done.run.failure_reason
    report = json.loads((done.run.run_dir / "rehearsal.json").read_text())
    assert "loss is NaN" in report["failure_reason"]
