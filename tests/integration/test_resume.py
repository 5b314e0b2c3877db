"""A run that is interrupted and goes on equals the one that was not: the same records, the same weights.

`STOKER_INTERRUPTIONS=5` (`make soak`) interrupts five times in each way, in a run that is longer by as much,
and by SIGTERM, too; the seed of the steps is printed and can be given as `STOKER_SEED`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from running import Outcome, run_job
from safetensors.torch import load_file

from tests.fakes.aws import moto_server

ROOT = Path(__file__).resolve().parents[2]
TIMES = int(os.environ.get("STOKER_INTERRUPTIONS", "1"))
WAYS = {"worker": 0, "kill": 137} if TIMES == 1 else {"worker": 0, "term": 143, "kill": 137}
"""The interruptions of a round, and what the job's command ends with; 0: it goes on by itself."""
RECORDS = 203
BATCH, WORKERS = (12, 1) if TIMES == 1 else (6, 2)
STEPS = -(-RECORDS // (BATCH * WORKERS))
"""Of an epoch."""
EPOCHS = 1 + 2 * TIMES
"""A round of interruptions takes 27 steps at most, and those between a SIGTERM and its answer."""
EXPORTS = ["safetensors", "torchscript"]


def sections(trace: Path, **params: Any) -> dict[str, Any]:
    """A job whose records cannot be shared evenly, with dropout, momentum and a schedule.

    It would train for an epoch more, but early stopping counts to `EPOCHS` and ends it.
    """
    never_enough = {"monitor": "train/loss", "min_delta": 1e9, "patience": EPOCHS - 1}
    return {
        "name": "chain",
        "recipe": "interrupted:Interrupted",
        "params": {
            "train_records": RECORDS,
            "val_records": 10,
            "bad": [7],
            "trace": str(trace),
            "pause_s": 0.03 * WORKERS,
            **params,
        },
        "data": {"order": "exact", "block_records": 16, "bad_record_budget": 0.01},
        "train": {
            "epochs": EPOCHS + 1,
            "batch_size": BATCH,
            "workers": WORKERS,
            "threads": 1,
            "lr": 0.01,
            "scheduler": "cosine",
            "early_stopping": never_enough,
            "max_failures": TIMES,
        },
        "tracking": {"tensorboard": False},
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


def assert_equal(interrupted: tuple[Path, Path], whole: tuple[Path, Path]) -> None:
    for rank in range(WORKERS):
        assert history(*interrupted, rank) == history(*whole, rank)
    assert final_metrics(interrupted[0]) == final_metrics(whole[0])
    ours, theirs = last_weights(interrupted[0]), last_weights(whole[0])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert best(interrupted[0]) == best(whole[0])


def best(run_dir: Path) -> tuple[Any, Any]:
    note = json.loads((run_dir / "checkpoints/best.json").read_text())
    return note, json.loads((run_dir / "model/model.json").read_text())["checkpoint"]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    import boto3

    with moto_server() as environment, pytest.MonkeyPatch.context() as here:
        for name, value in environment.items():
            here.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="kept")
        yield environment


@pytest.fixture(scope="module")
def whole(
    ray_cluster: None, s3: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    folder = tmp_path_factory.mktemp("whole")
    kept = {"every_steps": 2, "keep": 4, "save_top_k": 2}
    outcome = run_job(folder, **sections(folder / "trace", environment=s3), checkpoint=kept)
    assert outcome.code == 0, outcome.summary.error
    return outcome


def submit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launcher/submit.py"), "job.yaml", *arguments]
    recipes = ["--source-dir", str(ROOT / "tests/recipes")]
    return subprocess.run(
        [*command, *recipes], cwd=folder, capture_output=True, text=True, timeout=500
    )


@pytest.mark.timeout(max(600, 300 * TIMES))
def test_a_run_that_is_killed_and_stopped_and_damaged_equals_the_whole_one(
    whole: Outcome, tmp_path: Path
) -> None:
    """Each round: SIGKILL to a train worker, then to all processes of the job.

    On changing numbers of CPUs; before its last start the newest checkpoint gets a wrong bit. It takes two
    starts of a whole job, as a user has them; `make soak` has five rounds, with SIGTERM to the launcher.
    """
    seed = int(os.environ.get("STOKER_SEED", "5347"))
    chance = random.Random(seed)
    steps = [chance.randint(3, 9) for _ in range(len(WAYS) * TIMES)]
    steps[0] = max(steps[0], 6)  # behind the first checkpoint, which the recipe waits for
    ends = [f"{how}@{step}" for how, step in zip(list(WAYS) * TIMES, steps, strict=True)]
    print(f"STOKER_SEED={seed}: {' '.join(ends)}")
    trace, run_dir = tmp_path / "trace", tmp_path / "runs/latest"
    job = sections(trace, ends=ends, process=str(run_dir / "process.id"))
    job |= {"checkpoint": {"every_steps": 3, "save_top_k": 2}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    for start, code in enumerate([code for code in WAYS.values() if code] * TIMES):
        done = submit(tmp_path, f"cluster.cpus={1 + start % 3}", "--resume", "auto")
        assert done.returncode == code, done.stdout + done.stderr
        # The first start goes on after its train worker, too.
        assert "resumed from" in done.stdout
        assert start or (
            "restarting training" in done.stdout and "training again after" in done.stdout
        )
    newest = max((run_dir / "checkpoints").glob("step-*"))
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-3] ^= 4
    (newest / "model.safetensors").write_bytes(content)
    outcome = run_job(tmp_path, run_dir=run_dir.resolve(), **job)
    assert outcome.code == 0, outcome.summary.error
    passed_over = f"skipping checkpoint {newest.name}: model.safetensors is damaged"
    assert passed_over in (run_dir / "logs/console.log").read_text()
    assert len(list((tmp_path / "runs").glob("chain-*"))) == 1, (
        "one run directory for the whole run"
    )

    assert_equal((run_dir, trace), (whole.run_dir, whole.run_dir.parent / "trace"))
    lost, recovered = events(run_dir, "train_worker_lost"), events(run_dir, "recovered")
    assert len(lost) == len(recovered) == TIMES
    assert all(event["cause"].startswith("train worker") for event in lost)
    assert all(0 <= event["data_s"] < event["seconds"] for event in recovered)
    resumed = events(run_dir, "resumed")
    assert len(resumed) == len(WAYS) * TIMES
    assert any(event["step"] % STEPS for event in resumed), "within an epoch"
    taken = events(whole.run_dir, "checkpoint")
    assert any(event["step"] % STEPS for event in taken), (
        "by the clock, within an epoch, on all ranks"
    )
    for summary in (outcome.summary, whole.summary):
        assert summary.status == "succeeded"
        assert summary.epochs == EPOCHS
        trained = [books for books in summary.records.epochs if books["split"] == "train"]
        assert [books["epoch"] for books in trained] == list(range(EPOCHS))
        assert [books["read"] for books in trained] == [RECORDS] * EPOCHS
        assert [books["quarantined"] for books in trained] == [1] * EPOCHS
        assert [books["trained"] for books in trained] == [RECORDS - 1] * EPOCHS
        assert [event["reason"][:14] for event in summary.events if event["event"] == "stopped"][
            -1:
        ] == ["early stopping"]
    told = [event for event in outcome.summary.events if event["event"] == "resumed"]
    assert len(told) == len(resumed), "the summary is of the whole run"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk of its own")
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(
    ray_cluster: None, tmp_path: Path, small_disk: Path
) -> None:
    # 1 million weights and their momentum: 8 MB, of which one fits.
    job = sections(tmp_path / "trace", width=250_000)
    job["train"] |= {"lr": 1e-9, "workers": 1, "max_failures": 0}
    outcome = run_job(
        tmp_path, **job, checkpoint={"dir": str(small_disk / "kept"), "every_steps": 5}
    )
    assert outcome.code == 1
    checkpoint, disk = (
        f"{small_disk}/kept/step-00000010",
        f"the disk mounted at {small_disk} (12 MB) is full",
    )
    assert f"cannot write the checkpoint {checkpoint}: {disk}" in (outcome.summary.error or "")
    from stoker.storage.checkpoint_store import open_store, verify

    store = open_store(str(small_disk / "kept"))
    assert store.names() == ["step-00000005"]
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    refused = run_job(tmp_path, **job, checkpoint={"dir": str(small_disk / "kept")})
    assert refused.code == 2 and (refused.summary.error or "").endswith(disk)
    assert verify(store, "step-00000005") is None


def test_a_run_on_new_hosts_finds_its_checkpoints_in_s3_without_being_told(
    whole: Outcome, s3: dict[str, str], tmp_path: Path
) -> None:
    """From within an epoch to the same end; started once more, it only writes its model, in another form."""
    import boto3

    client = boto3.client("s3")
    within = max(
        path for path in whole.run_dir.glob("checkpoints/step-*") if int(path.name[5:]) % STEPS
    )
    for folder in whole.run_dir.glob("checkpoints/step-*"):
        for file in folder.iterdir() if folder <= within else ():
            client.upload_file(str(file), "kept", f"run/{folder.name}/{file.name}")
    outcomes = []
    for name, export in (("second", []), ("third", EXPORTS)):
        folder = tmp_path / name
        folder.mkdir()
        job = sections(folder / "trace", environment=s3)
        kept = {"dir": "s3://kept/run", "save_top_k": 2}
        outcomes.append(run_job(folder, **job, checkpoint=kept, export=export))
        assert outcomes[-1].code == 0, outcomes[-1].summary.error
    keys = {item["Key"] for item in client.list_objects_v2(Bucket="kept")["Contents"]}
    last = f"step-{EPOCHS * STEPS:08d}"
    assert {f"run/{last}/manifest.json", "run/best.json"} <= keys
    found = [
        [event["path"] for event in events(outcome.run_dir, "resumed")] for outcome in outcomes
    ]
    assert found == [[f"s3://kept/run/{within.name}"], [f"s3://kept/run/{last}"]]
    for outcome in outcomes:
        assert outcome.summary.epochs == EPOCHS
        assert outcome.summary.records.trained == EPOCHS * (RECORDS - 1)
    assert final_metrics(outcomes[0].run_dir) == final_metrics(whole.run_dir)
    weights = load_file(outcomes[1].run_dir / "model/model.safetensors")
    theirs = load_file(whole.run_dir / "model/model.safetensors")
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)
    assert [form["format"] for form in outcomes[1].summary.exports] == EXPORTS
    assert all(form["max_abs_diff"] is not None for form in outcomes[1].summary.exports)
