"""Whole commands on this machine, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "source_dir/configs/digits.yaml")


def submit(*arguments: str, cwd: Path, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    """`python launcher/submit.py …` in a folder of the user's."""
    command = [sys.executable, str(ROOT / "launcher/submit.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)


def summary(folder: Path) -> dict:
    return json.loads((folder / "runs/latest/summary.json").read_text())


@pytest.mark.parametrize(
    "form",
    [
        "webdataset",
        # The other forms' jobs without a command line: tests/integration/test_cache.py.
        pytest.param("parquet", marks=pytest.mark.soak),
        pytest.param("images", marks=pytest.mark.soak),
    ],
)
def test_digits_reach_97_percent_from_every_form_by_one_changed_line(form: str, tmp_path: Path) -> None:
    done = submit(DIGITS, f"params.data=.data/digits/{form}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary(tmp_path)
    assert found["status"] == "succeeded"
    assert found["metrics"]["best"]["val/acc1"] >= 0.97
    assert found["records"]["read"] == 8 * 1437
    assert (tmp_path / "runs/latest/model/model.safetensors").is_file()
    assert (tmp_path / "runs/latest/tensorboard").is_dir()
    assert "params.data" in (tmp_path / "runs/latest/config.yaml").read_text()
    assert "epoch 8/8 done" in done.stdout
    assert "input wait" in done.stdout
    assert "next" in done.stdout.splitlines()[-1]
    assert "raylet" not in done.stdout + done.stderr, "Ray's chatter stays in the log"
    report = (tmp_path / "runs/latest/report.html").read_text()
    for part in (
        "Throughput",
        "Where the time of a step goes",
        "The chain, stage by stage",
        "CPU use per host",
        "Training images as the model saw them",
    ):
        assert f">{part}</h" in report, f"{part}: a figure of a real run, not of one made for a test"
    assert report.count("data:image/png;base64,") == 16
    assert "could not be drawn" not in report


def test_a_recipe_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    """A regression on Parquet rows, with nothing changed in this repository."""
    project = tmp_path / "my_project"
    project.mkdir()
    (project / "prices.py").write_text(
        "from stoker.data.sources import read_parquet\n"
        "from stoker.recipe import Recipe\n"
        "import torch\n"
        "import torch.nn.functional as F\n"
        "from torch import nn\n"
        "class Prices(Recipe):\n"
        "    data: str\n"
        "    def read(self, split): return read_parquet(self.data, split)\n"
        "    def model(self): return nn.Linear(2, 1)\n"
        "    def training_step(self, model, batch):\n"
        "        x = torch.stack([batch['size'], batch['rooms']], dim=1).float()\n"
        "        return F.mse_loss(model(x).squeeze(1), batch['price'].float())\n"
    )
    rng = np.random.default_rng(0)
    for split, n in (("train", 500), ("val", 100)):
        size, rooms = rng.random(n), rng.random(n)
        (tmp_path / "rows" / split).mkdir(parents=True)
        table = pa.table({"size": size, "rooms": rooms, "price": 3 * size + 2 * rooms + 1})
        parquet.write_table(table, tmp_path / "rows" / split / "rows.parquet")
    (tmp_path / "job.yaml").write_text(
        "name: prices\nrecipe: prices:Prices\nparams: {data: rows}\n"
        "train: {epochs: 20, batch_size: 50, lr: 0.1}\n"
    )
    done = submit("job.yaml", "--source-dir", "my_project", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(tmp_path)["metrics"]["best"]["val/loss"] < 0.01


def test_ctrl_c_in_a_terminal_keeps_a_checkpoint_and_says_so(tmp_path: Path) -> None:
    """SIGTERM to the launcher: tests/integration/test_resume.py."""
    command = [sys.executable, str(ROOT / "launcher/submit.py"), DIGITS, "train.epochs=500"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "epoch 1/500 done" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped: Ctrl-C" in rest
    assert "Traceback" not in rest
    assert summary(tmp_path)["status"] == "interrupted"
    assert list((tmp_path / "runs/latest/checkpoints").glob("step-*/manifest.json"))


def test_a_misspelt_relative_path_is_looked_for_where_the_user_typed_it(tmp_path: Path) -> None:
    done = submit(DIGITS, "params.data=.data/digits/webdatast", cwd=tmp_path)
    assert done.returncode == 2
    lines = [line for line in done.stdout.splitlines() if line.startswith("error")]
    where = tmp_path / ".data/digits"
    assert lines == [f"error: .data/digits/webdatast: no such file or folder ({where} exists)"]


def test_dry_run_writes_nothing_and_show_config_lists_the_recipes_parameters(tmp_path: Path) -> None:
    done = submit(DIGITS, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert "python train.py --config job.yaml" in done.stdout
    assert not (tmp_path / "runs").exists()
    shown = submit(DIGITS, "train.epochs=3", "--show-config", cwd=tmp_path)
    assert "3 (command line)" in shown.stdout
    assert "params.data" in shown.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_fits_a_screen_and_shows_an_example(arguments: list[str], tmp_path: Path) -> None:
    done = submit(*arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 40
    assert "source_dir/configs/digits.yaml" in done.stdout
