"""`submit.py peek`: shows a job's data before a run; for one batch of a run, see `peek_run.py`."""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stoker.config.loading import Resolved, load
from stoker.errors import UsageError
from stoker.figures import count_of, table
from stoker_launcher.job import open_job

if TYPE_CHECKING:
    from stoker.config.schema import Config
    from stoker.serve.opening import Data
    from stoker_launcher.advise.peek.looking import ChainPoint
    from stoker_launcher.advise.peek.problems import Problem

MOST_SHOWN = 512


@dataclass(frozen=True)
class PeekOptions:
    split: str = "train"
    n: int = 16
    step: int | None = None
    rank: int | None = None
    out: Path | None = None
    source_dir: Path | None = None


class ColumnAfterStage(NamedTuple):
    name: str
    type: str
    shape: str
    nulls: str
    values: str


class StageRows(NamedTuple):
    name: str
    cost: str
    rows: list[ColumnAfterStage]
    same: str


def peek(target: str | None, overrides: list[str], options: PeekOptions) -> int:
    """Returns 2 if a run with this data would be refused or fail immediately."""
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
    if options.split != "train":
        raise UsageError("--split: applies to a job only; --step counts training steps")
    from stoker_launcher.advise.peek.peek_run import peek_run

    return peek_run(target, overrides, options.step, options.rank, options.out)


def peek_job(config: Path, overrides: list[str], options: PeekOptions) -> int:
    began = time.monotonic()
    if config.is_dir():
        raise UsageError(f"peek: {config} is a folder; name a YAML file, or add --step N for a run")
    if config.suffix == ".py" or (resolved := load(config, overrides)).config.script is not None:
        raise UsageError("peek: needs a recipe; a script reads its own data")
    from stoker.recipe import SOURCE_FOLDER, load_recipe
    from stoker_launcher.advise.peek.looking import look
    from stoker_launcher.advise.peek.page import Sheet, page_at, write_sheet
    from stoker_launcher.advise.peek.problems import problems_of

    target = page_at(options.out)
    opened, data = open_job_data(resolved, options)
    if options.split not in data.sources:
        raise UsageError(f"--split {options.split}: the recipe has only {', '.join(data.sources)}")
    seen = look(data, options.split, opened, options.n)
    recipe = load_recipe(opened.recipe, opened.params, SOURCE_FOLDER)
    sheet = Sheet(data, options.split, recipe)
    tiles = [
        sheet.tile(one.key, one.made or one.read, one.reason, one.read if one.made else None)
        for one in seen.samples
    ]
    counts = [f"{'unknown' if n is None else f'{n:,}'} {split}" for split, n in data.totals.items()]
    failed = f", {len(seen.bad)} failed" if seen.bad else ""
    lines = [
        f"{opened.name}: {' + '.join(counts)} records from {seen.source}",
        f"examined {count_of(seen.examined, f'{seen.split} record')}{failed}",
    ]
    stages = stage_rows(seen.points)
    problems = problems_of(seen, opened, data)
    title, heading = (
        f"{opened.name}: {options.split}",
        f"{count_of(len(tiles), 'record')} after the chain",
    )
    write_sheet(target, tiles, title, heading, lines, problems, stages)
    show(lines, stages, problems)
    print(f"written: {target} ({time.monotonic() - began:.1f} s)")
    return 2 if any(problem.level == "error" for problem in problems) else 0


def open_job_data(resolved: Resolved, options: PeekOptions) -> tuple[Config, Data]:
    from stoker.hosts import cluster

    # Before the recipe imports Ray.
    cluster.set_environment(os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32))
    from stoker.serve.opening import discover, open_splits
    from stoker.serve.shards import DatasetSource

    job = open_job(resolved, options.source_dir)
    if job.source_dir is not None:
        sys.path.insert(0, str(job.source_dir))
    params = {**resolved.config.params, **job.data}
    local = Resolved(resolved.config.model_copy(update={"params": params}), resolved.origins)
    instead = (
        "peek: does not start Ray, with which this recipe reads; see its rows with dataset.take(3)"
    )
    try:
        config = discover(local)
        data = open_splits(config)
    except UsageError as error:
        if "ray.data" not in sys.modules:
            raise
        raise UsageError(instead, *error.problems) from None
    if any(isinstance(source, DatasetSource) for source in data.sources.values()):
        raise UsageError(instead)
    return config, data


def stage_rows(points: list[ChainPoint]) -> list[StageRows]:
    """The changed columns after each stage, with unchanged columns in one line."""
    found, before = [], dict[str, ColumnAfterStage]()
    for point in points:
        rows = {
            name: ColumnAfterStage(
                name, " | ".join(c.kinds) or "NULL", c.shape_text(), str(c.nulls), c.range_text()
            )
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
    rows = []
    for stage in stages:
        title, cost = stage.name, stage.cost.removesuffix(" ms")
        for row in stage.rows or [ColumnAfterStage("", "", "", "", "")]:
            rows.append((title, *row, cost))
            title = cost = ""
    head = ("after", "column", "type", "shape", "NULL", "values", "ms")
    found = [f"{problem.level} {problem.text}" for problem in problems] or ["no problems found"]
    print("\n".join([*lines, table(head, rows, left=head[:4] + head[5:6]), *found]))
