"""Delta tables: reads the files of one table version as Parquet."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from stoker.errors import UsageError
from stoker.read.arrow import Nulls
from stoker.read.folders import is_delta_table, split_folder
from stoker.read.parquet import Filters, ParquetSource, expression, for_statistics
from stoker.read.sources import Source
from stoker.storage.filesystems import filesystem_of, join

CATALOG_NAME = re.compile(r"(uc://)?[\w-]+\.[\w-]+\.[\w-]+")


class DeltaSource(ParquetSource):
    """The rows of a Delta table at one version.

    Partition columns come from the table's log; columns added to the table later are NULL in rows of older
    files.
    """

    def complete(self, path: str, schema: Any) -> None:
        own = self.constants.setdefault(path, {})
        own.update(
            {name: None for name in self.types if name not in own and name not in schema.names}
        )


def open_delta(
    uri: str,
    columns: list[str] | None,
    filters: Filters | None,
    version: int | None,
    nulls: Nulls | None = None,
) -> DeltaSource:
    try:
        import deltalake
    except ImportError:
        raise UsageError(
            f"{uri}: reading a Delta table needs the package deltalake; pip install 'stoker[delta]', or add"
            " deltalake to requirements.txt"
        ) from None
    from pyarrow.dataset import get_partition_keys

    filesystem, root = filesystem_of(uri)
    at = uri if "://" in uri and not uri.startswith("file://") else root
    try:
        table = deltalake.DeltaTable(at, version=version, storage_options=_storage_options())
        dataset = table.to_pyarrow_dataset()  # refuses tables with unsupported features
        partitions = table.metadata().partition_columns
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        which = "" if version is None else f" at version {version}"
        raise UsageError(f"{uri}: cannot be read as a Delta table{which}: {text}") from None
    if not dataset.files:
        raise UsageError(f"{uri}: the Delta table has no rows at version {table.version()}")
    constants = {}
    for fragment in _fragments(dataset, partitions, filters):
        keys = get_partition_keys(fragment.partition_expression)  # with columns that are all NULL
        constants[_path_of(fragment.path, root)] = {name: keys[name] for name in partitions}
    files = filesystem.get_file_info(sorted(constants))
    types = {field.name: field.type for field in dataset.schema}
    return DeltaSource(files, filesystem, columns, filters, constants, nulls, types)


def _fragments(dataset: Any, partitions: list[str], filters: Filters | None) -> list[Any]:
    """Files that may hold matching rows, by the partitions and statistics in the table's log; at least one,
    so that the source reports that no row matches."""
    every = list(dataset.get_fragments())
    try:
        some = for_statistics(filters, [f for f in dataset.schema if f.name not in partitions])
        return list(dataset.get_fragments(expression(some) if some else None)) or every[:1]
    except Exception:
        return every  # the source's own check reports what is wrong with the filters


def _path_of(path: str, root: str) -> str:
    """A path of the table's log, relative to the table or absolute, for pyarrow."""
    if "://" in path:
        return filesystem_of(path)[1]
    return path if path.startswith("/") else join(root, path)


def _storage_options() -> dict[str, str]:
    """Allow plain http, which is refused by default, if the endpoint uses it."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    options = {"endpoint_url": endpoint} if endpoint else {}
    return options | ({"allow_http": "true"} if endpoint.startswith("http://") else {})


def refuse_catalog_name(table: str) -> None:
    """Refuse the name of a table in a catalog, whose files only the catalog's own service hands out."""
    if CATALOG_NAME.fullmatch(table) and not Path(table).exists():
        name = table.removeprefix("uc://")
        raise UsageError(
            f"{table}: is the name of a Unity Catalog table, and read_delta reads folders; write it to a"
            f" volume once: spark.table({name!r}).write.format('delta').save('/Volumes/…'), and name that"
            " folder"
        )
    if table.startswith("dbfs:/Volumes/"):
        raise UsageError(
            f"{table}: write {table.removeprefix('dbfs:')}, the path that all hosts mount"
        )


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
    refuse_catalog_name(table)
    if split is None or is_delta_table(table):
        if split not in (None, "train"):
            return None
        return open_delta(table, columns, filters, version, nulls)
    folder = split_folder(table, split)
    return open_delta(folder, columns, filters, version, nulls) if folder else None
