"""`submit.py peek RUN --step N`: makes that batch of a run again, with the loss of each record.

The run logged which rows of which blocks each train worker got (events.jsonl, `given`). Those blocks are
preprocessed again, with the run's own code.
"""

from __future__ import annotations

import functools
import math
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stoker.chain.collating import all_of, collated, seed_of
from stoker.checkpoints.format import load_checkpoint, load_meta
from stoker.config.loading import load
from stoker.config.schema import Config
from stoker.errors import UsageError, where_raised
from stoker.events import kinds
from stoker.figures import count_of, table
from stoker.protocol import BlockReport, BlockSlice, DataCursor, Work
from stoker.read.sources import item_name
from stoker.recipe import SOURCE_FOLDER, Batch, Recipe, load_recipe
from stoker.recipe import code_digest as digest_of
from stoker.serve.blocks.batches import BatchBuilder, BufferPool
from stoker.serve.cursor import about, ids_of_rows, refuse_other_data
from stoker.serve.opening import Data, discover, open_data
from stoker.serve.passes import Passes
from stoker.serve.shards import Guard, LoadedSplit, blocks_of
from stoker.storage.checkpoint_store import open_store, step_of, verify
from stoker_launcher.advise.peek.looking import row_of
from stoker_launcher.advise.peek.page import Sheet, page_at, write_sheet
from stoker_launcher.places import attach

SHOWN = 20


class Line(NamedTuple):
    rank: int
    key: str
    record: dict[str, Any]
    loss: float | None = None


class RankBatch(NamedTuple):
    rank: int
    keys: list[str]
    batch: Batch
    """The input of `on_device`."""


class RebuiltStep(NamedTuple):
    lines: list[Line]
    epoch: int
    """From 0, as in the run's files."""
    workers: int
    notes: list[str]
    sheet: Sheet


@dataclass
class LoggedAttempt:
    about: dict[str, Any]
    """What the service logged at the start; see `stoker.serve.cursor.about`."""
    given: dict[int, dict[tuple[int, int], list[int]]] = field(default_factory=dict)
    """By optimiser step, counted from 1: (batch, rank) → its slices."""
    epochs: dict[int, int] = field(default_factory=dict)
    """Epoch of each of these steps."""
    trained: int = 0
    """The last step that is known to be trained."""
    bad: dict[int, dict[str, str]] = field(default_factory=dict)

    def take(self, event: kinds.RowsGiven) -> None:
        for batch, rank, *slices in event.given:
            step = event.before + batch // int(self.about["accumulate_steps"]) + 1
            self.given.setdefault(step, {})[batch, rank] = slices
            self.epochs[step] = event.epoch


TRAINED = (kinds.StepLogged, kinds.EpochEnded, kinds.CheckpointWritten)


def peek_run(
    run: str, overrides: list[str], number: int, rank: int | None, out: Path | None
) -> int:
    run_dir = getattr(attach(run), "run_dir", None)
    if run_dir is None or not (run_dir / "config.yaml").is_file():
        raise UsageError(f"peek: {run}: the run directory must be on this machine")
    target = page_at(out)
    step = rebuild(run_dir, number, overrides)
    if rank is not None and not 0 <= rank < step.workers:
        raise UsageError(f"--rank {rank}: the step had train workers 0 to {step.workers - 1}")
    lines = [line for line in step.lines if rank in (None, line.rank)]
    lines.sort(key=lambda line: -math.inf if math.isnan(line.loss or 0) else -(line.loss or 0))
    tiles = [step.sheet.tile(line.key, line.record) for line in lines]
    rows = []
    for line, tile in zip(lines, tiles, strict=True):
        loss = "–" if line.loss is None else f"{line.loss:.4g}"
        tile.loss = "" if line.loss is None else f"loss {loss}"
        rows.append((str(line.rank), line.key, tile.label, loss))
    heads = [f"step {number}, epoch {step.epoch + 1}, {count_of(len(lines), 'record')}"]
    heads += step.notes
    title = f"{run_dir.name}: step {number}"
    write_sheet(target, tiles, title, "Records of the step", heads)
    columns = ("rank", "record", "label", "loss")
    print("\n".join([*heads, table(columns, rows[:SHOWN], left=("record",))]))
    if len(lines) > SHOWN:
        print(f"and {len(lines) - SHOWN} more on the page")
    print(f"written: {target}")
    return 0


def rebuild(run_dir: Path, step: int, overrides: list[str]) -> RebuiltStep:
    resolved = load(run_dir / "config.yaml", [*overrides, "tracking.record_ids=true"])
    if resolved.config.script is not None:
        raise UsageError("peek: cannot rebuild batches of a script; only runs of a recipe")
    attempt = find(history(run_dir), step, resolved.config.tracking.log_every_steps - 1)
    # Import the recipe as the run staged it.
    code = run_dir / "code"
    sys.path.insert(0, str(code))
    config = discover(resolved)
    data = open_data(config)
    own = {word.partition("=")[0].removeprefix("params.") for word in overrides}
    refuse_others(attempt, config, own, code if code.is_dir() else SOURCE_FOLDER)
    parts = Rebuild(config, data, attempt, attempt.epochs[step]).parts(step)
    recipe = load_recipe(config.recipe, config.params, SOURCE_FOLDER)
    values, note = losses_of(run_dir, config, recipe, step, parts)
    unsure = "the run did not log this step and may have ended earlier"
    lines = [
        Line(part.rank, key, row_of(part.batch, row), values[number][row] if values else None)
        for number, part in enumerate(parts)
        for row, key in enumerate(part.keys)
    ]
    notes = [*([] if step <= attempt.trained else [unsure]), note]
    sheet = Sheet(data, "train", recipe)
    return RebuiltStep(lines, attempt.epochs[step], int(attempt.about["workers"]), notes, sheet)


def history(run_dir: Path) -> list[LoggedAttempt]:
    found = list[LoggedAttempt]()
    known = (kinds.AttemptStarted, kinds.RowsGiven, kinds.RecordQuarantined, *TRAINED)
    for event in kinds.read_events(run_dir / "events.jsonl", known):
        match event:
            case kinds.AttemptStarted():
                found.append(LoggedAttempt(event.record()))
            case kinds.RowsGiven() if found:
                found[-1].take(event)
            case kinds.RecordQuarantined(split="train") if found:
                found[-1].bad.setdefault(event.epoch, {})[event.key] = event.reason
            case kinds.StepLogged() | kinds.EpochEnded() | kinds.CheckpointWritten():
                # A lost attempt may log a step after the next one has started, which has no rows yet.
                for attempt in [each for each in found if event.step in each.given][-1:]:
                    attempt.trained = max(attempt.trained, event.step)
    if not any(attempt.given for attempt in found):
        raise UsageError(
            f"{run_dir}: no event `given` in events.jsonl: the run has not started training, is of an"
            " earlier version, or reads a ray.data.Dataset"
        )
    return found


def find(attempts: list[LoggedAttempt], step: int, unlogged: int) -> LoggedAttempt:
    """The last attempt that trained a step.

    Train workers get rows ahead of training. `unlogged`: steps that they may have trained after the last one
    that is known.
    """
    with_step = [attempt for attempt in attempts if step in attempt.given]
    sure = [attempt for attempt in with_step if step <= attempt.trained]
    maybe = [a for a in with_step if step <= max(a.trained, min(a.given) - 1) + unlogged]
    if not (sure or maybe):
        last = max(attempt.trained for attempt in attempts)
        raise UsageError(f"--step {step}: the run has trained steps 1 to {last}")
    return (sure or maybe)[-1]


def refuse_others(attempt: LoggedAttempt, config: Config, own: set[str], code: Path) -> None:
    """`own`: parameters from the command line, which may name another location of the same data."""
    before = attempt.about
    start = DataCursor.model_validate(before["start"])
    now = about(start, int(before["workers"]), config)["params"]
    for name in sorted({*now, *before["params"]} - own):
        if now.get(name) != before["params"].get(name):
            raise UsageError(f"--step: params.{name} differs from the run's at this step")
    if before.get("code") != digest_of(code):
        raise UsageError("--step: the code of the run has changed since it trained this step")


class Rebuild:
    """Makes the batches of an epoch that an attempt trained."""

    def __init__(self, config: Config, data: Data, attempt: LoggedAttempt, epoch: int) -> None:
        self.attempt, self.epoch = attempt, epoch
        sections = {"block_records": attempt.about["block_records"]}
        self.config = config.model_copy(update={"data": config.data.model_copy(update=sections)})
        start = DataCursor.model_validate(attempt.about["start"])
        share, source, chain = start.plan.cache_share, data.sources["train"], data.chains["train"]
        chain.share = chain.share if share is None else share
        kept = {split: "" for split, chain in data.chains.items() if chain.prefix}
        passes = Passes(self.config, data.sources, {}, None, kept, share=share)
        plan = passes.identity(data.identity("train"))
        try:
            refuse_other_data(start, plan)
        except UsageError as error:
            raise UsageError(f"--step: {error.problems[0].rest}") from None
        if start.epoch != epoch:
            start = DataCursor(epoch=epoch, plan=plan, deadly=start.deadly)
        self.plan = passes.plan("train", epoch, start)
        self.shards = passes.shards(self.plan)
        # As a chain worker gets it.
        self.loaded = LoadedSplit(source.for_workers(), pickle.loads(pickle.dumps(chain)))  # noqa: S301
        bad = start.deadly | attempt.bad.get(epoch, {})
        bad |= {item_name(source, key): reason for key, reason in bad.items()}
        for more in start.quarantined.values():
            bad |= more
        self.guard = Guard(bad, None)
        self.block = functools.cache(self._block)

    def parts(self, step: int) -> list[RankBatch]:
        given = sorted(self.attempt.given[step].items())
        return [self._part(rank, slices) for (_, rank), slices in given]

    def _block(self, number: int, nth: int, ids: int) -> tuple[dict[str, Any], BlockReport]:
        made, what = None, f"block {nth} of shard {number}"
        if number < len(self.shards):
            work = Work(number, self.shards[number], nth, False)
            made = next(blocks_of(self.loaded, self.plan, work, self.guard), None)
        if made is None:
            raise UsageError(f"--step: {what} is no longer in the data")
        if ids_of_rows(made[1]) != ids:
            bad = [f"{bad.key} fails ({bad.reason})" for bad in made[1].bad]
            now = f"; now {', '.join(bad)}" if bad else ""
            raise UsageError(f"--step: {what} has different records than in the run{now}")
        return made

    def _part(self, rank: int, slices: list[int]) -> RankBatch:
        """Assemble a batch as the transport does."""
        from stoker.train.feed import as_tensors  # imports PyTorch

        each = [slices[at : at + 5] for at in range(0, len(slices), 5)]
        made = [(*self.block(*block), start, stop) for *block, start, stop in each]
        if collate := self.loaded.chain.collate:
            records, ids, keys = all_of((columns, start, stop) for columns, _, start, stop in made)
            seed = seed_of(self.config.seed, "train", self.epoch, ids)
            return RankBatch(rank, keys, collated(collate, records, seed))
        rows = sum(stop - start for *_, start, stop in made)
        batch, at = BatchBuilder(BufferPool(pinned=False), rows, made[0][1].schemas[-1]), 0
        for columns, report, start, stop in made:
            batch.take(BlockSlice("", start, stop, of=report.rows), columns, at)
            at += stop - start
        tensors, _, keys, _ = as_tensors(batch.finish())
        return RankBatch(rank, list(map(str, keys)), tensors)


def losses_of(
    run_dir: Path, config: Config, recipe: Recipe, step: int, parts: list[RankBatch]
) -> tuple[list[list[float]] | None, str]:
    """Losses with the complete checkpoint of this run nearest to the start of the step, and a note."""
    where = config.checkpoint.dir or str(run_dir / "checkpoints")
    events = kinds.read_events(run_dir / "events.jsonl", kinds.CheckpointWritten)
    written = [event for event in events if isinstance(event, kinds.CheckpointWritten)]
    # Other runs may write to a checkpoint.dir, too, also under the same name.
    own, runs = {Path(event.path).name for event in written}, {event.run for event in written}
    try:
        store = open_store(where)
        names = [(abs(step_of(name) - step + 1), step_of(name), name) for name in store.names()]
        for away, _, name in sorted(each for each in names if each[-1] in own):
            if verify(store, name) is not None:
                continue
            saved = load_meta(store, name)
            if None in runs or saved.meta.get("run") in runs:
                found = losses(config, recipe, load_checkpoint(saved).weights, parts)
                return found, f"losses with the weights of {name}, {away} steps away"
    except Exception as error:
        return None, f"no losses: {where_raised(error)}"
    return None, f"no losses: no checkpoint of this run in {where}; name it with checkpoint.dir=…"


def losses(
    config: Config, recipe: Recipe, weights: dict[str, Any], parts: list[RankBatch]
) -> list[list[float]]:
    """The loss of each record on its own, per part, in evaluation mode."""
    import torch

    from stoker.train.state import count_records, loss_value

    torch.manual_seed(config.seed)
    model = recipe.model()
    model.load_state_dict(weights)
    model.eval()
    module, found = recipe.on_device("train"), []
    with torch.no_grad():
        for part in parts:
            batch = module(part.batch) if module is not None else part.batch
            each = [
                {name: values[row : row + 1] for name, values in batch.items()}
                for row in range(count_records(part.batch))
            ]
            found.append([float(loss_value(recipe.training_step(model, row))) for row in each])
    return found
