"""`submit.py peek RUN --step N`: the batch that the run trained, or one line that says why there is none.

The runs are made by the coordinator's own passes in this process: every block goes through its chain, what
each train worker takes is remembered, and events are written as in a run.
"""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from stoker.config.loading import load
from stoker.errors import UsageError
from stoker.events.kinds import Event
from stoker.protocol import ID_COLUMN, KEY_COLUMN, DataCursor
from stoker.read.sources import ID_MODULUS
from stoker.serve.accounting import ChainCosts
from stoker.serve.cursor import about
from stoker.serve.items import ReadyBlock
from stoker.serve.opening import open_data
from stoker.serve.passes import Passes, ServiceState
from stoker.serve.recipe_pass import RecipeAttempt
from stoker.serve.shards import LoadedSplit, blocks_of
from stoker_launcher.command_line import app

FIGURES = {"loss": 1.0, "lr": 0.1, "epoch_samples": 0, "elapsed_s": 0.0, "wait_s": 0.0}


class Run:
    def __init__(self, folder: Path, *, params: dict[str, Any], **sections: Any) -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        job = {"name": "look", "recipe": "rows:Counting", "params": params, "seed": 5, **sections}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(job))
        (self.folder / "summary.json").write_text(json.dumps({"status": "succeeded"}))
        self.step = 0
        self.trained: dict[tuple[int, int], list[str]] = {}
        """(step, rank) → keys."""

    def take(self, event: Event) -> None:
        self.log(event.event, **event.values())

    def log(self, event: str, **values: Any) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    def train(
        self,
        workers: int,
        steps: int | None = None,
        start: dict[str, Any] | None = None,
        late_step: int = 0,
    ) -> Any:
        """One epoch of an attempt, or the first steps of one; its place then.

        With `late_step`, the attempt before has lost a train worker; another one still logs that step.
        """
        overrides = [
            "tracking.record_ids=true",
            *(f"{k}={v}" for k, v in (start or {}).get("keys", {}).items()),
        ]
        config = load(self.folder / "config.yaml", overrides).config
        data = open_data(config)
        chains = {split: pickle.dumps(chain) for split, chain in data.chains.items()}
        passes = Passes(config, data.sources, chains)
        plan = passes.identity(data.identity("train"))
        cursor = start["cursor"] if start else DataCursor(epoch=0, plan=plan)
        self.log("attempt", **about(cursor, workers, config), ahead=bool(late_step))
        if late_step:
            self.log("step", step=late_step, epoch=cursor.epoch, **FIGURES)
        self.step = start["step"] if start else 0
        costs = {split: ChainCosts() for split in ("train", "val")}
        attempt = RecipeAttempt(
            0, workers, passes, data.totals, cursor, ServiceState(self.take, 0, costs)
        )
        stream = attempt.open["train", cursor.epoch]
        epoch = passes.plan("train", cursor.epoch, cursor)
        loaded = LoadedSplit(data.sources["train"], data.chains["train"])
        rest = passes.rest(epoch, cursor)
        shards = rest.take(rest.left)
        if config.data.order == "any":
            random.Random(workers).shuffle(shards)  # whichever is ready first
        blocks = []
        for work in shards:
            for columns, report in blocks_of(loaded, epoch, work):
                attempt.deliver(stream, ReadyBlock(report, "", str(len(blocks))))
                blocks.append(columns)
        attempt.produced(stream)
        assert not attempt.failure
        begun, ids, feed = self.step, 0, 0
        while steps is None or self.step - begun < steps:
            window: dict[int, list[str]] = {}
            for _ in range(config.train.accumulate_steps):
                for rank in range(workers):
                    portion = stream.portion(feed, rank)
                    if portion is not None:
                        given = [feed, rank, *stream.slices(feed, rank)]
                        self.log("given", epoch=cursor.epoch, before=begun, given=[given])
                    for part in portion.blocks if portion else []:
                        rows = blocks[int(part.block)]
                        window.setdefault(rank, []).extend(rows[KEY_COLUMN][part.start : part.stop])
                        ids += int(rows[ID_COLUMN][part.start : part.stop].sum())
                feed += 1 if portion else 0
            if not window:
                break
            self.step += 1
            self.trained.update({(self.step, rank): list(keys) for rank, keys in window.items()})
            self.log("step", step=self.step, epoch=cursor.epoch, **FIGURES)
        if steps is None:
            return None
        # Its train workers have rows of a step more than they train.
        given = [feed, 0, *stream.slices(feed, 0)]
        self.log("given", epoch=cursor.epoch, before=begun, given=[given])
        return {"cursor": stream.position(feed, ids % ID_MODULUS), "step": self.step}

    def forget(self, kind: str) -> None:
        events = self.folder / "events.jsonl"
        lines = events.read_text().splitlines(keepends=True)
        events.write_text("".join(line for line in lines if json.loads(line)["event"] != kind))

    def peek(self, *words: str) -> Result:
        return CliRunner().invoke(
            app, ["peek", str(self.folder), "--out", str(self.folder.parent / "p.html"), *words]
        )

    def rebuilt(self, step: int) -> dict[int, list[str]]:
        from stoker_launcher.advise.peek.peek_run import rebuild

        found: dict[int, list[str]] = {}
        for line in rebuild(self.folder, step, []).lines:
            found.setdefault(line.rank, []).append(line.key)
        return found

    def of_step(self, step: int) -> dict[int, list[str]]:
        return {
            rank: keys for (number, rank), keys in sorted(self.trained.items()) if number == step
        }


SMALL: dict[str, Any] = {"params": {"train_records": 60}, "train": {"batch_size": 8, "epochs": 1}}
ORDERS = pytest.mark.parametrize("order", ["any", "exact"])
BLOCKS = {"block_records": 16, "bad_record_budget": 0.5}
EXACT = {"order": "exact", **BLOCKS}


@ORDERS
@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "accumulate", "remainder"),
    [(1, 3, "drop"), (2, 1, "pad"), (2, 3, "drop"), (3, 1, "drop"), (3, 3, "pad")],
)
def test_every_step_is_what_each_train_worker_took(
    tmp_path: Path, workers: int, accumulate: int, remainder: str, order: str
) -> None:
    run = Run(
        tmp_path,
        params={"train_records": 211, "bad": [3, 77, 150], "shard": 40},
        data={**BLOCKS, "order": order, "remainder": remainder},
        train={"batch_size": 8, "accumulate_steps": accumulate, "epochs": 1},
    )
    run.train(workers)
    for step in [*random.Random(7).sample(range(1, run.step + 1), min(run.step, 6)), run.step]:
        assert run.rebuilt(step) == run.of_step(step), step


@ORDERS
@pytest.mark.long
def test_a_run_that_was_resumed_on_other_train_workers(tmp_path: Path, order: str) -> None:
    run = Run(
        tmp_path,
        params={"train_records": 211, "bad": [3, 77], "shard": 40},
        data={**BLOCKS, "order": order},
        train={"batch_size": 8, "epochs": 1},
    )
    place = run.train(2, steps=5)
    beyond = run.train(2, steps=3, start=place)
    assert beyond["step"] == 8
    run.train(3, start=place)  # went back to the checkpoint of step 5
    for step in range(1, run.step + 1):
        assert run.rebuilt(step) == run.of_step(step), step


def test_steps_that_the_attempt_before_logs_after_its_loss_are_its_own(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        params={"train_records": 96, "shard": 20},
        data=BLOCKS,
        train={"batch_size": 8, "epochs": 1},
    )
    run.train(1, steps=5)
    run.train(2, steps=2, late_step=6)  # without a checkpoint
    assert run.rebuilt(2) == run.of_step(2) and len(run.of_step(2)) == 2
    assert run.rebuilt(4) == run.of_step(4) and len(run.of_step(4)) == 1
    assert sum(map(len, run.rebuilt(6).values())) == 8


@pytest.mark.long
def test_each_record_has_its_loss_by_the_nearest_checkpoint_and_the_worst_comes_first(
    tmp_path: Path,
) -> None:
    import torch

    from stoker.checkpoints.format import Content, save
    from stoker.storage.checkpoint_store import open_store

    run = Run(tmp_path, data=EXACT, **SMALL)
    run.train(1)
    store = open_store(str(run.folder / "checkpoints"))
    for step, weight in ((3, 1.0), (7, 9.0)):
        weights = {"weight": torch.tensor([[weight, 0.0]]), "bias": torch.zeros(1)}
        save(store, Content(weights, {}, {"step": step}))
        run.log("checkpoint", path=f"step-{step:08d}", epoch=0, step=step)
    result = run.peek("--step", "4")
    assert "losses with the weights of step-00000003, 0 steps away" in result.output
    keys = sorted(run.trained[4, 0], key=lambda key: -(int(key) % 3))
    # Off by x1: record i has the loss (i % 3)².
    rows = [line.split() for line in result.output.splitlines() if line.strip().startswith("0 ")]
    assert [(row[1], float(row[-1])) for row in rows] == [
        (key, float((int(key) % 3) ** 2)) for key in keys
    ]


def test_losses_come_from_checkpoints_of_this_run_alone(tmp_path: Path) -> None:
    import torch

    from stoker.checkpoints.format import Content, save
    from stoker.storage.checkpoint_store import open_store

    run = Run(tmp_path, checkpoint={"dir": "ckpt"}, data=EXACT, **SMALL)
    run.train(1)
    weights = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}
    for step, writer in ((3, "own"), (4, "other"), (5, "own")):
        meta = {"step": step, "run": writer}
        save(open_store(str(tmp_path / "ckpt")), Content(weights, {}, meta))
    whole = f"checkpoint.dir={tmp_path}/ckpt"
    assert "no losses: no checkpoint of this run in ckpt" in run.peek("--step", "5").output
    assert "no losses: no checkpoint of this run" in run.peek("--step", "5", whole).output
    for step in (3, 4):
        run.log("checkpoint", path=f"s3://b/step-{step:08d}", epoch=0, step=step, run="own")
    assert "losses with the weights of step-00000003" in run.peek("--step", "5", whole).output


def test_what_cannot_be_rebuilt_is_refused_in_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path, **SMALL)
    with pytest.raises(UsageError, match=r"no event `given` in events\.jsonl"):
        run.rebuilt(1)
    run.train(1)
    with pytest.raises(UsageError, match="--step 40: the run has trained steps 1 to 8"):
        run.rebuilt(40)
    assert "--split: applies to a job only" in str(
        run.peek("--step", "1", "--split", "val").exception
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"params": {"train_records": 61, "shard": 20}},
            "the training data has changed|params.train_records",
        ),
        ({"params": {"train_records": 60, "shard": 30}}, "params.shard differs from the run's"),
        ({"seed": 6}, "seed was 5 when the checkpoint was written"),
    ],
)
def test_a_batch_of_other_data_is_never_shown(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    run = Run(
        tmp_path, params={"train_records": 60, "shard": 20}, data=EXACT, train={"batch_size": 8}
    )
    run.train(1)
    job = yaml.safe_load((run.folder / "config.yaml").read_text())
    (run.folder / "config.yaml").write_text(yaml.safe_dump({**job, **change}))
    with pytest.raises(UsageError, match=line):
        run.rebuilt(2)


def test_a_block_whose_ids_are_not_those_of_the_run_ends_the_look(tmp_path: Path) -> None:
    run = Run(tmp_path, data=EXACT, **SMALL)
    run.train(1)
    events = run.folder / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert all(len(json.dumps(line["given"])) <= 60 for line in lines if line["event"] == "given")
    first = next(line for line in lines if line["event"] == "given")["given"][0]
    told, other = (f"{[*first[2:4], ids]}"[1:-1] for ids in (first[4], first[4] + 1))
    events.write_text(events.read_text().replace(told, other))
    with pytest.raises(
        UsageError, match="block 0 of shard 0 has different records than in the run"
    ):
        run.rebuilt(2)


def test_a_step_beyond_the_last_logged_one_is_shown_with_a_note(tmp_path: Path) -> None:
    run = Run(tmp_path, data=BLOCKS, **SMALL)
    run.train(1)
    run.forget("step")
    assert "the run did not log this step" in run.peek("--step", "7").output
    assert run.rebuilt(8) == run.of_step(8)


def test_one_train_workers_part_on_the_screen_and_as_a_page(tmp_path: Path) -> None:
    run = Run(tmp_path, data=EXACT, **SMALL)
    run.train(2)
    result = run.peek("--step", "2", "--rank", "1")
    assert result.exit_code == 0, result.exception
    page = (tmp_path / "p.html").read_text()
    assert "step 2, epoch 1, 8 records" in result.output
    assert "no losses: no checkpoint of this run" in result.output
    assert all(f'<span class="n">{key}</span>' in page for key in run.trained[2, 1])
    assert "the step had train workers 0 to 1" in str(
        run.peek("--step", "2", "--rank", "2").exception
    )


def test_a_batch_that_changed_code_would_make_is_never_shown(tmp_path: Path) -> None:
    run = Run(tmp_path, data=EXACT, **SMALL)
    run.train(1)
    (run.folder / "code").mkdir()
    (run.folder / "code" / "chain.py").write_text("SIDE = 32\n")  # as a resume stages it
    with pytest.raises(
        UsageError, match="the code of the run has changed since it trained this step"
    ):
        run.rebuilt(2)
