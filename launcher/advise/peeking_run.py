"""Laptop: `submit.py peek RUN --step N`: rebuilds that batch of a run, with the loss of each record."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.places import attach
from stoker.config.loading import load
from stoker.errors import UsageError, where_raised
from stoker.figures import count_of

PAGE = "peek.html"
SHOWN = 20


@dataclass(frozen=True)
class PeekOptions:
    """Laptop: the command-line options of `peek`."""

    split: str = "train"
    n: int = 16
    step: int | None = None
    rank: int | None = None
    model: bool = False
    out: Path | None = None
    source_dir: Path | None = None


@dataclass(frozen=True)
class Line:
    """Laptop: a record of the step."""

    rank: int
    key: str
    record: dict[str, Any]
    loss: float | None = None


@dataclass(frozen=True)
class Step:
    """Laptop: a rebuilt step."""

    lines: list[Line]
    """Ordered by rank and position in the batch."""
    epoch: int
    """From 0, as in the run's files."""
    workers: int
    notes: list[str]
    boxes: dict[str, str]
    classes: Sequence[str] = ()
    """Names of the classes in masks."""
    names: Sequence[str] = ()
    """Of the classes that labels count."""


def peek_run(run: str, overrides: list[str], options: PeekOptions) -> int:
    """Laptop: rebuild a step, print it and write it as a page.

    Raises:
        UsageError: the run or step does not exist or cannot be rebuilt.
    """
    from launcher.advise.peek.page import write_page
    from launcher.advise.peek.tiles import SIDE, tile_of
    from stoker.train.sample_images import Painter

    run_dir = getattr(attach(run), "run_dir", None)
    if run_dir is None or not (run_dir / "config.yaml").is_file():
        raise UsageError(f"peek: {run}: the run directory must be on this machine")
    target = page_at(options.out)
    assert options.step is not None  # noqa: S101 - the caller checked it
    step = rebuild(run_dir, options.step, overrides)
    lines = step.lines
    if options.rank is not None:
        if not 0 <= options.rank < step.workers:
            raise UsageError(f"--rank {options.rank}: the step had train workers 0 to {step.workers - 1}")
        lines = [line for line in lines if line.rank == options.rank]
    if all(line.loss is not None for line in lines):
        lines = sorted(lines, key=lambda line: -math.inf if math.isnan(line.loss or 0) else -(line.loss or 0))
    tiles, painter = [], Painter(step.classes, SIDE)
    for line in lines:
        tile = tile_of(line.key, line.record, step.boxes, painter, names=step.names)
        tile.loss = "" if line.loss is None else f"loss {line.loss:.4g}"
        tiles.append(tile)
    heads = [f"step {options.step}, epoch {step.epoch + 1}, {count_of(len(lines), 'record')}", *step.notes]
    title = f"{run_dir.name}: step {options.step}"
    write_page(
        target,
        title=title,
        lines=heads,
        problems=[],
        places=[],
        tiles=tiles,
        legend=painter.legend(),
        heading="Records of the step",
    )
    show(heads, lines, tiles)
    print(f"written: {target}")
    return 0


def rebuild(run_dir: Path, step: int, overrides: list[str]) -> Step:
    """Laptop: the records of a step in the order in which train workers received them.

    Raises:
        UsageError: the step cannot be rebuilt.
    """
    import json

    from launcher.advise.peek.history import find, history
    from launcher.advise.peek.looking import row_of
    from launcher.advise.peek.rebuild import Rebuild
    from stoker.recipe import SOURCE_FOLDER, class_names_of, load_recipe
    from stoker.serve.opening import discover, open_data

    resolved = load(run_dir / "config.yaml", [*overrides, "tracking.record_ids=true"])
    if resolved.config.script is not None:
        raise UsageError("peek: cannot rebuild batches of a script; only runs of a recipe")
    summary = json.loads((run_dir / "summary.json").read_text())
    over = summary.get("status") != "running"
    found = find(history(run_dir), step, resolved.config.tracking.log_every_steps if over else 0)
    # Import the recipe as the run staged it.
    sys.path.insert(0, str(run_dir / "code"))
    config = discover(resolved)
    data = open_data(config)
    own = {word.partition("=")[0].removeprefix("params.") for word in overrides}
    code = run_dir / "code"
    made = Rebuild(config, data, found, own, code if code.is_dir() else SOURCE_FOLDER)
    parts = made.parts()
    notes = [] if found.sure else ["the run did not log this step and may have ended earlier"]
    recipe = load_recipe(config.recipe, config.params, SOURCE_FOLDER)
    values, note = losses_of(run_dir, config, recipe, step, parts)
    notes.append(note)
    lines = []
    for part, own_losses in zip(parts, values or [[] for _ in parts], strict=True):
        columns = {n: v if isinstance(v, list) else shown(v) for n, v in part.batch.items()}
        for row, key in enumerate(part.keys):
            loss = own_losses[row] if own_losses else None
            lines.append(Line(part.rank, key, row_of(columns, row), loss))
    boxes = boxes_of(data.chains["train"].stages)
    names = class_names_of(recipe, data.sources["train"].classes())
    return Step(lines, found.epoch, made.workers, notes, boxes, recipe.class_names, names)


def losses_of(
    run_dir: Path, config: Any, recipe: Any, step: int, parts: list[Any]
) -> tuple[list[list[float]] | None, str]:
    """Laptop: the losses of each part, or None, and a line that explains them."""
    from launcher.advise.peek.losses import losses, nearest_checkpoint
    from stoker.storage.checkpoint_store import open_store, step_of

    store = open_store(config.checkpoint.dir or str(run_dir / "checkpoints"))
    name = nearest_checkpoint(store, step)
    if name is None:
        return None, "no losses: the run has no checkpoint"
    try:
        found = losses(config, recipe, store, name, parts)
    except Exception as error:
        return None, f"no losses: {where_raised(error)}"
    return found, f"losses with the weights of {name}, {abs(step_of(name) - (step - 1))} steps away"


def page_at(out: Path | None) -> Path:
    """Laptop: the path of the page, checked before any work."""
    target = out or Path(PAGE)
    if target.is_dir():
        target = target / PAGE
    if not target.parent.is_dir():
        raise UsageError(f"--out {target}: {target.parent} does not exist")
    return target


def boxes_of(stages: list[Any]) -> dict[str, str]:
    """Laptop: the columns that the chain treats as boxes, with their formats."""
    return {name: stage.apply.format for stage in stages for name in getattr(stage.apply, "boxes", ())}


def show(heads: list[str], lines: list[Line], tiles: list[Any]) -> None:
    """Laptop: print the records on the terminal, highest loss first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    for head in heads:
        console.print(head, markup=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("record", overflow="fold")
    table.add_column("label")
    table.add_column("loss", justify="right")
    for line, tile in list(zip(lines, tiles, strict=True))[:SHOWN]:
        loss = "–" if line.loss is None else f"{line.loss:.4g}"
        table.add_row(str(line.rank), Text(line.key), Text(tile.label), loss)
    console.print(table)
    if len(lines) > SHOWN:
        console.print(f"and {len(lines) - SHOWN} more on the page")


def shown(tensor: Any) -> Any:
    """Laptop: a column as an array, which has no bfloat16."""
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
