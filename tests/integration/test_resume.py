"""A run that is interrupted and goes on equals the one that was not: the same records, the same weights.

`STOKER_INTERRUPTIONS=5` interrupts five times in each way instead of twice; the seed of the steps is
printed and can be given as `STOKER_SEED`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from running import Outcome, run_job
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))
from aws import moto_server

ROOT = Path(__file__).resolve().parents[2]
TIMES = int(os.environ.get("STOKER_INTERRUPTIONS", "2"))
RECORDS, BATCH, EPOCHS = 203, 6, 3


@pytest.fixture
def steps() -> random.Random:
    """Chooses the steps at which a run is interrupted."""
    seed = int(os.environ.get("STOKER_SEED") or time.time_ns() % 100_000)
    print(f"STOKER_SEED={seed}")
    return random.Random(seed)


def sections(trace: Path, workers: int, **params: Any) -> dict[str, Any]:
    """A job of 3 epochs whose records cannot be shared evenly, with dropout, momentum and a schedule."""
    return {
        "recipe": "interrupted:Interrupted",
        "params": {
            "train_records": RECORDS,
            "val_records": 10,
            "bad": [7],
            "trace": str(trace),
            "pause_s": 0.04 * workers,
            **params,
        },
        "data": {"order": "exact", "block_records": 16, "bad_record_budget": 0.01},
        "train": {
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "workers": workers,
            "threads": 1,
            "lr": 0.01,
            "scheduler": "cosine",
        },
    }


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] in kinds]


def history(run_dir: Path, trace: Path, rank: int) -> list[str]:
    """What a rank trained on, step by step: its loss in full and its rows.

    Of steps that were trained again after an interruption the last time counts.
    """
    first = []
    for event in events(run_dir, "train_worker", "resumed"):
        if event["event"] == "resumed":
            first[-1] = event["step"]
        elif event["rank"] == 0:
            first.append(0)
    notes = sorted(trace.glob(f"rank{rank}-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(notes) == len(first)
    steps: list[str] = []
    for begin, path in zip(first, notes, strict=True):
        assert begin <= len(steps)
        steps[begin:] = path.read_text().splitlines()
    return steps


def last_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


def final_metrics(run_dir: Path) -> dict[str, float]:
    metrics = events(run_dir, "epoch")[-1]["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def assert_equal(interrupted: tuple[Path, Path], whole: tuple[Path, Path], workers: int) -> None:
    """Two runs, each as (run directory, trace)."""
    for rank in range(workers):
        assert history(*interrupted, rank) == history(*whole, rank)
    assert final_metrics(interrupted[0]) == final_metrics(whole[0])
    ours, theirs = last_weights(interrupted[0]), last_weights(whole[0])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def uninterrupted(folder: Path, workers: int, **checkpoint: Any) -> tuple[Path, Path]:
    folder.mkdir()
    outcome = run_job(folder, **sections(folder / "trace", workers), checkpoint=checkpoint)
    assert outcome.code == 0, outcome.summary.error
    return outcome.run_dir, folder / "trace"


def assert_every_record_was_trained_once(outcome: Outcome, workers: int) -> None:
    trained = [books for books in outcome.summary.records.epochs if books["split"] == "train"]
    assert [books["epoch"] for books in trained] == list(range(EPOCHS))
    for books in trained:
        assert books["read"] == RECORDS
        assert books["quarantined"] == 1
        assert books["trained"] == RECORDS - 1 - (RECORDS - 1) % workers


def test_killed_train_workers_cost_a_few_steps_and_change_nothing(
    ray_cluster: None, tmp_path: Path, steps: random.Random
) -> None:
    whole = uninterrupted(tmp_path / "whole", 2, every_minutes=0.005)
    taken = events(whole[0], "checkpoint")
    per_epoch = -(-RECORDS // (BATCH * 2))
    assert any(event["step"] % per_epoch for event in taken), "by the clock, within an epoch, on all ranks"
    folder = tmp_path / "killed"
    folder.mkdir()
    job = sections(folder / "trace", 2, ends=[f"worker@{steps.randint(5, 16)}" for _ in range(TIMES)])
    job["train"]["max_failures"] = TIMES
    outcome = run_job(folder, **job, checkpoint={"every_steps": 3})
    assert outcome.code == 0, outcome.summary.error
    resumed = events(outcome.run_dir, "resumed")
    assert len(resumed) == TIMES
    assert any(event["step"] % per_epoch for event in resumed), "within an epoch"
    assert_equal((outcome.run_dir, folder / "trace"), whole, workers=2)
    assert_every_record_was_trained_once(outcome, workers=2)


def submit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "job.yaml", *arguments]
    recipes = ["--source-dir", str(ROOT / "tests/recipes")]
    return subprocess.run([*command, *recipes], cwd=folder, capture_output=True, text=True, timeout=200)


def test_a_stopped_or_killed_job_goes_on_where_it_was_also_from_a_damaged_checkpoint(
    ray_cluster: None, tmp_path: Path, steps: random.Random
) -> None:
    """SIGTERM to the job and SIGKILL to all of its processes, in turn, on changing numbers of CPUs."""
    whole = uninterrupted(tmp_path / "whole", 1)
    folder, trace = tmp_path / "job", tmp_path / "job/trace"
    folder.mkdir()
    ends = [f"{how}@{steps.randint(4, 12)}" for _ in range(TIMES) for how in ("term", "kill")]
    job = sections(trace, 1, ends=ends, process=str(folder / "runs/latest/process.id"))
    job |= {"name": "chain", "tracking": {"tensorboard": False}, "checkpoint": {"every_steps": 3}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    run_dir = folder / "runs/latest"
    for start, end in enumerate(ends):
        done = submit(folder, f"cluster.cpus={1 + start % 3}", "--resume", "auto")
        assert done.returncode == {"term": 143, "kill": 137}[end[:4]], done.stdout + done.stderr
        assert (start > 0) == ("resumed from" in done.stdout)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-3] ^= 4
    (newest / "model.safetensors").write_bytes(content)
    done = submit(folder, "--resume", "runs/latest")
    assert done.returncode == 0, done.stdout + done.stderr
    passed_over = f"checkpoint {newest.name} is passed over: model.safetensors is damaged"
    assert passed_over in done.stdout
    assert len(list((folder / "runs").glob("chain-*"))) == 1, "one run directory for the whole run"
    assert_equal((run_dir, trace), whole, workers=1)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "succeeded"
    assert summary["records"]["trained"] == EPOCHS * (RECORDS - 1)
    assert len([event for event in summary["events"] if event["event"] == "resumed"]) == len(ends)
    again = submit(folder, "seed=5", "--resume", "runs/latest")
    assert again.returncode == 2
    assert "error: seed: 5 here, 0 in step-" in again.stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk of its own")
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(
    ray_cluster: None, tmp_path: Path, small_disk: Path
) -> None:
    # 1 million weights and their momentum: 8 MB, of which one fits.
    job = sections(tmp_path / "trace", 1, width=250_000)
    job["train"]["lr"] = 1e-9
    outcome = run_job(tmp_path, **job, checkpoint={"dir": str(small_disk / "kept"), "every_steps": 5})
    assert outcome.code == 1
    assert f"cannot write the checkpoint {small_disk}/kept/step-000000" in (outcome.summary.error or "")
    assert f"the disk mounted at {small_disk} has" in (outcome.summary.error or "")
    from stoker.training.store import open_store, verify

    store = open_store(str(small_disk / "kept"))
    assert store.names() == ["step-00000005"]
    assert verify(store, "step-00000005") is None


def test_checkpoints_straight_to_s3_and_on_from_there_without_being_told(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    with moto_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="kept")
        outcomes = []
        for name, epochs, more in (("first", 1, {}), ("second", 3, {"stopping_threshold": 1e6})):
            folder = tmp_path / name
            folder.mkdir()
            job = sections(folder / "trace", 1, environment=environment, pause_s=0)
            early = {"monitor": "val/loss", **more} if more else {}
            job["train"] |= {"epochs": epochs, "scheduler": "none", "early_stopping": early}
            outcomes.append(run_job(folder, **job, checkpoint={"dir": "s3://kept/run", "every_steps": 10}))
            assert outcomes[-1].code == 0, outcomes[-1].summary.error
        keys = [item["Key"] for item in client.list_objects_v2(Bucket="kept")["Contents"]]
    resumed = events(outcomes[1].run_dir, "resumed")
    assert [event["step"] for event in resumed] == [34]
    assert resumed[0]["path"] == "s3://kept/run/step-00000034"
    # Early stopping ends it after one more epoch of the two; the summary is of the whole run.
    assert outcomes[1].summary.epochs == 2
    stopped = events(outcomes[1].run_dir, "stopped")
    assert [event["reason"].partition(" ")[0] for event in stopped] == ["early"]
    assert outcomes[1].summary.records.trained == 2 * (RECORDS - 1)
    assert "run/best.json" in keys
    names = {key.split("/")[1] for key in keys if "step-" in key}
    assert names >= {"step-00000060", "step-00000068"}
    assert all(f"run/{name}/manifest.json" in keys for name in names)
    assert (outcomes[1].run_dir / "model/model.safetensors").is_file()
