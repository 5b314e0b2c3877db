"""Finds NULLs of Parquet and Delta columns before training, and applies the rules for allowed ones.

read_parquet(root, split, nulls={"age": "quarantine"})   drop the record and count it as bad
read_parquet(root, split, nulls={"age": "keep"})         a float: NaN; otherwise 0, False or "", and a column
                                                         age__valid, which is False there
read_parquet(root, split, nulls={"age": 0.0})            use this value instead
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker.errors import UsageError
from stoker.figures import count_of
from stoker.read.arrow import content_of_struct, is_text

if TYPE_CHECKING:
    import numpy as np

    from stoker.read.parquet import ParquetSource

Nulls = dict[str, Any]
"""Column → "quarantine", "keep" or a value of the column's type."""

QUARANTINE, KEEP = "quarantine", "keep"
VALID_SUFFIX = "__valid"
READ_LIMIT_BYTES = 2**30
"""Columns without statistics are read before training up to this total size. Beyond it, a NULL without a rule
ends the run when it is read."""


@dataclass
class Found:
    """Head: a column's NULLs according to a file's statistics."""

    nulls: int = 0
    unclear: list[int] = field(default_factory=list)
    """Row groups without such statistics."""
    unclear_bytes: int = 0


def in_statistics(
    metadata: Any, paths: list[list[str]], columns: Sequence[str], groups: Sequence[int]
) -> dict[str, Found]:
    """Head: columns that hold NULLs, or may, by the statistics of some row groups.

    Args:
        metadata: of the file.
        paths: of its leaves; each begins with the name of its column.
        columns: to look at.
        groups: their numbers.
    """
    leaves: dict[int, str] = {}
    for number, path in enumerate(paths):
        # Of {bytes, path} structs, only the bytes are read.
        if path[0] in columns and not (path[1:] == ["path"] and [path[0], "bytes"] in paths):
            leaves[number] = path[0]
    found: dict[str, Found] = {}
    for group in groups:
        row_group = metadata.row_group(group)
        for number, name in leaves.items():
            chunk = row_group.column(number)
            if chunk.physical_type != metadata.schema.column(number).physical_type:
                # Arrow would end the process at the statistics of such a column.
                leaf = ".".join(paths[number])
                raise ValueError(f"its row group {group} has another type of {leaf} than its schema")
            statistics = chunk.statistics if chunk.is_stats_set else None
            nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
            if nulls == 0:
                continue
            column = found.setdefault(name, Found())
            if nulls is None or paths[number] != [name]:  # for lists, statistics count empty ones too
                if group not in column.unclear:
                    column.unclear.append(group)
                column.unclear_bytes += chunk.total_compressed_size
            else:
                column.nulls += nulls
    return found


def check_nulls(source: ParquetSource, columns: list[str]) -> None:
    """Head: refuse NULLs without a rule, in all columns at once.

    Args:
        source: its footers are read.
        columns: of its records.

    Raises:
        UsageError: one line per column.
    """
    problems, reads = [], 0
    files = list(zip(source.paths, source.footers, strict=True))
    rows = {path: footer.matching for path, footer in files}
    for column in columns:
        if column in source.nulls:
            check_rule(column, source.nulls[column], source.types[column])
            if column + VALID_SUFFIX in columns:
                problems.append(f"nulls: column {column} and {column}{VALID_SUFFIX}: rename the latter")
            continue
        counts, unclear = {}, []
        for path, footer in files:
            found = footer.nulls.get(column, Found())
            if source.constants.get(path, {}).get(column, ()) is None:
                counts[path] = footer.matching
            elif not found.unclear and not (found.nulls and source.filters):
                counts[path] = found.nulls
            else:
                reads += found.unclear_bytes
                unclear += [(path, column, footer.groups)] if reads <= READ_LIMIT_BYTES else []
        with ThreadPoolExecutor(16) as pool:
            counted = pool.map(lambda each: source.count_nulls(*each), unclear)
            counts |= {path: nulls for (path, *_), nulls in zip(unclear, counted, strict=True)}
        if counts := {path: counts[path] for path in rows if counts.get(path)}:
            problems.append(refusal(column, counts, rows))
            if content_of_struct(source.types.get(column)) and sum(counts.values()) == source.count():
                problems[-1] += "; its images lie elsewhere (field path): embed them when you write the files"
    if problems:
        raise UsageError(*problems)


def check_rule(column: str, rule: Any, kind: Any) -> None:
    """Head: refuse a rule that does not fit its column.

    Raises:
        UsageError: names the column, its type and the valid rules.
    """
    if rule != QUARANTINE:
        stand_in(column, rule, kind)


def stand_in(column: str, rule: Any, kind: Any) -> Any:
    """Every host: the value in a record for a NULL that a rule keeps or replaces.

    Raises:
        UsageError: the rule does not fit the column's type.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if rule == KEEP:
        if types.is_floating(kind):
            return float("nan")
        if types.is_boolean(kind):
            return False
        if types.is_integer(kind):
            return 0
        if is_text(kind):
            return ""
        raise UsageError(
            f"nulls: column {column} is {kind}; keep is for numbers, booleans and text: use quarantine"
        )
    is_number = isinstance(rule, int | float) and not isinstance(rule, bool)
    if is_number and types.is_floating(kind):
        return float(rule)
    if is_number and types.is_integer(kind) and int(rule) == rule:
        return int(rule)
    if isinstance(rule, bool) and types.is_boolean(kind):
        return rule
    if isinstance(rule, str) and is_text(kind):
        return rule
    raise UsageError(
        f"nulls: {rule!r} does not fit column {column}, which is {kind}; use quarantine, keep or a value of"
        " that type"
    )


def has_valid_column(rule: Any, kind: Any) -> bool:
    """Every host: whether an extra column marks where this one was NULL."""
    import pyarrow as pa

    return bool(rule == KEEP) and not pa.types.is_floating(kind)


def refusal(column: str, counts: dict[str, int], rows: dict[str, int]) -> str:
    """Head: the error message for a column's NULLs.

    Args:
        column: its name.
        counts: NULLs by file, for files that hold some.
        rows: records by file.
    """
    path = next(iter(counts))
    others = f", and {sum(counts.values()) - counts[path]} in {count_of(len(counts) - 1, 'other file')}"
    return (
        f"{path}: column {column} holds {count_of(counts[path], 'NULL')} in {count_of(rows[path], 'row')}"
        f"{others if len(counts) > 1 else ''}; handle them with"
        f' nulls={{"{column}": "quarantine"}}, "keep" or a value, or leave the column out with columns=[…]'
    )


class Rules:
    """Chain worker: applies the rules to the NULLs of one file.

    Args:
        path: the file.
        nulls: the source's rules.
    """

    def __init__(self, path: str, nulls: Nulls) -> None:
        self.path, self.nulls = path, nulls
        self.bad: dict[int, str] = {}
        """Rows to quarantine, and the column."""

    def apply(
        self, column: str, kind: Any, mask: np.ndarray[Any, Any] | None, value: Callable[[int], Any]
    ) -> dict[str, Callable[[int], Any]]:
        """A column as seen by records: name → function from row number to value; also its validity column.

        Raises:
            UsageError: it holds a NULL without a rule.
        """
        rule = self.nulls.get(column)
        if column not in self.nulls:
            if mask is not None and mask.any():
                raise UsageError(refusal(column, {self.path: int(mask.sum())}, {self.path: len(mask)}))
            return {column: value}
        if rule == QUARANTINE:
            if mask is not None:
                self.bad |= {row: self.bad.get(row, column) for row in mask.nonzero()[0].tolist()}
            return {column: value}
        found = {column: value}
        if mask is not None:
            instead, hidden = stand_in(column, rule, kind), mask
            found[column] = lambda row: instead if hidden[row] else value(row)
        if has_valid_column(rule, kind):
            found[column + VALID_SUFFIX] = lambda row: mask is None or not mask[row]
        return found
