"""Head: the columns of a table and the labels in one of them, for recipes that find classes in their data."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.errors import UsageError
from stoker.read.arrow import content_of_struct, is_list, is_text

MOST_CLASSES = 1_000_000
"""Higher numbers are ids of something else."""
USUAL = re.compile("im(g|age)|pic|label|class|target|categor")
"""Parts of the names of columns with images or labels."""


def column_types(source: Any) -> dict[str, Any]:
    """Column → Arrow type of tables, tar shards or a `ray.data.Dataset`; empty for other sources."""
    if hasattr(source, "map_batches"):
        schema = source.schema()
        return dict(zip(schema.names, schema.types, strict=True)) if schema else {}
    return source.column_types() if hasattr(source, "column_types") else {}


def refuse_absent_columns(
    data: str, types: dict[str, Any], params: dict[str, str], hints: Mapping[str, str] = {}
) -> None:
    """Refuse data that lacks a column, with the parameter to set."""
    fits = dict(zip(params, (_may_be_image, _may_be_label), strict=True))
    problems = []
    for param, column in params.items():
        if column not in types:
            likely = [name for name, kind in types.items() if fits[param](kind) and name != "key"]
            likely.sort(key=lambda name: USUAL.search(name.lower()) is None)
            others = f" (or {', '.join(likely[1:])})" if len(likely) > 1 else ""
            there = f"has no column {column}; it has {', '.join(types)}"
            write = f": set params.{param}={likely[0]}{others}" if likely else ", which cannot stand for it"
            problems.append(f"{data}: {there}{write}{hints.get(param, '')}")
    if problems:
        raise UsageError(*problems)


def _may_be_image(kind: Any) -> bool:
    import pyarrow as pa

    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(binary or content_of_struct(kind) or (is_list(kind) and is_list(kind.value_type)))


def _may_be_label(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind))


def names_in(data: str, source: Any, column: str, train: Sequence[str] = ()) -> list[str]:
    """The names of a column's classes, if Hugging Face datasets wrote the files."""
    found = [*train]
    for text in dict.fromkeys(each.get(b"huggingface") for each in getattr(source, "metadata", list)()):
        try:
            names = [str(name) for name in json.loads(text)["info"]["features"][column]["names"]]
        except (KeyError, TypeError, ValueError):
            continue
        for number, (one, other) in enumerate(zip(found, names, strict=False)):
            if one != other:
                raise UsageError(
                    f"{data}: {number} in column {column} is {one} in one file and {other} in another; write"
                    " them again with the same ClassLabel"
                )
        found = found or names
    return found


def distinct_labels(data: str, source: Any, column: str, numbers: bool) -> list[Any] | None:
    import pyarrow as pa

    kind = column_types(source).get(column)
    if kind is None or not (numbers or is_text(kind)):
        return None
    wrong = f"{data}: column {column} {{}}; labels must be integers or text"
    # pandas writes integers beside a NULL as floats, and Snowflake as decimals.
    if not (_may_be_label(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise UsageError(wrong.format(f"is {kind}"))
    found = source.unique(column) if hasattr(source, "map_batches") else source.label_values(column)
    if found is None:
        return None
    labels = sorted({value for value in found if value is not None})
    for value in labels:
        if not (value.strip() if isinstance(value, str) else value % 1 == 0):
            raise UsageError(wrong.format(f"holds {value!r}"))
    return labels if is_text(kind) else [int(value) for value in labels]


def alike(names: list[str]) -> tuple[str, ...]:
    """A line on names that only capitals, spaces or the encoding of accents tell apart."""
    folded: dict[str, list[str]] = defaultdict(list)
    for name in names:
        folded["".join(unicodedata.normalize("NFKC", name).casefold().split())].append(name)
    same = [name for those in folded.values() if len(those) > 1 for name in those]
    return (f"classes that look alike: {', '.join(map(repr, same[:6]))}",) if same else ()
