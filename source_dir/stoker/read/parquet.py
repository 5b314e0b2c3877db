"""Parquet: rows with bytes, numbers, strings or tensors; pushes down columns and filters."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.errors import UsageError
from stoker.protocol import BadRecord, Record, Shard
from stoker.read.arrow import (
    Nulls,
    Rules,
    check_nulls,
    mask_of,
    nulls_in,
    refuse_code,
    same_values,
    values_of,
)
from stoker.read.folders import PARQUET_SUFFIXES, is_delta_table, partitions_of, split_files
from stoker.read.identity import fingerprint_of_files
from stoker.read.sources import Source, StreamedSource, permuted
from stoker.storage.filesystems import common_folder, filesystem_of

if TYPE_CHECKING:
    import numpy as np

Filters = list[tuple[str, str, Any]] | list[list[tuple[str, str, Any]]]
"""As in pandas and pyarrow: [("label", "<", 5), ("split", "==", "train")] is joined by AND; a list of such
lists by OR. Operators: == != < > <= >= in, not in."""


def filter_columns(filters: Filters | None) -> list[str]:
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
    from pyarrow import parquet

    return parquet.filters_to_expression(filters)


def for_statistics(filters: Filters | None, without: Container[str] = ()) -> Any:
    """The part of the filters that statistics can judge, also without some columns; it keeps at least the same
    rows. They do not show NaN, which differs from every value."""
    either: list[Any] = filters or []
    if either and not isinstance(either[0], list):
        either = [filters]
    left = [
        [term for term in part if term[0] not in without and term[1] not in ("!=", "not in")]
        for part in either
    ]
    return left if all(left) else None


BATCH_ROWS = (0, 256, 16, 1)
"""Rows to read at once: 0, all of the row groups, unless Arrow refuses more than 2 GB of nested values; then
fewer and fewer."""


class RowGroup(NamedTuple):
    number: int
    first_row: int
    rows: int


class Footer(NamedTuple):
    schema: Any
    rows: int
    groups: list[RowGroup]
    matching: int
    nulls: Counter[str]
    """Of columns of which statistics tell."""


def read_footer(filesystem: Any, path: str, columns: list[str] | None) -> Footer:
    from pyarrow import parquet

    try:
        with filesystem.open_input_file(path) as file:
            reader = parquet.ParquetFile(file)
            metadata, schema = reader.metadata, reader.schema_arrow
            leaves = reader.reader.column_paths
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        if metadata.num_rows != sum(sizes):
            raise ValueError(
                f"its footer lists {metadata.num_rows} rows, its row groups {sum(sizes)}"
            )
        kinds = {field.name: field.type for field in schema}
        wanted = kinds if columns is None else {c: kinds[c] for c in columns if c in kinds}
        nulls = nulls_in(metadata, leaves, wanted)
    except Exception as error:
        text = " ".join(str(error).split())
        raise UsageError(f"{path}: not a whole Parquet file: {text[:200]}") from None
    if twice := next((name for name in schema.names if schema.get_field_index(name) < 0), None):
        raise UsageError(f"{path}: has the column {twice} twice; rename or remove one")
    firsts = accumulate(sizes, initial=0)
    groups = [
        RowGroup(i, row, n) for i, (row, n) in enumerate(zip(firsts, sizes, strict=False)) if n
    ]
    return Footer(schema, metadata.num_rows, groups, metadata.num_rows, nulls)


def read_groups(
    filesystem: Any, path: str, groups: list[RowGroup], columns: list[str] | None
) -> Any:
    """Row groups as a table; verifies pages that have a checksum."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = sum(g.rows for g in groups)
    try:
        with filesystem.open_input_file(path) as file:
            reader = parquet.ParquetFile(file, page_checksum_verification=True)
            table = _read(reader, [g.number for g in groups], columns)
    except (OSError, pa.ArrowException) as error:
        kind = OSError if isinstance(error, OSError) else UsageError
        raise kind(
            f"{path}: damaged, or cannot be read: {' '.join(str(error).split())[:200]}"
        ) from None
    if table.num_rows != rows and (columns is None or columns):
        raise UsageError(
            f"{path}: damaged: its row groups list {rows} rows but hold {table.num_rows}"
        )
    refuse_code(table.schema, path)
    for i, field in enumerate(table.schema):
        # Many of Arrow's functions lack them.
        if field.type in (pa.string_view(), pa.binary_view()):
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


class ParquetSource(StreamedSource):
    """One record per row, read by row groups.

    Columns of {bytes, path} structs, as Hugging Face datasets write images, give their bytes; lists and
    Arrow tensors give NumPy arrays. Filters skip row groups by their statistics; in the others, the filter's
    columns are read first, and the rest only if a row matches.
    """

    random = False

    def __init__(
        self,
        files: list[Any],
        filesystem: Any,
        columns: list[str] | None = None,
        filters: Filters | None = None,
        constants: dict[str, dict[str, Any]] | None = None,
        nulls: Nulls | None = None,
        types: dict[str, Any] | None = None,
        declared: bool = False,
    ) -> None:
        """
        Args:
            declared: `types` has all columns; those that a file lacks are NULL in its rows.
        """
        self.sizes = {f.path: f.size for f in files}
        self.columns, self.filters, self.declared = columns, filters, declared
        self.constants, self.nulls, self.types = constants or {}, nulls or {}, types or {}
        self.folder = common_folder(files)
        self.filesystem = filesystem

    def check(self) -> None:
        schema = self._check_schemas()
        check_nulls(self, [*(self.columns or schema)])
        if self.count() == 0:
            why = f" that matches {self.filters}" if self.filters else ""
            raise UsageError(f"{next(iter(self.sizes))}: the Parquet files hold no row{why}")

    def _check_schemas(self) -> dict[str, Any]:
        """Column → its type in the first file, which those of the others must match."""
        import pyarrow as pa

        first, schema = next(iter(self.footers)), self._first_schema()
        named = dict.fromkeys([*(self.columns or []), *filter_columns(self.filters), *self.nulls])
        if missing := [c for c in named if c not in schema]:
            raise UsageError(
                f"{first}: has no column {', '.join(missing)}; it has {', '.join(schema)}"
            )
        wanted = [*named] if self.columns else [*schema]
        if "key" in (self.columns or schema):
            raise UsageError(
                f"{first}: has a column key, which names a record (its file and row); leave it out with"
                " columns=[…], or rename it"
            )
        if "_hoodie_commit_time" in schema:
            raise UsageError(
                f"{first}: is of a Hudi table, so some files may be outdated; write a copy of its rows"
            )
        for path, footer in self.footers.items():
            other = self._whole_schema(path, footer.schema)
            if absent := [c for c in wanted if c not in other]:
                raise UsageError(f"{path}: lacks the column {', '.join(absent)} that {first} has")
            if not self.columns and (more := [c for c in other if c not in schema]):
                raise UsageError(f"{first}: lacks the column {', '.join(more)} that {path} has")
            for column in wanted:
                kinds = schema[column], other[column]
                if None not in kinds and not same_values(*kinds):
                    raise UsageError(
                        f"{path}: column {column} is {kinds[1]}, in {first} it is {kinds[0]}"
                    )
                if self.types.get(column) in (None, pa.null()):
                    self.types[column] = other[column]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(self._refuse_other_values, *zip(*self.footers.items(), strict=True)))
        return schema

    def _refuse_other_values(self, path: str, footer: Footer) -> None:
        constants = self.constants.get(path, {})
        for column in constants.keys() & {*footer.schema.names} if footer.groups else ():
            values = read_groups(self.filesystem, path, footer.groups, [column])[column].to_pylist()
            if others := {*map(str, values)} - {str(constants[column])}:
                raise UsageError(
                    f"{path}: column {column} holds {min(others)}, but its folder says {constants[column]};"
                    " rename one"
                )

    def _whole_schema(self, path: str, schema: Any) -> dict[str, Any]:
        """Column → its type; None for a column that the file lacks."""
        types = {field.name: field.type for field in schema}
        return types | dict.fromkeys(self.constants.get(path, {}))

    def _first_schema(self) -> dict[str, Any]:
        path, footer = next(iter(self.footers.items()))
        return self._whole_schema(path, footer.schema)

    @cached_property
    def footers(self) -> dict[str, Footer]:
        """Of each file with rows to read; writers leave others, whose types may be none."""
        with ThreadPoolExecutor(16) as pool:
            every = list(zip(self.sizes, pool.map(self._footer, self.sizes), strict=True))
        return dict([(path, footer) for path, footer in every if footer.matching] or every[:1])

    def _footer(self, path: str) -> Footer:
        import pyarrow as pa

        footer = read_footer(self.filesystem, path, self.columns)
        if self.declared:
            own = self.constants.setdefault(path, {})
            names = {*own, *footer.schema.names}
            own |= {name: None for name in self.types if name not in names}
        try:
            return self._filtered(path, footer) if self.filters else footer
        except pa.ArrowException as error:
            text = " ".join(str(error).split())[:200]
            raise UsageError(
                f"{path}: filters={self.filters!r} do not fit its columns: {text}"
            ) from None

    def for_workers(self) -> ParquetSource:
        slim = copy(self)
        vars(slim).pop("footers", None)
        return slim

    def _filtered(self, path: str, footer: Footer) -> Footer:
        from pyarrow import dataset

        constants = self.constants.get(path, {})
        if not {*footer.schema.names, *constants}.issuperset(filter_columns(self.filters)):
            return footer  # check() reports the column
        groups = footer.groups
        if own := for_statistics(self.filters, without=constants):
            # Statistics rule out most row groups that cannot match, without reading them.
            fragment = dataset.ParquetFileFormat().make_fragment(path, self.filesystem)
            kept = fragment.split_by_row_group(expression(own), footer.schema)
            possible = {info.id for part in kept for info in part.row_groups}
            groups = [group for group in groups if group.number in possible]
        rows = {group: len(self._rows(path, [group])) for group in groups}
        matching = [group for group in groups if rows[group]]
        return footer._replace(groups=matching, matching=sum(rows.values()))

    def _rows(self, path: str, groups: list[RowGroup]) -> np.ndarray[Any, Any]:
        """Positions of the rows to keep within these concatenated row groups."""
        import numpy as np
        import pyarrow as pa

        rows = sum(g.rows for g in groups)
        if not self.filters:
            return np.arange(rows)
        constants = self.constants.get(path, {})
        names = filter_columns(self.filters)
        own = [name for name in names if name not in constants]
        table = pa.table({"": pa.nulls(rows)})
        if own:
            table = read_groups(self.filesystem, path, groups, own)
        for name in names:
            if name in constants:
                table = table.append_column(
                    name, pa.array([constants[name]] * rows, self.types.get(name))
                )
        table = table.append_column("__row", pa.array(np.arange(rows)))
        kept: np.ndarray[Any, Any] = table.filter(expression(self.filters))["__row"].to_numpy()
        return kept

    def count(self) -> int:
        return sum(footer.matching for footer in self.footers.values())

    def fingerprint(self) -> str:
        paths, groups = [*self.footers], [footer.groups for footer in self.footers.values()]
        names = [path.removeprefix(self.folder) for path in paths]
        constants = [self.constants.get(path) for path in paths]
        layout = names, groups, self.columns, self.filters, constants, self.nulls
        sizes = [self.sizes[path] for path in paths]
        return fingerprint_of_files(self.filesystem, paths, sizes, layout)

    def shards(self, records: int, order: np.random.Generator | None) -> list[Shard]:
        shards: list[Shard] = []
        for path, footer in self.footers.items():
            part: list[RowGroup] = []
            for group in footer.groups:
                part.append(group)
                if sum(g.rows for g in part) >= records or group is footer.groups[-1]:
                    rows = None if self.filters else sum(g.rows for g in part)
                    first, last = part[0].number, part[-1].number
                    home, name = f"{path}:{first}", path.removeprefix(self.folder)
                    shards.append(Shard(path, first, last + 1, rows, tuple(part), home, name))
                    part = []
        return permuted(shards, order)

    def arrangement(self, count: int, order: np.random.Generator | None) -> list[int]:
        return list(range(count)) if order is None else order.permutation(count).tolist()

    def read(self, shard: Shard, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        import numpy as np

        groups: list[RowGroup] = list(shard.items)
        kept = self._rows(shard.path, groups)
        constants = self.constants.get(shard.path, {})
        wanted = None if self.columns is None else [c for c in self.columns if c not in constants]
        table = read_groups(self.filesystem, shard.path, groups, wanted)
        name = shard.path.removeprefix(self.folder)
        rules = Rules(shard.path, self.nulls)
        columns: dict[str, Callable[[int], Any]] = {}
        for column in table.column_names:
            array = table[column]
            kind = self.types.get(column, array.type)
            columns |= rules.apply(column, kind, mask_of(array, kept), values_of(array))
        for column, constant in constants.items():
            if self.columns is None or column in self.columns:
                mask = np.ones(table.num_rows, bool) if constant is None else None
                columns |= rules.apply(
                    column,
                    self.types.get(column),
                    mask,
                    partial(lambda value, row: value, constant),
                )
        in_file = np.concatenate([np.arange(g.first_row, g.first_row + g.rows) for g in groups])
        for row in kept[self.arrangement(len(kept), order)].tolist():
            # A row's number in its file is its identity, regardless of filters.
            record = {"key": f"{name}:{in_file[row]}"}
            if row in rules.bad:
                yield BadRecord(record["key"], f"column {rules.bad[row]} is NULL")
                continue
            try:
                for column, value in columns.items():
                    record[column] = value(row)
            except Exception as error:
                yield BadRecord(record["key"], f"column {column}: {error}")
                continue
            yield record

    def column_types(self) -> dict[str, Any]:
        return {c: kind or self.types.get(c) for c, kind in self._first_schema().items()}

    def label_values(self, column: str) -> Counter[Any]:
        """Value → its number of rows."""
        from pyarrow import compute

        self._check_schemas()

        def values(path: str, footer: Footer) -> dict[Any, int]:
            if column in (own := self.constants.get(path, {})) or not footer.groups:
                return {own[column]: len(self._rows(path, footer.groups))} if column in own else {}
            table = read_groups(self.filesystem, path, footer.groups, [column])
            rows = self._rows(path, footer.groups)
            found = compute.value_counts(table[column].take(rows))
            return dict(zip(found.field(0).to_pylist(), found.field(1).to_pylist(), strict=True))

        with ThreadPoolExecutor(16) as pool:
            total: Counter[Any] = Counter()
            for found in pool.map(values, *zip(*self.footers.items(), strict=True)):
                total.update(found)
            return total


def read_parquet(
    root: str | os.PathLike[str],
    split: str,
    columns: list[str] | None = None,
    filters: Filters | None = None,
    nulls: Nulls | None = None,
    ignore: Sequence[str] = (),
) -> Source | None:
    """Read Parquet files under `root/<split>/` or named `root/<split>*.parquet`.

    Folders such as `label=cat/` and `split=train/`, as Hive and Spark write them, are columns.

    Args:
        root: folder or URI; a single file is the train split.
        split: train or val.
        columns: read these columns only; default: all.
        filters: keep rows that match, [("label", "<", 5), …]; row groups that cannot match are not read.
        nulls: how to handle a column's NULLs, {"age": "quarantine"}: drop and count the record; "keep": NaN
            for floats, otherwise 0, False or "" plus a column age__valid; or a replacement value. NULLs of
            other columns are refused, before training if the files' statistics show them.
        ignore: patterns of files that are not read, such as `*.txt`.

    Raises:
        UsageError: no files, or a Delta table, whose old files must not be read.
    """
    root = os.fspath(root)
    if is_delta_table(root):
        raise UsageError(
            f"{root}: is a Delta table, so some files may be outdated; read it with read_delta"
        )
    files, notes = split_files(root, split, PARQUET_SUFFIXES, ignore)
    if not files:
        return None
    constants, types = partitions_of(root, files)
    own = filesystem_of(root)[0]
    return ParquetSource(files, own, columns, filters, constants, nulls, types).noting(*notes)
