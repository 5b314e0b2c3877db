"""`submit.py peek RUN --step N` on real runs: the batch that was trained, or one line that says why not."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from running import run_job
from typer.testing import CliRunner, Result

from stoker_launcher.command_line import app

pytestmark = pytest.mark.long

JOB: dict[str, Any] = {
    "recipe": "rows:Counting",
    "seed": 5,
    "params": {"train_records": 211, "val_records": 5, "bad": [3, 77], "shard": 40},
    "data": {"block_records": 16, "bad_record_budget": 0.5},
    "tracking": {"record_ids": True, "tensorboard": False, "log_every_steps": 2},
}
PER_STEP = 16


class Run(NamedTuple):
    folder: Path
    trained: dict[tuple[int, int], list[str]]
    """(step, rank) → keys."""


@pytest.fixture(scope="module")
def run(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps on two train workers, and the rest of the epoch, resumed on one."""
    folder = tmp_path_factory.mktemp("peek")
    found = Run(folder / "run", {})
    begun = 0
    for workers, steps in ((2, 3), (1, None)):
        train = {"epochs": 1, "batch_size": 8, "accumulate_steps": 2, "max_steps": steps}
        outcome = run_job(folder, run_dir=found.folder, train={**train, "workers": workers}, **JOB)
        assert outcome.code == 0, outcome.summary.error
        carried = sum(map(len, found.trained.values()))
        for rank in range(workers):
            file = found.folder / f"records/train-epoch-000-rank-{rank}.txt"
            keys = file.read_text().split()[carried:]
            for at in range(0, len(keys), PER_STEP):
                step = begun + at // PER_STEP + 1
                found.trained[step, rank] = keys[at : at + PER_STEP]
        begun = outcome.summary.steps
    assert begun > 6
    return found


def peek(folder: Path, *words: str) -> tuple[Result, list[str]]:
    page = folder.parent / "page.html"
    page.unlink(missing_ok=True)
    result = CliRunner().invoke(app, ["peek", str(folder), "--out", str(page), *words])
    text = page.read_text() if page.is_file() else ""
    return result, re.findall(r'<header><span class="n">(\w+)</span>', text)


def test_every_step_is_what_each_train_worker_took(run: Run) -> None:
    for (step, rank), keys in run.trained.items():
        result, shown = peek(run.folder, "--step", str(step), "--rank", str(rank))
        assert result.exit_code == 0, result.exception
        assert sorted(shown) == sorted(keys), (step, rank)
        assert f"step {step}, epoch 1, {len(keys)} record" in result.output


def test_steps_of_a_run_that_lost_its_train_worker_hold_each_record_once(
    ray_cluster: None, tmp_path: Path
) -> None:
    params = {"train_records": 96, "marker": str(tmp_path / "marker")}
    train = {"epochs": 3, "batch_size": 16, "max_failures": 1}
    outcome = run_job(tmp_path, recipe="rows:DiesOnce", params=params, train=train)
    assert outcome.code == 0 and outcome.summary.notable()["recovered"] == 1
    for epoch in range(3):
        keys = Counter[str]()
        for step in range(6 * epoch + 1, 6 * epoch + 7):
            keys.update(peek(outcome.run_dir, "--step", str(step))[1])
        assert keys == Counter(map(str, range(96))), epoch


def test_each_record_has_its_loss_and_the_worst_comes_first(run: Run) -> None:
    result, _ = peek(run.folder, "--step", "4")
    assert "losses with the weights of step-00000003, 0 steps away" in result.output
    rows = [line.split() for line in result.output.splitlines() if line.strip().startswith("0 ")]
    losses = [(int(key), float(loss)) for _, key, *_, loss in rows]
    assert len(losses) == PER_STEP
    assert [loss for _, loss in losses] == sorted((loss for _, loss in losses), reverse=True)
    # Equal records have equal losses, whatever stands beside them in the batch.
    assert len({(key % 21, loss) for key, loss in losses}) == len({key % 21 for key, _ in losses})


def without(*kinds: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        events = folder / "events.jsonl"
        lines = events.read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["event"] not in kinds]
        events.write_text("".join(kept))

    return change


def configured(section: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        job = yaml.safe_load((folder / "config.yaml").read_text())
        (job[section] if section else job).update(values)
        (folder / "config.yaml").write_text(yaml.safe_dump(job))

    return change


def other_records(folder: Path) -> None:
    """As if the blocks of the run had held others."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in events:
        for row in event["given"] if event["event"] == "given" else []:
            row[4::5] = [ids + 1 for ids in row[4::5]]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))


def other_code(folder: Path) -> None:
    (folder / "code").mkdir()
    (folder / "code" / "chain.py").write_text("SIDE = 32\n")


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "words", "line"),
    [
        (configured("params", train_records=212), "", "params.train_records differs"),
        (configured("params", shard=30), "", "params.shard differs from the run's"),
        (configured("", seed=6), "", "seed was 5 when the checkpoint was written"),
        (nothing, "params.train_records=212", "the training data has changed"),
        (other_records, "", "has different records than in the run"),
        (other_code, "", "the code of the run has changed since it trained this step"),
        (without("given"), "", "no event `given` in events.jsonl"),
        (nothing, "--step 40", "--step 40: the run has trained steps 1 to"),
        (nothing, "--rank 2", "--rank 2: the step had train workers 0 to 1"),
        (nothing, "--split val", "--split: applies to a job only"),
    ],
)
def test_a_batch_that_is_not_the_runs_is_never_shown(
    run: Run, tmp_path: Path, change: Callable[[Path], None], words: str, line: str
) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    change(folder)
    result, shown = peek(folder, "--step", "2", *words.split())
    assert line in str(result.exception) and not shown


@pytest.mark.parametrize(
    ("kinds", "note"),
    [
        (("checkpoint",), "no losses: no checkpoint of this run in"),
        (("step", "epoch", "checkpoint"), "the run did not log this step and may have ended"),
    ],
)
def test_what_the_run_did_not_log_is_said(
    run: Run, tmp_path: Path, kinds: tuple[str, ...], note: str
) -> None:
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    without(*kinds)(folder)
    result, shown = peek(folder, "--step", "1")
    assert note in result.output and len(shown) == 2 * PER_STEP
