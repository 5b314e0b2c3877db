"""Whole commands on this machine, as a user types them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from commands import DIGITS, Demo, shown_until, submit, typed

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
    ours = [
        line
        for line in screen.splitlines()
        if "PYTHON worker processes have been started" not in line
    ]
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
        assert f">{part}</h" in report, (
            f"{part}: a figure of a real run, not of one made for a test"
        )
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
def test_digits_reach_97_percent_from_every_form_by_one_changed_line(
    form: str, tmp_path: Path
) -> None:
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


def test_a_misspelt_relative_path_is_looked_for_where_the_user_typed_it(tmp_path: Path) -> None:
    done = submit(DIGITS, "params.data=.data/digits/webdatast", cwd=tmp_path)
    assert done.returncode == 2
    where = tmp_path / ".data/digits"
    assert done.stderr == f"error: {where}/webdatast: no such file or folder ({where} exists)\n"
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
