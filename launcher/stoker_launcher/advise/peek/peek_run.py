"""`submit.py peek RUN --step N`: rebuilds that batch of a run, with the loss of each record.

The run recorded its attempts and which blocks arrived in which order (events.jsonl). Those of the step are
preprocessed again, with the run's own code: chain, splitter, batch.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from stoker.chain.collating import all_of, collated, seed_of
from stoker.checkpoints.format import load_checkpoint as load_checkpoint
from stoker.checkpoints.format import load_meta
from stoker.config.loading import load
from stoker.config.schema import Config
from stoker.errors import UsageError, where_raised
from stoker.events import kinds
from stoker.figures import count_of, table
from stoker.protocol import BlockReport, BlockSlice, DataCursor, Schema, Work
from stoker.read.sources import item_name
from stoker.recipe import (
    SOURCE_FOLDER,
    Batch,
    Recipe,
    classification_loss,
    code_digest,
    load_recipe,
)
from stoker.serve.accounting import EpochAccount
from stoker.serve.blocks.batches import BatchBuilder, BufferPool
from stoker.serve.cursor import Trail, about, arrival, refuse_other_data
from stoker.serve.items import ReadyBlock
from stoker.serve.opening import Data, discover, open_data
from stoker.serve.passes import Passes
from stoker.serve.recipe_pass import RecipePass, Splitter
from stoker.serve.shards import DatasetSource, Guard, LoadedSplit, blocks_of
from stoker.storage.checkpoint_store import CheckpointStore, open_store, step_of, verify
from stoker_launcher.advise.peek.looking import row_of
from stoker_launcher.advise.peek.page import Sheet, page_at, write_page
from stoker_launcher.places import attach

SHOWN = 20


class Line(NamedTuple):
    rank: int
    key: str
    record: dict[str, Any]
    loss: float | None = None


class RebuiltStep(NamedTuple):
    lines: list[Line]
    """Ordered by rank and position in the batch."""
    epoch: int
    """From 0, as in the run's files."""
    workers: int
    notes: list[str]
    sheet: Sheet


def peek_run(
    run: str, overrides: list[str], number: int, rank: int | None, out: Path | None
) -> int:
    run_dir = getattr(attach(run), "run_dir", None)
    if run_dir is None or not (run_dir / "config.yaml").is_file():
        raise UsageError(f"peek: {run}: the run directory must be on this machine")
    target = page_at(out)
    step = rebuild(run_dir, number, overrides)
    lines = step.lines
    if rank is not None:
        if not 0 <= rank < step.workers:
            raise UsageError(f"--rank {rank}: the step had train workers 0 to {step.workers - 1}")
        lines = [line for line in lines if line.rank == rank]
    if all(line.loss is not None for line in lines):
        lines = sorted(
            lines, key=lambda line: -math.inf if math.isnan(line.loss or 0) else -(line.loss or 0)
        )
    tiles = [step.sheet.tile(line.key, line.record) for line in lines]
    for line, tile in zip(lines, tiles, strict=True):
        tile.loss = "" if line.loss is None else f"loss {line.loss:.4g}"
    heads = [
        f"step {number}, epoch {step.epoch + 1}, {count_of(len(lines), 'record')}",
        *step.notes,
    ]
    write_page(
        target,
        title=f"{run_dir.name}: step {number}",
        lines=heads,
        problems=[],
        stages=[],
        tiles=tiles,
        legend=step.sheet.painter.legend(),
        heading="Records of the step",
    )
    rows = [
        (str(line.rank), line.key, tile.label, "–" if line.loss is None else f"{line.loss:.4g}")
        for line, tile in list(zip(lines, tiles, strict=True))[:SHOWN]
    ]
    print("\n".join([*heads, table(("rank", "record", "label", "loss"), rows, left=("record",))]))
    if len(lines) > SHOWN:
        print(f"and {len(lines) - SHOWN} more on the page")
    print(f"written: {target}")
    return 0


def rebuild(run_dir: Path, step: int, overrides: list[str]) -> RebuiltStep:
    resolved = load(run_dir / "config.yaml", [*overrides, "tracking.record_ids=true"])
    if resolved.config.script is not None:
        raise UsageError("peek: cannot rebuild batches of a script; only runs of a recipe")
    summary = json.loads((run_dir / "summary.json").read_text())
    over = summary.get("status") != "running"
    found = find(history(run_dir), step, resolved.config.tracking.log_every_steps if over else 0)
    # Import the recipe as the run staged it.
    code = run_dir / "code"
    sys.path.insert(0, str(code))
    config = discover(resolved)
    data = open_data(config)
    own = {word.partition("=")[0].removeprefix("params.") for word in overrides}
    made = Rebuild(config, data, found, own, code if code.is_dir() else SOURCE_FOLDER)
    parts = made.parts()
    recipe = load_recipe(config.recipe, config.params, SOURCE_FOLDER)
    values, note = losses_of(run_dir, config, recipe, step, parts)
    notes = [] if found.sure else ["the run did not log this step and may have ended earlier"]
    each: Sequence[Sequence[float | None]] = values or [[None] * len(part.keys) for part in parts]
    lines = [
        Line(part.rank, key, row_of(part.batch, row), loss)
        for part, own_losses in zip(parts, each, strict=True)
        for row, (key, loss) in enumerate(zip(part.keys, own_losses, strict=True))
    ]
    return RebuiltStep(
        lines, found.epoch, made.workers, [*notes, note], Sheet(data, "train", recipe)
    )


@dataclass
class LoggedAttempt:
    about: dict[str, Any]
    """What the service logged at the start; see `stoker.serve.cursor.about`."""
    trains: bool = True
    """Whether its train workers have started; until then, steps are those of the attempt before."""
    first_step: int = 0
    """Optimiser steps before it."""
    last_step: int = 0
    passes: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, optimiser steps in it) of its completed training passes."""
    passed_steps: int = 0
    """In all of them."""
    bad: dict[int, dict[str, str]] = field(default_factory=dict)
    blocks: dict[int, list[list[int]]] = field(default_factory=dict)
    """By epoch, [shard, index in it, rows, their ids] of each block in order of arrival."""
    produced: set[int] = field(default_factory=set)
    """Epochs of which all blocks have arrived."""

    @property
    def start(self) -> DataCursor:
        return DataCursor.model_validate(self.about["start"])


class StepPosition(NamedTuple):
    attempt: LoggedAttempt
    epoch: int
    window: int
    """Optimiser steps of this attempt before it in its epoch."""
    sure: bool
    bad: dict[str, str]
    """Records quarantined in the epoch by any attempt: key → reason."""


TAKEN = (
    *(
        kinds.AttemptStarted,
        kinds.TrainWorkerStarted,
        kinds.Resumed,
        kinds.StepLogged,
        kinds.PassEnded,
    ),
    *(kinds.RecordQuarantined, kinds.BlocksArrived, kinds.PassProduced),
)


def history(run_dir: Path) -> list[LoggedAttempt]:
    found = list[LoggedAttempt]()
    for record in kinds.json_lines(run_dir / "events.jsonl", TAKEN):
        try:
            _take(kinds.event_of(record), found)
        except ValidationError as error:  # without it, another batch might be shown
            kind, first = record.get("event"), error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(
                f"{run_dir}: events.jsonl: an event `{kind}` cannot be read: {where}: {first['msg']}"
            ) from None
    if not found:
        raise UsageError(
            f"{run_dir}: no event `attempt` in events.jsonl: the run has not started training, is a"
            " script"
        )
    return found


def _take(event: kinds.Event, found: list[LoggedAttempt]) -> None:
    if isinstance(event, kinds.AttemptStarted):
        found.append(LoggedAttempt(event.record(), trains=not event.ahead))
    if not found:
        return
    attempt = found[-1]
    if isinstance(event, kinds.StepLogged | kinds.PassEnded):
        attempt = next(each for each in reversed(found) if each.trains)
    match event:
        case kinds.TrainWorkerStarted():
            attempt.trains = True
        case kinds.Resumed():
            attempt.first_step = attempt.last_step = event.step
        case kinds.StepLogged():
            attempt.last_step = max(attempt.last_step, event.step)
        case kinds.PassEnded(split="train"):
            attempt.passes.append((event.epoch, event.steps))
            attempt.passed_steps += event.steps
            attempt.last_step = max(attempt.last_step, attempt.first_step + attempt.passed_steps)
        case kinds.RecordQuarantined(split="train"):
            attempt.bad.setdefault(event.epoch, {})[event.key] = event.reason
        case kinds.BlocksArrived():
            attempt.blocks.setdefault(event.epoch, []).extend(event.blocks)
        case kinds.PassProduced(split="train"):
            attempt.produced.add(event.epoch)


def find(attempts: list[LoggedAttempt], step: int, unlogged: int) -> StepPosition:
    """Find the last attempt that trained a step, counted from 1, as in the metrics.

    `unlogged`: steps that an ended attempt may have trained after its last logged one.
    """
    within = [a for a in attempts if a.first_step < step <= a.last_step]
    beyond = [a for a in attempts if a.trains and a.first_step < step <= a.last_step + unlogged]
    if step < 1 or not (within or beyond):
        last = max(attempt.last_step for attempt in attempts)
        raise UsageError(f"--step {step}: the run has trained steps 1 to {last}")
    attempt = (within or beyond)[-1]
    before, epoch = attempt.first_step, attempt.start.epoch
    for passed, steps in attempt.passes:
        epoch = passed
        if step <= before + steps:
            break
        before, epoch = before + steps, passed + 1
    bad = {key: reason for each in attempts for key, reason in each.bad.get(epoch, {}).items()}
    return StepPosition(attempt, epoch, step - before - 1, bool(within), bad)


class RankBatch(NamedTuple):
    rank: int
    keys: list[str]
    batch: Batch
    """The input of `on_device`."""


class Reference(NamedTuple):
    """A block as `arrival` recorded it, in place of the block itself."""

    shard: int
    nth: int
    rows: int
    ids: int

    def __str__(self) -> str:
        return f"block {self.nth} of shard {self.shard}"


class Rebuild:
    """The data of a run at a step.

    `own`: parameters from the command line, which may name another location of the same data.
    `code`: folder of the run's code.
    """

    def __init__(
        self, config: Config, data: Data, found: StepPosition, own: set[str], code: Path
    ) -> None:
        self.found, noted = found, found.attempt.about
        self.workers, self.remainder = int(noted["workers"]), noted["remainder"]
        self.batch_size, self.accumulate = int(noted["batch_size"]), int(noted["accumulate_steps"])
        self._refuse_others(config, data, own, code)
        block_records = {"block_records": noted["block_records"]}
        self.config = config.model_copy(
            update={"data": config.data.model_copy(update=block_records)}
        )
        start = found.attempt.start
        if start.plan.cache_share is not None:
            data.chains["train"].share = start.plan.cache_share
        chains = {split: pickle.dumps(chain) for split, chain in data.chains.items()}
        kept = {split: "" for split, chain in data.chains.items() if chain.prefix}
        passes = Passes(self.config, data.sources, chains, None, kept, share=start.plan.cache_share)
        identity = data.identity("train")
        plan = passes.identity(identity.text)
        try:
            refuse_other_data(start, plan)
        except UsageError as error:
            raise UsageError(f"--step: {error.problems[0].rest}") from None
        begins = start if start.epoch == found.epoch else DataCursor(epoch=found.epoch, plan=plan)
        self.start = begins.model_copy(update={"unvalidated": None})
        self.plan = passes.plan("train", found.epoch, self.start)
        chain = pickle.loads(chains["train"])  # noqa: S301 - this process wrote it
        self.loaded = LoadedSplit(data.sources["train"].for_workers(), chain)
        known = {**start.deadly, **found.attempt.bad.get(found.epoch, {})}
        known |= {item_name(data.sources["train"], key): reason for key, reason in known.items()}
        for bad in self.start.quarantined.values():
            known |= bad
        self.ever_bad, self.guard = {*known, *found.bad}, Guard(known, None)
        self.shards = passes.shards(self.plan)
        self._made: dict[Reference, tuple[dict[str, Any], Schema]] = {}

    def _refuse_others(self, config: Config, data: Data, own: set[str], code: Path) -> None:
        noted = self.found.attempt.about
        if isinstance(data.sources["train"], DatasetSource):
            raise UsageError(
                "--step: the recipe reads a ray.data.Dataset, whose rows cannot be rebuilt"
            )
        now = about(self.found.attempt.start, self.workers, config)["params"]
        for name in sorted({*now, *noted["params"]} - own):
            if now.get(name) != noted["params"].get(name):
                raise UsageError(f"--step: params.{name} differs from the run's at this step")
        if noted.get("code") != code_digest(code):
            raise UsageError("--step: the code of the run has changed since it trained this step")

    def parts(self) -> list[RankBatch]:
        attempt, epoch = self.found.attempt, self.found.epoch
        splitter = Splitter(self.workers, self.batch_size, equal=True, remainder=self.remainder)
        stream = RecipePass(
            plan=self.plan,
            number=epoch,
            splitter=splitter,
            account=EpochAccount("train", epoch),
            total=None,
            trail=Trail(self.start),
        )
        named: dict[str, Reference] = {}
        for block in starmap(Reference, attempt.blocks.get(epoch, [])):
            named[name := f"{block.shard}.{block.nth}"] = block
            stream.arrived(ReadyBlock(BlockReport(block.shard, rows=block.rows), "", name))
        if epoch in attempt.produced:
            splitter.ended = True
        first = self.found.window * self.accumulate
        feed_steps = range(first, first + self.accumulate)
        parts = []
        for step in feed_steps if splitter.ready(feed_steps[-1]) else ():
            for rank in range(self.workers):
                portion = stream.portion(step, rank)
                if portion is not None and portion.blocks:
                    parts.append(self._part(rank, portion.blocks, named))
        if not parts:
            raise UsageError(
                "--step: events.jsonl lacks blocks of this step; the run may have ended before it"
            )
        return parts

    def _make(self, block: Reference) -> tuple[dict[str, Any], Schema]:
        if block not in self._made:
            made = None
            if block.shard < len(self.shards):
                work = Work(block.shard, self.shards[block.shard], block.nth, False)
                made = next(blocks_of(self.loaded, self.plan, work, self.guard), None)
            if made is None:
                raise UsageError(f"--step: {block} is no longer in the data")
            columns, report = made
            if bad := next(
                (bad for bad in report.bad if not {bad.key, bad.called} & self.ever_bad), None
            ):
                raise UsageError(
                    f"--step: record {bad.key} fails now ({bad.reason}) and did not in the run: the data or"
                    " the recipe has changed"
                )
            if Reference(*arrival(report)) != block:
                raise UsageError(f"--step: {block} has different records than in the run")
            self._made[block] = columns, report.schemas[-1]
        return self._made[block]

    def _part(self, rank: int, slices: list[BlockSlice], named: dict[str, Reference]) -> RankBatch:
        """Assemble a batch as the transport does."""
        from stoker.train.feed import as_tensors  # imports PyTorch

        made = [(part, *self._make(named[part.block])) for part in slices]
        collate = self.loaded.chain.collate
        if collate:
            records, ids, keys = all_of(
                (columns, part.start, part.stop) for part, columns, _ in made
            )
            seed = seed_of(self.config.seed, "train", self.found.epoch, ids)
            return RankBatch(rank, keys, collated(collate, records, seed))
        batch = BatchBuilder(
            BufferPool(pinned=False), sum(p.stop - p.start for p in slices), made[0][2]
        )
        at = 0
        for part, columns, _ in made:
            batch.take(part, columns, at)
            at += part.stop - part.start
        tensors, _, keys, _ = as_tensors(batch.finish())
        return RankBatch(rank, list(map(str, keys)), tensors)


def losses_of(
    run_dir: Path, config: Config, recipe: Recipe, step: int, parts: Sequence[RankBatch]
) -> tuple[list[list[float]] | None, str]:
    where = config.checkpoint.dir or str(run_dir / "checkpoints")
    # A relative one is of the folder that the run was started in.
    if "://" not in where and not Path(where).is_absolute() and not Path(where).is_dir():
        there = f"the run wrote to {where} in another folder"
        return None, f"no losses: {there}; add checkpoint.dir=/…/{where}"
    store = open_store(where)
    # The complete checkpoint nearest to the start of the step; the earlier one of two.
    names = sorted(store.names(), key=lambda name: (abs(step_of(name) - (step - 1)), step_of(name)))
    written = [
        *kinds.read_events(run_dir / "events.jsonl", (kinds.CheckpointWritten, kinds.Resumed))
    ]
    named = {Path(str(getattr(event, "path", ""))).name for event in written}
    runs = {run for event in written if (run := getattr(event, "run", None))}

    def is_own(name: str) -> bool:
        """Other runs may write to a checkpoint.dir, too, also under the same name."""
        by_name = name in named or not config.checkpoint.dir
        return (
            load_meta(store, name, with_history=False).meta.get("run") in runs if runs else by_name
        )

    name = next((name for name in names if verify(store, name) is None and is_own(name)), None)
    if name is None:
        return None, "no losses: the run has no checkpoint"
    try:
        found = losses(config, recipe, store, name, parts)
    except Exception as error:
        return None, f"no losses: {where_raised(error)}"
    return found, f"losses with the weights of {name}, {abs(step_of(name) - (step - 1))} steps away"


def losses(
    config: Config, recipe: Recipe, store: CheckpointStore, name: str, parts: Sequence[RankBatch]
) -> list[list[float]]:
    """The loss of each record on its own, per part, in evaluation mode."""
    import torch

    from stoker.train.state import count_records, loss_value

    torch.manual_seed(config.seed)
    model = recipe.model()
    model.load_state_dict(load_checkpoint(load_meta(store, name)).weights)
    model.eval()
    module, smoothing = recipe.on_device("train"), config.train.label_smoothing

    def loss(record: Batch) -> float:
        if smoothing:
            return float(classification_loss(model, record, smoothing))
        return float(loss_value(recipe.training_step(model, record)))

    found = []
    with torch.no_grad():
        for part in parts:
            batch = module(part.batch) if module is not None else part.batch
            rows = range(count_records(part.batch))
            found.append(
                [loss({n: values[row : row + 1] for n, values in batch.items()}) for row in rows]
            )
    return found
