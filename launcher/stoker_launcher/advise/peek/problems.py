"""Detects problems, certain or likely, in the examined records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.serve.opening import Data
from stoker.train.recipe_work import refuse_unfit
from stoker_launcher.advise.peek.looking import ColumnStatistics, Inspection

LABELS = ("label", "target", "class")
Level = Literal["error", "warning"]


class Problem(NamedTuple):
    level: Level
    """error: a run would be rejected or fail."""
    text: str


def problems_of(look: Inspection, config: Config, data: Data) -> list[Problem]:
    read, made = look.points[0], look.points[-1]
    lines = list[str]()
    for name, column in read.columns.items():
        if name in made.columns or not made.records:
            lines += _holes(name, column, "")
    for name, column in made.columns.items():
        if made is not read and not (name in read.columns and read.columns[name].nulls):
            lines += _holes(name, column, f" after {made.name}")
    keys = Counter(sample.key for sample in look.samples)
    if twice := [key for key, count in keys.items() if count > 1]:
        lines.append(f"key {twice[0]!r} names more than one record")
    if look.images:
        lines.append(f"images: {look.images}")
    if look.unstable:
        lines.append("the chain gives another result when the same records run again")
    lines += data.notes()
    if "val" not in data.totals:
        lines.append("no val split: a run would not validate")
    problems = [*_failures(look, config, data), *_refusals(config, data)]
    problems += [Problem("warning", text) for text in lines]
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.level)


def grouped(bad: dict[str, str]) -> list[tuple[int, str, str]]:
    """Group reasons that differ only in numbers or in their record's key: (count, first reason, its key)."""
    counts: Counter[str] = Counter()
    first: dict[str, tuple[str, str]] = {}
    for key, reason in bad.items():
        kind = re.sub(r"\d+", "0", reason if key.isdigit() else reason.replace(key, "…"))
        counts[kind] += 1
        first.setdefault(kind, (reason, key))
    return [(count, *first[kind]) for kind, count in counts.most_common()]


def _failures(look: Inspection, config: Config, data: Data) -> Iterator[Problem]:
    if look.refused:
        yield Problem("error", look.refused)
    # What holds for all records is certain; what holds for the first ones is not.
    certain = look.examined == data.totals.get(look.split) or len(look.bad) == look.examined
    budget, share = config.data.bad_record_budget, len(look.bad) / look.examined
    level: Level = "error" if certain and share > budget else "warning"
    for count, reason, key in grouped(look.bad):
        which, first = (f"{count} × ", "first in record") if count > 1 else ("", "record")
        yield Problem(level, f"{which}{reason}; {first} {data.sources[look.split].path_of(key)}")
    if share > budget:
        fails = "would fail" if level == "error" else "fails if the others are like these"
        yield Problem(
            level,
            f"{len(look.bad)} of {look.examined} records cannot be used ({100 * share:.1f} %): more than"
            f" data.bad_record_budget ({100 * budget:g} %), so a run {fails}",
        )


def _refusals(config: Config, data: Data) -> Iterator[Problem]:
    try:
        refuse_unfit(config, data.recipe, data.totals)
    except UsageError as error:
        yield from (Problem("error", text) for text in error.problems)


def _holes(name: str, column: ColumnStatistics, where: str) -> Iterator[str]:
    if column.nulls:
        share = "all" if column.nulls == column.values else f"{column.nulls} of"
        yield f"column {name!r} is NULL in {share} {column.values} records{where}"
