"""Laptop: `submit.py peek`: shows a job's data before a run, or one batch of a run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.advise.peeking_run import PeekOptions, boxes_of, page_at, peek_run
from launcher.job import open_job
from stoker.config.loading import Resolved, load
from stoker.errors import UsageError, explain
from stoker.figures import count_of, size
from stoker.hosts import machine

if TYPE_CHECKING:
    from launcher.advise.peek.looking import Look, Place
    from launcher.advise.peek.problems import Problem
    from stoker.config.schema import Config
    from stoker.read.sources import Source
    from stoker.serve.opening import Data

MOST_SHOWN = 512
STORE_MB = 1024
WIDTH = 100


@dataclass(frozen=True)
class Row:
    """Laptop: a table row: one column after a stage."""

    name: str
    type: str
    shape: str
    nulls: str
    values: str


@dataclass(frozen=True)
class StageRows:
    """Laptop: the columns that a stage adds or changes."""

    name: str
    cost: str
    rows: list[Row]
    same: str


def peek(target: str | None, overrides: list[str], options: PeekOptions) -> int:
    """Laptop: show a job's data or a batch of a run.

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
    return peek_run(target, overrides, options)


def peek_job(config: Path, overrides: list[str], options: PeekOptions) -> int:
    """Laptop: show the first records of a job before and after each stage of its chain."""
    began = time.monotonic()
    if config.is_dir():
        raise UsageError(f"peek: {config} is a folder; name a YAML file, or add --step N for a run")
    if config.suffix == ".py" or (resolved := load(config, overrides)).config.script is not None:
        raise UsageError("peek: needs a recipe; a script reads its own data")
    from launcher.advise.peek.looking import look
    from launcher.advise.peek.page import write_page
    from launcher.advise.peek.problems import Problem, problems_of
    from launcher.advise.peek.tiles import SIDE, tile_of
    from stoker.recipe import SOURCE_FOLDER, class_names_of, load_recipe
    from stoker.train.sample_images import Painter

    target = page_at(options.out)
    opened, data = open_job_data(resolved, options)
    if options.split not in data.sources:
        raise UsageError(f"--split {options.split}: the recipe has only {', '.join(data.sources)}")
    seen = look(data, options.split, opened, options.n)
    recipe = load_recipe(opened.recipe, opened.params, SOURCE_FOLDER)
    boxes = boxes_of(data.chains[options.split].stages)
    painter = Painter(recipe.class_names, SIDE)
    names = class_names_of(recipe, data.sources["train"].classes())
    tiles = [
        tile_of(
            s.key,
            s.made or s.so_far or s.read,
            boxes,
            painter,
            s.reason,
            s.read if s.made or s.so_far else None,
            names,
        )
        for s in seen.samples
    ]
    places, lines = stage_rows(seen.places), headlines(seen, opened.name)
    found, wrong = list[str](), list[Problem]()
    if options.model and not seen.refused:
        from launcher.advise.peek.model import try_model

        found, wrong = try_model(opened, recipe, data)
    problems = problems_of(seen, opened, data)
    lines, problems = [*lines, *found], sorted([*problems, *wrong], key=lambda problem: problem.level)
    write_page(
        target,
        title=f"{opened.name}: {options.split}",
        lines=lines,
        problems=problems,
        heading=f"{count_of(len(tiles), 'record')} after the chain",
        tiles=tiles,
        legend=painter.legend(),
        places=places,
    )
    show(lines, places, problems)
    print(f"written: {target} ({time.monotonic() - began:.1f} s)")
    return 2 if any(problem.level == "error" for problem in problems) else 0


def open_job_data(resolved: Resolved, options: PeekOptions) -> tuple[Config, Data]:
    """Laptop: the job's configuration and its opened splits, before the chains run.

    If the recipe reads with Ray Data, Ray starts on this machine for the first rows of its datasets.

    Raises:
        UsageError: the data cannot be read.
    """
    from stoker.hosts import cluster

    # Before the recipe imports Ray.
    cluster.set_environment(os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32))
    from stoker.serve.datasets import DatasetSource

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
    """Laptop: discover the recipe's parameters and open its splits."""
    from stoker.serve.opening import discover, open_splits

    config = discover(resolved)
    return config, open_splits(config)


def first_rows(resolved: Resolved) -> tuple[Config, Data]:
    """As `discover_and_open`, on a Ray cluster of this machine, with rows in place of datasets.

    Raises:
        UsageError: a dataset fails or is empty.
    """
    from stoker.serve.datasets import DatasetSource

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    with local_ray():
        config, data = discover_and_open(resolved)
        for split, source in data.sources.items():
            if isinstance(source, DatasetSource):
                try:
                    rows = source.dataset.take_batch(MOST_SHOWN, batch_format="pyarrow")
                except Exception as error:
                    raise UsageError(f"peek: the {split} dataset failed: {explain(error)}") from error
                data.sources[split] = first_rows_of(rows)
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


def first_rows_of(table: Any) -> Source:
    """A table of a dataset's rows, read as chain workers read its blocks."""
    from stoker.messages import Record, Shard
    from stoker.serve.datasets import DatasetSource, as_records

    class Rows(DatasetSource):
        def shards(self, records: int, order: Any) -> list[Shard]:
            return [Shard("", 0, len(table), len(table), (0,), name="rows")]

        def read(self, shard: Shard, order: Any) -> Iterator[Record]:
            yield from as_records(table)

        def for_workers(self) -> Source:
            return self

    return Rows(None)


def headlines(seen: Look, name: str) -> list[str]:
    """Laptop: the headlines: record counts, examined records, and time per record."""
    counts = [f"{'unknown' if n is None else f'{n:,}'} {split}" for split, n in seen.totals.items()]
    lines = [f"{name}: {' + '.join(counts)} records from {seen.source}"]
    failed = f", {len(seen.bad)} failed" if seen.bad else ""
    lines.append(f"examined {count_of(seen.examined, f'{seen.split} record')}{failed}")
    if seen.ms is not None:
        lines.append(f"{seen.ms:.2f} ms and {size(seen.bytes_per_record)} per record")
    return lines


def stage_rows(places: list[Place]) -> list[StageRows]:
    """Laptop: the changed columns after each stage, with unchanged columns in one line."""
    found, before = [], dict[str, Row]()
    for place in places:
        rows = {
            name: Row(name, c.type_text(), c.shape_text(), str(c.nulls) if c.nulls else "0", c.range_text())
            for name, c in place.columns.items()
        }
        same = [name for name, row in rows.items() if before.get(name) == row]
        cost = f"{place.ms_per_record:.3f} ms" if place.ms_per_record is not None else "did not run"
        new = [row for name, row in rows.items() if name not in same]
        gone = [name for name in before if name not in rows] if rows else []
        text = ", ".join(same) + (f"; dropped: {', '.join(gone)}" if gone else "")
        found.append(StageRows(place.name, cost, new, text.removeprefix("; ")))
        before = rows
    return found


def show(lines: list[str], places: list[StageRows], problems: list[Problem]) -> None:
    """Laptop: print the page's content on the terminal."""
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
    for place in places:
        title, cost = Text(place.name, "bold"), Text(place.cost.removesuffix(" ms"))
        for row in place.rows or [Row("", "", "", "", "")]:
            nulls = Text(row.nulls, "red" if row.nulls not in ("", "0") else "")
            cells = map(Text, (row.name, row.type, row.shape))
            table.add_row(title, *cells, nulls, Text(row.values), cost)
            title, cost = Text(""), Text("")
    console.print(table)
    if not problems:
        console.print("no problems found", style="green")
    for problem in problems:
        style = "bold red" if problem.level == "error" else "yellow"
        console.print(Text(problem.level, style), Text(problem.text), soft_wrap=True)
