"""The real job, as a user types it: same accuracy as local, every record once, whatever happens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rehearsals import PATIENT, SAME_PRIORITY, new_name

from tests.summaries import EVERYWHERE, fields, trained

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "source_dir/configs/digits.yaml")


def rehearse_digits(
    folder: Path, *arguments: str, hosts: str = "gpu=1,cpu=2"
) -> tuple[int, str, dict[str, Any], dict[str, Any]]:
    options = [
        f"name={new_name()}",
        f"rehearsal.hosts={hosts}",
        "rehearsal.timeout_s=540",
        SAME_PRIORITY,
        *arguments,
        "--on",
        "rehearsal",
    ]
    command = [sys.executable, "-c", PATIENT, DIGITS, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=560)
    print(done.stdout, done.stderr)
    run = folder / "runs" / "latest"
    files = [json.loads((run / name).read_text()) for name in ("summary.json", "rehearsal.json")]
    return done.returncode, done.stdout, files[0], files[1]


@pytest.mark.soak
def test_digits_train_as_well_as_locally_and_on_every_host(tmp_path: Path) -> None:
    """The whole demo."""
    code, screen, summary, report = rehearse_digits(tmp_path)
    assert code == 0
    assert summary["status"] == "succeeded" and summary["place"] == "rehearsal"
    assert fields(summary) == EVERYWHERE
    assert summary["metrics"]["best"]["val/acc1"] >= 0.97
    assert summary["records"]["read"] == summary["records"]["trained"] == 8 * 1437
    assert set(summary["chain_tasks_by_host"]) >= {"algo-2", "algo-3"}
    assert summary["train_workers_by_host"] == {"algo-1": 1}, "the training only on the GPU host"
    groups = {host["host"]: host["group"] for host in summary["cluster"]["hosts"]}
    assert groups == {"algo-1": "gpu", "algo-2": "cpu", "algo-3": "cpu"}
    types = {host["host"]: host["type"] for host in summary["cluster"]["hosts"]}
    assert types == {"algo-1": "ml.g5.xlarge", "algo-2": "ml.c5.xlarge", "algo-3": "ml.c5.xlarge"}
    assert summary["cost"]["usd_per_hour"] == 1.816
    assert f"${summary['cost']['usd']:.2f}" in screen and "estimated, prices of" in screen
    assert [host["exit_code"] for host in report["hosts"]] == [0, 0, 0]
    assert (tmp_path / "runs/latest/model/model.safetensors").is_file()
    assert (tmp_path / "runs/latest/logs/algo-2.log").is_file()
    assert "[gpu algo-1 head] epoch 8/8 done" in screen
    assert "sagemaker-training-toolkit" not in screen
    assert "sagemaker-training-toolkit" in (tmp_path / "runs/latest/logs/algo-1.log").read_text()


STEPS = 23
"""Of an epoch."""
RECIPE = """
import socket

from recipes.digits import Digits
from stoker.data import RecordTransform


class MadeBy(RecordTransform):
    def __call__(self, record, rng):
        return {**record, "host": int(socket.gethostname()[-1])}


class Shared(Digits):
    # Says when both CPU hosts have made records, and later, after two epochs, that it may be stopped.

    def preprocess(self, split):
        return [*super().preprocess(split), MadeBy()]

    def model(self):
        self._makers, self._steps, self._both = set(), 0, 0
        return super().model()

    def training_step(self, model, batch):
        if model.training:
            self._steps += 1
            self._makers |= {*batch["host"].tolist()}
            if not self._both and self._makers >= {2, 3}:
                self._both = self._steps
                print("both CPU hosts have made records", flush=True)
            if self._both and self._steps == max(self._both + 25, 2 * {STEPS} + 5):
                print("it may be stopped", flush=True)
        return super().training_step(model, batch)
"""
OPTIONS = (
    "recipe=shared:Shared",
    "--source-dir=source",
    "rehearsal.entry=container",
    "data.order=exact",
    "data.block_records=32",
    "tracking.record_ids=true",
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that loses a CPU host and is then stopped within an epoch, as spot capacity is."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(ROOT / "source_dir" / "recipes", folder / "source" / "recipes")
    (folder / "source" / "shared.py").write_text(RECIPE.replace("{STEPS}", str(STEPS)))
    lost, stopped = "kill:algo-3@/both CPU hosts have made records/", "term:all@/it may be stopped/"
    faults = f"rehearsal.faults=['{lost}', '{stopped}']"
    code, _, summary, report = rehearse_digits(folder, "train.epochs=500", faults, *OPTIONS)
    assert code == 143
    assert summary["status"] == "interrupted"
    assert [host["exit_code"] for host in report["hosts"]] == [143, 0, 137]
    hosts = {host["host"]: (host["group"], host["type"]) for host in summary["cluster"]["hosts"]}
    cpu = ("cpu", "ml.c5.xlarge")
    assert hosts == {"algo-1": ("gpu", "ml.g5.xlarge"), "algo-2": cpu, "algo-3": cpu}
    assert set(summary["chain_tasks_by_host"]) >= {"algo-2", "algo-3"}
    assert summary["train_workers_by_host"] == {"algo-1": 1}, "the training only on the GPU host"
    return folder


def test_a_lost_host_and_a_sigterm_cost_no_record(stopped: Path) -> None:
    run = stopped / "runs/latest"
    epochs = json.loads((run / "summary.json").read_text())["steps"] // STEPS
    assert epochs >= 2
    for epoch in range(epochs):
        assert trained(run, epoch) == 1437, "every record once, the lost host's too"


def test_a_stopped_job_goes_on_with_fewer_hosts(stopped: Path) -> None:
    from stoker.checkpoints import format as checkpoint
    from stoker.storage.checkpoint_store import open_store

    newest = checkpoint.newest_valid(
        open_store(str(stopped / "runs" / "latest" / "checkpoints"), False)
    )
    assert newest is not None
    content = checkpoint.load_checkpoint(newest)
    assert content.weights and content.state
    epoch = content.meta["next_epoch"]
    assert content.meta["position"]["epoch"] == epoch
    name = json.loads((stopped / "runs/latest/summary.json").read_text())["name"]
    assert content.meta["job"] == content.meta["service_job"] == name, "as in TRAINING_JOB_NAME"

    code, _, summary, _ = rehearse_digits(
        stopped, f"train.epochs={epoch + 1}", *OPTIONS, "--resume", "runs/latest", hosts="gpu=1"
    )
    assert code == 0
    resumed = [event for event in summary["events"] if event["event"] == "resumed"]
    assert [event["step"] for event in resumed] == [content.meta["step"]]
    assert summary["status"] == "succeeded" and fields(summary) == EVERYWHERE
    assert len(summary["cluster"]["hosts"]) == 1 and summary["cost"]["usd_per_hour"] == 1.408
    assert (stopped / "runs/latest/model/model.safetensors").is_file()
    assert summary["records"]["read"] == summary["records"]["trained"] == (epoch + 1) * 1437
    assert trained(stopped / "runs/latest", epoch) == 1437, (
        "every record of the interrupted epoch once"
    )
