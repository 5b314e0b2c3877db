"""`submit.py peek`: shows a job's data before a run; for one batch of a run, see `run.py`."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.job import open_job
from stoker.config.loading import Resolved, load
from stoker.errors import UsageError, explain, where_raised
from stoker.figures import count_of, size
from stoker.hosts import machine

if TYPE_CHECKING:
    from launcher.advise.peek.looking import Look, Point
    from launcher.advise.peek.problems import Problem
    from stoker.config.schema import Config
    from stoker.protocol import Record
    from stoker.read.sources import Source
    from stoker.recipe import Batch, Recipe, Split
    from stoker.serve.opening import Data
    from stoker.train.state import Worker

MOST_SHOWN = 512
STORE_MB = 1024
WIDTH = 100
MOST_TRIED = 8
"""Records of the batch on which the model is tried; batch norm needs more than one."""


@dataclass(frozen=True)
class PeekOptions:
    """The command-line options of `peek`."""

    split: str = "train"
    n: int = 16
    step: int | None = None
    rank: int | None = None
    model: bool = False
    out: Path | None = None
    source_dir: Path | None = None


class ColumnAfterStage(NamedTuple):
    """A column after a stage."""

    name: str
    type: str
    shape: str
    nulls: str
    values: str


class StageRows(NamedTuple):
    """The columns that a stage adds or changes."""

    name: str
    cost: str
    rows: list[ColumnAfterStage]
    same: str


def peek(target: str | None, overrides: list[str], options: PeekOptions) -> int:
    """Show a job's data or a batch of a run.

    Returns:
        0, or 2 if a run with this data would be refused or fail immediately.

    Raises:
        UsageError: the request is wrong.
    """
    if target is None:
        raise UsageError("peek: name a job's YAML file, or a run with --step N")
    if not 1 <= options.n <= MOST_SHOWN:
        raise UsageError(f"--n: between 1 and {MOST_SHOWN} (got {options.n})")
    if options.split not in ("train", "val"):
        raise UsageError(f"--split: train or val (got {options.split!r})")
    if options.step is None:
        if options.rank is not None:
            raise UsageError("--rank: selects a train worker of a run; add --step N")
        return peek_job(Path(target), overrides, options)
    if options.model:
        raise UsageError("--model: tries the model of a job; --step shows the losses of a run's records")
    if options.split != "train":
        raise UsageError("--split: applies to a job only; --step counts training steps")
    from launcher.advise.peek.peek_run import peek_run

    return peek_run(target, overrides, options.step, options.rank, options.out)


def peek_job(config: Path, overrides: list[str], options: PeekOptions) -> int:
    """Show the first records of a job before and after each stage of its chain."""
    began = time.monotonic()
    if config.is_dir():
        raise UsageError(f"peek: {config} is a folder; name a YAML file, or add --step N for a run")
    if config.suffix == ".py" or (resolved := load(config, overrides)).config.script is not None:
        raise UsageError("peek: needs a recipe; a script reads its own data")
    from launcher.advise.peek.looking import boxes_of, look
    from launcher.advise.peek.page import Sheet, page_at, write_page
    from launcher.advise.peek.problems import Problem, problems_of
    from stoker.recipe import SOURCE_FOLDER, class_names_of, load_recipe

    target = page_at(options.out)
    opened, data = open_job_data(resolved, options)
    if options.split not in data.sources:
        raise UsageError(f"--split {options.split}: the recipe has only {', '.join(data.sources)}")
    seen = look(data, options.split, opened, options.n)
    recipe = load_recipe(opened.recipe, opened.params, SOURCE_FOLDER)
    names = class_names_of(recipe, data.sources["train"].classes())
    sheet = Sheet(boxes_of(data.chains[options.split].stages), recipe.class_names, names)
    tiles = []
    for sample in seen.samples:
        after = sample.made or sample.so_far
        tiles.append(
            sheet.tile(sample.key, after or sample.read, sample.reason, sample.read if after else None)
        )
    stages, lines, problems = stage_rows(seen.points), headlines(seen, data, opened.name), list[Problem]()
    if options.model and not seen.refused:
        found, problems = try_model(opened, recipe, data)
        lines += found
    problems = sorted([*problems_of(seen, opened, data), *problems], key=lambda problem: problem.level)
    write_page(
        target,
        title=f"{opened.name}: {options.split}",
        lines=lines,
        problems=problems,
        heading=f"{count_of(len(tiles), 'record')} after the chain",
        tiles=tiles,
        legend=sheet.painter.legend(),
        stages=stages,
    )
    show(lines, stages, problems)
    print(f"written: {target} ({time.monotonic() - began:.1f} s)")
    return 2 if any(problem.level == "error" for problem in problems) else 0


def open_job_data(resolved: Resolved, options: PeekOptions) -> tuple[Config, Data]:
    """The job's configuration and its opened splits, before the chains run.

    If the recipe reads with Ray Data, Ray starts on this machine for the first rows of its datasets.

    Raises:
        UsageError: the data cannot be read.
    """
    from stoker.hosts import cluster

    # Before the recipe imports Ray.
    cluster.set_environment(os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32))
    from stoker.serve.shards import DatasetSource

    job = open_job(resolved, options.source_dir)
    if job.source_dir is not None:
        sys.path.insert(0, str(job.source_dir))
    params = {**resolved.config.params, **job.data}
    local = Resolved(resolved.config.model_copy(update={"params": params}), resolved.origins)
    try:
        config, data = discover_and_open(local)
    except UsageError:
        if "ray.data" not in sys.modules:
            raise
        return first_rows(local)
    with_ray = any(isinstance(source, DatasetSource) for source in data.sources.values())
    return first_rows(local) if with_ray else (config, data)


def discover_and_open(resolved: Resolved) -> tuple[Config, Data]:
    from stoker.serve.opening import discover, open_splits

    config = discover(resolved)
    return config, open_splits(config)


def first_rows(resolved: Resolved) -> tuple[Config, Data]:
    """As `discover_and_open`, on a Ray cluster of this machine, with rows in place of datasets.

    Raises:
        UsageError: a dataset fails or is empty.
    """
    from stoker.serve.shards import DatasetSource

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    with local_ray():
        config, data = discover_and_open(resolved)
        for split, source in data.sources.items():
            if isinstance(source, DatasetSource):
                try:
                    data.sources[split] = rows_of(source.first_rows(MOST_SHOWN))
                except Exception as error:
                    raise UsageError(f"peek: the {split} dataset failed: {explain(error)}") from error
    return config, data


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray cluster of this process alone, with its files in a folder of this user alone."""
    import ray

    from stoker.hosts import raynode
    from stoker.storage.checkpoint_store import Cleaner

    folder = raynode.private_folder()
    cleaner = Cleaner(folder, raynode.PREFIX)  # noqa: F841 - for as long as the cluster
    os.environ["RAY_TMPDIR"] = str(folder)
    try:
        ray.init(
            address="local",
            num_cpus=machine.cores(),
            object_store_memory=raynode.size_store(STORE_MB).size,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def rows_of(records: list[Record]) -> Source:
    """The first rows of a dataset as one shard."""
    from stoker.protocol import Shard
    from stoker.serve.shards import DatasetSource

    class Rows(DatasetSource):
        def shards(self, records: int, order: Any) -> list[Shard]:
            count = len(self.dataset)
            return [Shard("", 0, count, count, (0,), name="rows")]

        def read(self, shard: Shard, order: Any) -> Iterator[Record]:
            yield from self.dataset

        def for_workers(self) -> Source:
            return self

    return Rows(records)


def try_model(config: Config, recipe: Recipe, data: Data) -> tuple[list[str], list[Problem]]:
    """Create the model and take a step on a small batch of each split, as a train worker does.

    Returns:
        What was found, a line each, and the problems that would end a run.
    """
    import torch

    from launcher.advise.peek.problems import Problem
    from stoker.recipe import class_names_of
    from stoker.train.evaluation import try_validation
    from stoker.train.state import Worker, count_records

    problems, lines, tried = list[Problem](), list[str](), "model"
    torch.manual_seed(config.seed)
    worker = Worker(config, recipe, None, 0, 0, 1, torch.device("cpu"))
    worker.classes = class_names_of(recipe, data.sources["train"].classes())
    steps: dict[Split, str] = {"train": "training_step", "val": "validation_step"}
    try:
        worker.model = recipe.model()
        lines.append(f"model: {sum(p.numel() for p in worker.model.parameters()):,} parameters")
        for split in [split for split in steps if split in data.sources]:
            tried = steps[split]
            worker.modules[split] = recipe.on_device(split) or torch.nn.Identity()
            batch, notes = _batch(config, data, split), list[str]()
            if count_records(batch) < 2:
                lines.append(f"{tried}: not tried, because fewer than two of the first records are usable")
                continue
            if split == "train":
                metrics = {"loss": _train(worker, batch)}
            else:
                metrics, notes = try_validation(worker, batch)
                metrics = {name.removeprefix("val/"): value for name, value in metrics.items()}
            if not math.isfinite(metrics.get("loss", 0.0)):
                why = f"{tried}: the loss of the first records is {metrics['loss']}"
                return lines, [Problem("error", why)]
            shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            lines.append(f"{tried}: {shown or 'no loss, no metrics'} of {count_records(batch)} records")
            problems += [Problem("warning", f"{tried}: {note}") for note in notes]
    except UsageError as error:
        return lines, [Problem("error", text) for text in error.problems]
    except Exception as error:
        return lines, [Problem("error", f"{tried}: {where_raised(error)}")]
    return lines, problems


def _batch(config: Config, data: Data, split: Split) -> Batch:
    """A batch as from the feed; empty if none of the first records can be used."""
    from launcher.advise.peek.looking import sampled
    from stoker.train.feed import as_one_batch

    chain = data.chains[split]
    count = max(2, min(config.train.batch_size, MOST_TRIED))
    columns, report = chain.run(islice(sampled(data.sources[split], config, split, count), count), 0)
    return as_one_batch(chain.collate, columns, report) if columns else {}


def _train(worker: Worker, batch: Batch) -> float:
    from stoker.train.state import loss_of

    model = worker.model.train()
    loss = loss_of(worker.recipe.training_step(model, worker.modules["train"](batch)))
    loss.backward()
    if not any(p.grad is not None for p in model.parameters()):
        raise UsageError("training_step: the loss has no gradient with respect to any parameter")
    return float(loss.detach())


def headlines(seen: Look, data: Data, name: str) -> list[str]:
    """Record counts, examined records, and time per record."""
    counts = [f"{'unknown' if n is None else f'{n:,}'} {split}" for split, n in data.totals.items()]
    failed = f", {len(seen.bad)} failed" if seen.bad else ""
    lines = [
        f"{name}: {' + '.join(counts)} records from {seen.source}",
        f"examined {count_of(seen.examined, f'{seen.split} record')}{failed}",
    ]
    if seen.ms is not None:
        lines.append(f"{seen.ms:.2f} ms and {size(seen.bytes_per_record)} per record")
    return lines


def stage_rows(points: list[Point]) -> list[StageRows]:
    """The changed columns after each stage, with unchanged columns in one line."""
    found, before = [], dict[str, ColumnAfterStage]()
    for point in points:
        rows = {
            name: ColumnAfterStage(name, c.type_text(), c.shape_text(), str(c.nulls or 0), c.range_text())
            for name, c in point.columns.items()
        }
        same = [name for name, row in rows.items() if before.get(name) == row]
        cost = f"{point.ms_per_record:.3f} ms" if point.ms_per_record is not None else "did not run"
        gone = [name for name in before if name not in rows] if rows else []
        texts = [", ".join(same), f"dropped: {', '.join(gone)}" if gone else ""]
        new = [row for name, row in rows.items() if name not in same]
        found.append(StageRows(point.name, cost, new, "; ".join(filter(None, texts))))
        before = rows
    return found


def show(lines: list[str], stages: list[StageRows], problems: list[Problem]) -> None:
    """Print the page's content on the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("after", "column", "type", "shape", "NULL", "values"):
        table.add_column(name, overflow="fold", justify="right" if name == "NULL" else "left")
    table.add_column("ms", justify="right", no_wrap=True)
    for stage in stages:
        title, cost = Text(stage.name, "bold"), Text(stage.cost.removesuffix(" ms"))
        for row in stage.rows or [ColumnAfterStage("", "", "", "", "")]:
            nulls = Text(row.nulls, "red" if row.nulls not in ("", "0") else "")
            table.add_row(title, *map(Text, row[:3]), nulls, Text(row.values), cost)
            title, cost = Text(""), Text("")
    console.print(table)
    if not problems:
        console.print("no problems found", style="green")
    for problem in problems:
        style = "bold red" if problem.level == "error" else "yellow"
        console.print(Text(problem.level, style), Text(problem.text), soft_wrap=True)
