"""Trains recipes and runs scripts one after the other on one Ray cluster; writes their losses."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import secrets
import sys
from pathlib import Path

from stoker.bootstrap.cluster import set_environment

set_environment(secrets.token_hex(32))  # before Ray is imported

from running import one_cluster, run_job  # noqa: E402


def of_recipe(recipe: str) -> list[float]:
    """Of every step of an epoch in the order in which the records lie."""
    folder = Path(recipe.partition(":")[0]).resolve()
    folder.mkdir()
    outcome = run_job(
        folder,
        recipe=recipe,
        data={"shuffle": False, "order": "exact"},
        train={"epochs": 1, "batch_size": 64, "threads": 1},
        tracking={"log_every_steps": 1, "tensorboard": False},
    )
    assert outcome.code == 0, outcome.summary.error
    events = map(json.loads, (outcome.run_dir / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


def of_script(path: str) -> list[float]:
    """What it prints at its end."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return list(json.loads(printed.getvalue().splitlines()[-1]))


with one_cluster():
    found = {name: (of_script if name.endswith(".py") else of_recipe)(name) for name in sys.argv[1:]}
Path("losses.json").write_text(json.dumps(found))
