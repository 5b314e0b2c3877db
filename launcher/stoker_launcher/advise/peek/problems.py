"""Detects problems, certain or likely, in the examined records."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.figures import count_of, size
from stoker.recipe import Recipe
from stoker.serve.opening import Data
from stoker.train.recipe_work import refuse_single_records, refuse_unfit
from stoker_launcher.advise.peek.looking import IGNORED_CLASS, ColumnStatistics, Look

LEAST = 8
REPEATED = 0.02
"""Smallest fraction of repeated values worth a warning."""
LABELS = ("label", "target", "class")
Level = Literal["error", "warning"]


class Problem(NamedTuple):
    level: Level
    """error: a run would be rejected or fail."""
    text: str


def problems_of(look: Look, config: Config, data: Data) -> list[Problem]:
    recipe: Recipe = data.recipe
    read, made = look.points[0], look.points[-1]
    found = list[str]()
    for name, column in read.columns.items():
        if name in made.columns or not made.records:
            found += _holes(name, column, "")
    for name, column in made.columns.items():
        found += _values(name, column, classes_of(recipe), _ignores(recipe))
        if made is not read and not (name in read.columns and read.columns[name].nulls):
            found += _holes(name, column, f" after {made.name}")
    found += [*_compared(look), *data.notes()]
    if "val" not in data.totals:
        found.append("no val split: a run would not validate")
    problems = [*_failures(look, config, data), *_refusals(config, data)]
    problems += [Problem("warning", text) for text in found]
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.level)


def _ignores(recipe: Recipe) -> bool:
    """Whether the files of the recipe and its bases pass `ignore_index` to anything."""
    kinds = [
        kind for kind in type(recipe).__mro__ if issubclass(kind, Recipe) and kind is not Recipe
    ]
    with contextlib.suppress(
        OSError, TypeError, UnicodeError
    ):  # it may not come from a file of text
        return any(
            "ignore_index" in Path(inspect.getfile(kind)).read_text("utf-8") for kind in kinds
        )
    return False


def classes_of(recipe: Any) -> int | None:
    for name in ("num_classes", "classes"):
        value = getattr(recipe, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            return value
    return None


def grouped(bad: dict[str, str]) -> list[tuple[int, str, str]]:
    """Group reasons that differ only in numbers: (count, first reason, its key)."""
    counts: Counter[str] = Counter()
    first: dict[str, tuple[str, str]] = {}
    for key, reason in bad.items():
        kind = re.sub(r"\d+", "0", reason.replace(key, "…"))
        counts[kind] += 1
        first.setdefault(kind, (reason, key))
    return [(count, *first[kind]) for kind, count in counts.most_common()]


def _failures(look: Look, config: Config, data: Data) -> Iterator[Problem]:
    if look.refused:
        yield Problem("error", look.refused)
    for text, ends_a_run in look.moved:
        yield Problem("error" if ends_a_run else "warning", text)
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
    try:
        refuse_single_records(config, data, config.train.workers or 1)
    except UsageError as error:
        # A run has a train worker per GPU, and so perhaps another last batch.
        yield from (
            Problem("error" if config.train.workers else "warning", text) for text in error.problems
        )


def _holes(name: str, column: ColumnStatistics, where: str) -> Iterator[str]:
    if column.nulls:
        share = "all" if column.nulls == column.values else f"{column.nulls} of"
        yield f"column {name!r} is NULL in {share} {column.values} records{where}"


def _values(
    name: str, column: ColumnStatistics, classes: int | None, ignores: bool
) -> Iterator[str]:
    kind, shape = next(iter(column.kinds), ""), next(iter(column.shapes), ())
    if column.nans:
        yield f"column {name!r} contains NaN or infinity in {count_of(column.nans, 'record')}"
    if column.constant and column.values >= LEAST:
        value = next(iter(column.distinct))
        shown = f" ({value!r:.40})" if not isinstance(value, bytes) else ""
        yield f"column {name!r} is the same in all {column.values} records{shown}"
    if len(shape) == 3 and column.numeric:
        yield from _image(name, kind, column)
    if min((s[0] for s in column.shapes if s), default=1) == 0:
        yield f"column {name!r} is empty in some records"
    is_label = name in LABELS and shape == ()
    is_mask = len(shape) == 2 and ("mask" in name or name in LABELS)
    if kind.startswith(("int", "uint")) and (is_label or is_mask) and column.numeric:
        yield from _classes(name, "a mask" if is_mask else "a label", column, classes, ignores)


def _classes(
    name: str, what: str, column: ColumnStatistics, classes: int | None, ignores: bool
) -> Iterator[str]:
    high = column.high
    if what == "a mask" and high == IGNORED_CLASS and (classes or 0) <= IGNORED_CLASS:
        high = column.highest_class
        if not ignores:
            remedy = f"pass ignore_index={IGNORED_CLASS} to loss and metrics"
            yield f"column {name!r}: masks contain {IGNORED_CLASS}: {remedy}"
    if column.low < 0 or (classes and high >= classes):
        there = f"0 … {classes - 1} are the recipe's classes" if classes else "classes count from 0"
        yield f"column {name!r}: {what} out of range: {column.low:g} … {high:g}; {there}"


def _image(name: str, kind: str, column: ColumnStatistics) -> Iterator[str]:
    low, high = column.low, column.high
    has = f"column {name!r} has {kind} images"
    if kind.startswith("float"):
        scaled = "already normalised" if low < 0 else "already divided by 255" if high <= 1 else ""
        advice = "leave images uint8 in the chain and convert them in on_device()"
        times = 4 if kind == "float32" else 8
        yield (
            f"{has} from {low:.3g} to {high:.3g}: {scaled}; {advice}, or they take {times} times the"
            " bandwidth and may be normalised twice"
            if scaled
            else f"{has}; {advice}"
        )
    elif name == "image" and kind.startswith(("int", "uint")) and kind != "uint8":
        yield (
            f"{has} from {low:g} to {high:g}, which normalisation takes for 0 to 255; begin the chain with"
            " DecodeImage(), or scale them in on_device()"
        )
    elif kind == "uint8" and high <= 1:
        yield (
            f"{has} with no value above {high:g}: scaled to 0 … 1 before the conversion to uint8, so they are"
            " black"
        )
    if column.flat:
        yield f"column {name!r}: {column.flat} of {column.values} images have a single colour"


def _compared(look: Look) -> Iterator[str]:
    for name, column in look.points[0].columns.items():
        large = any(sum(shape) > 64 for shape in column.shapes)
        again = sum(column.distinct.values()) - len(column.distinct)
        if large and again > REPEATED * column.values and not column.constant:
            yield f"column {name!r}: {again} of {column.values} records duplicate an earlier value"
    keys = Counter(sample.key for sample in look.samples)
    if twice := [key for key, count in keys.items() if count > 1]:
        yield f"key {twice[0]!r} names more than one record"
    if look.images:
        yield look.images
    if look.bytes_per_record > 50e6:
        yield f"a preprocessed record takes {size(look.bytes_per_record)}"
