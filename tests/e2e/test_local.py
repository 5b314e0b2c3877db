"""Whole commands on this machine, as a user types them."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from commands import DIGITS, ROOT, Demo, shown_until, submit, typed
from pyarrow import parquet

from tests.summaries import EVERYWHERE, fields


def summary(folder: Path) -> dict:
    return json.loads((folder / "runs/latest/summary.json").read_text())


def test_the_demo_reaches_97_percent_and_leaves_a_report(demo: Demo) -> None:
    folder, screen = demo
    check(folder, screen)
    assert "params.data" in (folder / "runs/latest/config.yaml").read_text()
    assert (folder / "runs/latest/tensorboard").is_dir()
    assert "input wait" in screen
    # Ray below 2.56, whose workers are not forked, counts them aloud.
    ours = [line for line in screen.splitlines() if "PYTHON worker processes have been started" not in line]
    assert "next" in ours[-1]
    assert not any("raylet" in line for line in ours), "Ray's chatter stays in the log"
    report = (folder / "runs/latest/report.html").read_text()
    for part in (
        "Throughput",
        "Step time breakdown",
        "The chain, stage by stage",
        "Hosts",
        "Ray Data, by operator",
    ):
        assert f">{part}</h" in report, f"{part}: a figure of a real run, not of one made for a test"
    assert "could not be drawn" not in report
    assert "MapBatches(ChainWorker)" in (folder / "runs/latest/logs/ray_data_stats.txt").read_text()
    operators = json.loads((folder / "runs/latest/summary.json").read_text())["operators"]
    chain = next(o for o in operators if o["name"] == "MapBatches(ChainWorker)")
    assert chain["rows"] >= 8 * 1437 and chain["cpu_s"] > 0


def test_any_step_of_the_demo_can_be_looked_at(demo: Demo) -> None:
    done = submit("peek", "runs/latest", "--step", "25", "--out", "step.html", cwd=demo.folder)
    assert done.returncode == 0, done.stderr
    assert "step 25, epoch 2, 64 records" in done.stdout
    assert "losses with the weights of step-" in done.stdout
    assert (demo.folder / "step.html").read_text().count('class="tile') == 64


@pytest.mark.soak
@pytest.mark.parametrize("form", ["parquet", "images"])
def test_digits_reach_97_percent_from_every_form_by_one_changed_line(form: str, tmp_path: Path) -> None:
    done = submit(DIGITS, f"params.data=.data/digits/{form}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check(tmp_path, done.stdout)


def check(folder: Path, screen: str) -> None:
    found = summary(folder)
    assert found["status"] == "succeeded" and fields(found) == EVERYWHERE
    assert found["metrics"]["best"]["val/acc1"] >= 0.97
    assert found["records"]["read"] == 8 * 1437
    assert (folder / "runs/latest/model/model.safetensors").is_file()
    assert "epoch 8/8 done" in screen


def test_ctrl_c_stops_a_recipe_of_the_users_own_with_a_checkpoint(tmp_path: Path) -> None:
    """A regression on Parquet rows, with nothing changed in this repository, until a terminal's Ctrl-C.

    SIGTERM to the launcher: tests/integration/test_resume.py.
    """
    project = tmp_path / "my_project"
    project.mkdir()
    (project / "prices.py").write_text(
        "from stoker.data import read_parquet\n"
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
        "train: {epochs: 5000, batch_size: 50, lr: 0.1}\n"
    )
    process = typed("job.yaml", "--source-dir", "my_project", cwd=tmp_path)
    try:
        shown = shown_until(process, "epoch 20/5000 done")
        process.send_signal(signal.SIGINT)  # as an IDE does; a terminal sends it to the job, too
        rest, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, shown + rest
    assert "stopped: Ctrl-C" in rest
    run = (tmp_path / "runs/latest").readlink()
    command = ["python", str(ROOT / "launcher/submit.py"), "job.yaml", "--source-dir", "my_project"]
    continued = f"continue: {shlex.join(command)} --resume {tmp_path}/runs/{run}"
    assert continued.replace(f"{tmp_path}/", "") in rest
    assert "Traceback" not in rest
    found = summary(tmp_path)
    assert found["status"] == "interrupted"
    assert found["metrics"]["best"]["val/loss"] < 0.01
    assert list((tmp_path / "runs/latest/checkpoints").glob("step-*/manifest.json"))


def test_a_misspelt_relative_path_is_looked_for_where_the_user_typed_it(tmp_path: Path) -> None:
    done = submit(DIGITS, "params.data=.data/digits/webdatast", cwd=tmp_path)
    assert done.returncode == 2
    where = tmp_path / ".data/digits"
    assert done.stderr == f"error: .data/digits/webdatast: no such file or folder ({where} exists)\n"
    assert not list((tmp_path / "runs").glob("*")), "a run that was refused leaves nothing"


SLOW = """
import time

from stoker.recipe import Recipe


class Slow(Recipe):
    def read(self, split):
        print("reading", flush=True)
        time.sleep(300)
"""


def test_ctrl_c_while_data_are_opened_before_ray_is_there(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("recipe: reads:Slow\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "reads.py").write_text(SLOW)
    process = typed("own.yaml", "--source-dir", "own", cwd=tmp_path)
    assert "reading" in shown_until(process, "reading")
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=180)
    assert (process.returncode, "Traceback" in said) == (130, False), said
