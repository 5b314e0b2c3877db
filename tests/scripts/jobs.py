"""Runs scripts, or with --cluster scripts and recipes on one Ray cluster, and writes the losses of each."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import secrets
import sys
from pathlib import Path

from stoker.hosts.cluster import set_environment

set_environment(secrets.token_hex(32))  # before Ray is imported


def of_recipe(recipe: str) -> list[float]:
    from running import run_job

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
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    lines = [
        line.strip("[]")
        for line in printed.getvalue().splitlines()
        if re.fullmatch(r"[\d., \[\]]+", line)
    ]
    return [float(number) for line in lines for number in line.split(",")]


def cluster() -> contextlib.AbstractContextManager[None]:
    if sys.argv[1] != "--cluster":
        return contextlib.nullcontext()
    from running import one_cluster

    del sys.argv[1]
    return one_cluster()


with cluster():
    found = {
        name: (of_script if name.endswith(".py") else of_recipe)(name) for name in sys.argv[2:]
    }
Path(sys.argv[1]).write_text(json.dumps(found))
