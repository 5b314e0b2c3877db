"""Every host: filters of rows, as pandas and pyarrow write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stoker.errors import UsageError

Filters = list[tuple[str, str, Any]] | list[list[tuple[str, str, Any]]]
"""As in pandas and pyarrow: [("label", "<", 5), ("split", "==", "train")] is joined by AND; a list of such
lists by OR. Operators: == != < > <= >= in, not in."""


def filter_columns(filters: Filters | None) -> list[str]:
    """Head: the columns that filters name.

    Raises:
        UsageError: they are no filters.
    """
    if not filters:
        return []
    try:
        flat = [term for part in filters for term in (part if isinstance(part, list) else [part])]
        columns = [column for column, _, _ in flat]
        expression(filters)
    except Exception as error:
        raise UsageError(
            f"filters={filters!r}: write [(column, operator, value), …] with one of == != < > <= >="
            f" in, not in ({' '.join(str(error).split())[:120]})"
        ) from None
    return list(dict.fromkeys(columns))


def expression(filters: Filters | None) -> Any:
    """Every host: filters as pyarrow evaluates them."""
    from pyarrow import parquet

    return parquet.filters_to_expression(filters)


def without(filters: Filters | None, columns: Iterable[str]) -> Filters | None:
    """Head: the part of the filters that concerns other columns; it keeps at least the same rows.

    Returns:
        None if that is every row.
    """
    if not filters:
        return None
    either: list[Any] = filters if isinstance(filters[0], list) else [filters]
    left = [[term for term in part if term[0] not in columns] for part in either]
    return left if all(left) else None
