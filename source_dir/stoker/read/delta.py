"""Delta tables: reads the files of one table version as Parquet.

Partition columns come from the table's log; columns added to the table later are NULL in rows of older files.
"""

from __future__ import annotations

import contextlib
import os

from stoker.errors import UsageError
from stoker.read.arrow import Nulls
from stoker.read.folders import is_delta_table, split_folder
from stoker.read.parquet import Filters, ParquetSource, expression, filter_columns, for_statistics
from stoker.read.sources import Source
from stoker.storage.filesystems import endpoint_of_s3, filesystem_of, join


def open_delta(
    uri: str,
    columns: list[str] | None,
    filters: Filters | None,
    version: int | None,
    nulls: Nulls | None = None,
) -> ParquetSource:
    try:
        import deltalake
    except ImportError:
        raise UsageError(
            f"{uri}: reading a Delta table needs the package deltalake; pip install 'stoker[delta]', or add"
            " deltalake to requirements.txt"
        ) from None
    import pyarrow as pa
    from pyarrow.dataset import get_partition_keys

    filesystem, root = filesystem_of(uri)
    at = uri if "://" in uri and not uri.startswith("file://") else root
    endpoint = endpoint_of_s3()
    options = {"allow_http": "true"} | ({"endpoint_url": endpoint} if endpoint else {})
    try:
        table = deltalake.DeltaTable(at, version=version, storage_options=options)
        dataset = table.to_pyarrow_dataset()  # refuses tables with unsupported features
        partitions = table.metadata().partition_columns
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        which = "" if version is None else f" at version {version}"
        raise UsageError(f"{uri}: cannot be read as a Delta table{which}: {text}") from None
    fragments = every = list(dataset.get_fragments())
    if not every:
        raise UsageError(f"{uri}: the Delta table has no rows at version {table.version()}")
    with contextlib.suppress(pa.ArrowException):  # the source's own check says what is wrong
        if filter_columns(filters) and (judged := for_statistics(filters)):
            fragments = list(dataset.get_fragments(expression(judged)))
    constants = {}
    for fragment in fragments or every[:1]:  # of one at least, to say that no row matches
        keys = get_partition_keys(fragment.partition_expression)  # with columns that are all NULL
        path = fragment.path  # relative to the table or absolute
        path = filesystem_of(path)[1] if "://" in path else path
        path = path if path.startswith("/") or "://" in fragment.path else join(root, path)
        constants[path] = {name: keys[name] for name in partitions}
    files = filesystem.get_file_info(sorted(constants))
    types = {field.name: field.type for field in dataset.schema}
    return ParquetSource(files, filesystem, columns, filters, constants, nulls, types, True)


def read_delta(
    table: str | os.PathLike[str],
    split: str | None = None,
    columns: list[str] | None = None,
    filters: Filters | None = None,
    version: int | None = None,
    nulls: Nulls | None = None,
) -> Source | None:
    """Read a Delta table; requires the extra `delta` (`pip install stoker[delta]`).

    Args:
        table: path (on Databricks, also `/Volumes/…`) or s3:// address of a table, or of a folder with the
            tables train and val.
        split: train or val; None: the table itself, with `filters` selecting its rows.
        columns: read these columns only; default: all.
        filters: keep rows that match, [("split", "==", "train"), …]; partitions and row groups that
            cannot match are not read.
        version: read this version of the table; default: the version when the job starts.
        nulls: how to handle a column's NULLs, as in `read_parquet`.

    Raises:
        UsageError: no such table, version or column, or the table needs an unsupported feature.
    """
    table = os.fspath(table)
    if split is None or is_delta_table(table):
        if split not in (None, "train"):
            return None
        return open_delta(table, columns, filters, version, nulls)
    folder = split_folder(table, split)
    return open_delta(folder, columns, filters, version, nulls) if folder else None
