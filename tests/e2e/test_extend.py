"""The examples of docs/extend.md, as they stand there: one job of own parts, and a place of one's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from pages import DOCS, examples

SUBMIT = Path(__file__).resolve().parents[2] / "launcher" / "submit.py"
PAGE = DOCS / "extend.md"
RECIPE = """
import torch
import torchvision.transforms.v2  # loads Triton

from jitter import Jitter
from jsonlines import JsonLines
from stoker.recipe import Recipe


class Own(Recipe):
    data: str

    def read(self, split):
        return JsonLines(self.data, split)

    def preprocess(self, split):
        return [Jitter(0.1)]

    def model(self):
        return torch.nn.Linear(1, 1)

    def training_step(self, model, batch):
        return ((model(batch["x"].float()[:, None])[:, 0] - batch["y"]) ** 2).mean()

    def validation_step(self, model, batch):
        return {"loss": self.training_step(model, batch)}

    def metrics(self):
        return {}
"""


def test_an_own_source_transform_sink_and_strategy_train(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, text in {**examples(PAGE.name), "own.py": RECIPE}.items():
        if "/" not in name:
            (source / name).write_text(text)
    for split, files, lines in (("train", 4, 30), ("val", 1, 20)):
        for number in range(files):
            rows = [json.dumps({"x": i / lines, "y": 2 * i / lines}) for i in range(lines)]
            (tmp_path / f"{split}-{number}.jsonl").write_text("\n".join(rows) + "\n")
    yamls = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    job = {"name": "own", "recipe": "own:Own", "params": {"data": str(tmp_path)}}
    for part in map(yaml.safe_load, yamls):
        job |= part
    job["train"] |= {"epochs": 2, "batch_size": 10, "workers": 2}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, str(SUBMIT), "job.yaml", "--source-dir", "source"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "leaked" not in done.stdout + done.stderr, (
        "what a library says when its objects are not collected"
    )
    run = tmp_path / "runs" / "latest"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["records"]["read"], summary["records"]["trained"]) == (240, 240)
    assert summary["train_workers"] == 2
    rows = (run / "losses.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["0", "1", "succeeded"]
    assert float(rows[1].split(",")[1]) == summary["metrics"]["last"]["train/loss"]


def test_the_place_of_an_installed_package_is_found_by_its_name(tmp_path: Path) -> None:
    """`status` asks every place whose run it is; one that is broken says so only where it is named."""
    page = PAGE.read_text()
    [(name, text)] = [(name, text) for name, text in examples(PAGE.name).items() if "/" in name]
    [project] = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(text)
    info = tmp_path / "stoker_nice-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stoker-nice\nVersion: 1.0\n")
    entries = tomllib.loads(project)["project"]["entry-points"]["stoker.places"]
    lines = [f"{key} = {value}" for key, value in {**entries, "broken": "no_such:PLACE"}.items()]
    (info / "entry_points.txt").write_text("\n".join(["[stoker.places]", *lines]))
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}

    def stoker(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(SUBMIT), *words], env=variables, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    job = [str(PAGE.parents[1] / "source_dir/configs/digits.yaml"), f"output_dir={tmp_path}"]
    code, shown = stoker(*job, "--on", "nice", "--dry-run")
    assert code == 0 and "priority low" in shown, shown
    code, shown = stoker(*job, "--on", "broken", "--dry-run")
    assert code == 2 and "--on broken: no_such:PLACE cannot be imported" in shown, shown
    code, shown = stoker("status", str(tmp_path))
    assert code == 2 and "not a run directory" in shown, shown
