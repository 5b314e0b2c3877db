"""Every host: reads row groups of a Parquet file and verifies page checksums."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from stoker.errors import UsageError
from stoker.read.arrow import refuse_code
from stoker.read.nulls import Found, in_statistics

BATCH_ROWS = (0, 256, 16, 1)
"""Rows to read at once: 0, all of the row groups, unless Arrow refuses more than 2 GB of nested values; then
fewer and fewer."""


class Group(NamedTuple):
    """Head: a row group that may hold rows of the split."""

    number: int
    first_row: int
    rows: int


def read_footer(
    filesystem: Any, path: str, columns: list[str] | None
) -> tuple[Any, list[Group], dict[str, Found]]:
    """Head: schema and row groups of a file, and its columns that hold NULLs, or may.

    Raises:
        UsageError: the file is not whole, or two columns have one name.
    """
    from pyarrow import parquet

    try:
        with filesystem.open_input_file(path) as file:
            reader = parquet.ParquetFile(file)
            metadata, schema, leaves = reader.metadata, reader.schema_arrow, reader.reader.column_paths
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if metadata.num_rows != sum(sizes):
            raise ValueError(f"its footer lists {metadata.num_rows} rows, its row groups {sum(sizes)}")
        nulls = in_statistics(metadata, leaves, columns or schema.names, range(len(sizes)))
    except Exception as error:
        text = " ".join(str(error).split())
        raise UsageError(f"{path}: not a whole Parquet file: {text[:200]}") from None
    if twice := next((name for name in schema.names if schema.get_field_index(name) < 0), None):
        raise UsageError(f"{path}: has the column {twice} twice; rename or remove one")
    firsts = accumulate(sizes, initial=0)
    return (
        schema,
        [Group(i, row, n) for i, (row, n) in enumerate(zip(firsts, sizes, strict=False)) if n],
        nulls,
    )


def read_groups(filesystem: Any, path: str, groups: list[Group], columns: list[str] | None) -> Any:
    """Every host: row groups as a table; verifies pages that have a checksum.

    Raises:
        UsageError: the file does not match its footer, or a column could run code.
        OSError: it cannot be read, or a checksum is wrong.
    """
    import pyarrow as pa
    from pyarrow import parquet

    rows = sum(g.rows for g in groups)
    try:
        with filesystem.open_input_file(path) as file:
            reader = parquet.ParquetFile(file, page_checksum_verification=True)
            table = _read(reader, [g.number for g in groups], columns)
    except (OSError, pa.ArrowException) as error:
        kind = OSError if isinstance(error, OSError) else UsageError
        raise kind(f"{path}: damaged, or cannot be read: {' '.join(str(error).split())[:200]}") from None
    if table.num_rows != rows and (columns is None or columns):
        raise UsageError(f"{path}: damaged: its row groups list {rows} rows but hold {table.num_rows}")
    refuse_code(table.schema, path)
    for i, field in enumerate(table.schema):
        if field.type in (pa.string_view(), pa.binary_view()):  # many of Arrow's functions lack them
            kind = pa.large_string() if field.type == pa.string_view() else pa.large_binary()
            table = table.set_column(i, field.name, table[field.name].cast(kind))
    return table


def _read(reader: Any, groups: list[int], columns: list[str] | None) -> Any:
    import pyarrow as pa

    # A leaf's path begins with its field's name, which may have dots itself.
    names = [leaf[0] for leaf in reader.reader.column_paths]
    leaves = None if columns is None else [i for i, name in enumerate(names) if name in columns]
    for rows in BATCH_ROWS:
        try:
            if rows:
                return pa.Table.from_batches([*reader.reader.iter_batches(rows, groups, leaves)])
            if columns and len(columns) == 1 and len(groups) == reader.num_row_groups:
                # Starts none of Arrow's threads: the driver reads labels before it forks.
                field = [*dict.fromkeys(names)].index(columns[0])
                return pa.table({columns[0]: reader.reader.read_column(field)})
            return reader.reader.read_row_groups(groups, leaves)
        except pa.ArrowNotImplementedError:
            if rows == BATCH_ROWS[-1]:
                raise
    raise AssertionError
