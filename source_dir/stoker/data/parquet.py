"""Parquet: rows with bytes, numbers, strings or tensors; columns and filters are pushed down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.config import UsageError
from stoker.data.filesystems import common_folder, filesystem_of_files
from stoker.data.identity import fingerprint_of_files
from stoker.data.sources import BadRecord, Piece, Record, Source

if TYPE_CHECKING:
    import numpy as np

Filters = list[tuple[str, str, Any]] | list[list[tuple[str, str, Any]]]
"""As pandas and pyarrow write them: [("label", "<", 5), ("split", "==", "train")] are joined by AND; a
list of such lists is joined by OR. Operators: == != < > <= >= in, not in."""


class Group(NamedTuple):
    """Head: a row group that may hold rows of the split."""

    number: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class Footer:
    """Head: what the end of a Parquet file tells."""

    schema: Any
    groups: list[Group]
    matching: int
    """Rows that the filters keep; all of them without filters."""


class ParquetSource(Source):
    """Head and CPU task: one record per row, read by row groups.

    Columns of {bytes, path} structs, as Hugging Face datasets write images, give their bytes;
    lists and Arrow tensors give NumPy arrays. A filter skips row groups by their statistics; of the
    others its own columns are read first, and the rest only where a row matches.

    Args:
        files: pyarrow FileInfo of each file.
        columns: columns of the records; None: all.
        filters: rows to keep; None: all.
        constants: per path, columns that the file does not hold and their value in all its rows.
    """

    random = False

    def __init__(
        self,
        files: list[Any],
        columns: list[str] | None = None,
        filters: Filters | None = None,
        constants: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.paths = [f.path for f in files]
        self.columns, self.filters = columns, filters
        self.constants = constants or {}
        self.sizes = [f.size for f in files]
        self.folder = common_folder(files)
        self.filesystem = filesystem_of_files(files)
        self.footers: list[Footer] = []

    def check(self) -> None:
        self._ensure_footers()
        schema = self._whole_schema(self.paths[0], self.footers[0].schema)
        named = dict.fromkeys([*(self.columns or []), *self._filter_columns()])
        missing = [c for c in named if c not in schema]
        if missing:
            raise UsageError(
                f"{self.paths[0]}: has no column {', '.join(missing)}; it has {', '.join(schema)}"
            )
        wanted = [*named] if self.columns else [*schema]
        for path, footer in zip(self.paths, self.footers, strict=True):
            other = self._whole_schema(path, footer.schema)
            absent = [c for c in wanted if c not in other]
            if absent:
                raise UsageError(f"{path}: lacks the column {', '.join(absent)} that {self.paths[0]} has")
            for column in wanted:
                kinds = schema[column], other[column]
                if None not in kinds and kinds[0] != kinds[1]:
                    raise UsageError(
                        f"{path}: column {column} is {kinds[1]}, in {self.paths[0]} it is {kinds[0]}"
                    )
        if self.count() == 0:
            why = f" that matches {self.filters}" if self.filters else ""
            raise UsageError(f"{self.paths[0]}: the Parquet files hold no row{why}")

    def _whole_schema(self, path: str, schema: Any) -> dict[str, Any]:
        """Column → its type; None for one that the file does not hold itself."""
        return {field.name: field.type for field in schema} | dict.fromkeys(self.constants.get(path, {}))

    def _ensure_footers(self) -> None:
        if not self.footers:
            with ThreadPoolExecutor(16) as pool:
                self.footers = list(pool.map(self._footer, self.paths))

    def _footer(self, path: str) -> Footer:
        from pyarrow import dataset

        try:
            fragment = dataset.ParquetFileFormat().make_fragment(path, self.filesystem)
            metadata = fragment.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            schema = fragment.physical_schema
        except Exception as error:
            text = " ".join(str(error).split())
            raise UsageError(f"{path}: not a whole Parquet file: {text[:200]}") from None
        self.complete(path, schema)
        groups, row = [], 0
        for number, size in enumerate(sizes):
            groups.append(Group(number, row, size))
            row += size
        if not self.filters:
            return Footer(schema, [g for g in groups if g.rows], row)
        return Footer(schema, *self._matching(path, schema, groups))

    def complete(self, path: str, schema: Any) -> None:
        """Head: add to `constants` what a file of this schema lacks; nothing here."""

    def for_tasks(self) -> ParquetSource:
        slim = copy(self)
        slim.footers = []
        return slim

    def _matching(self, path: str, schema: Any, groups: list[Group]) -> tuple[list[Group], int]:
        """The row groups that hold matching rows, and how many rows match in all."""
        from pyarrow import dataset, parquet

        constants = self.constants.get(path, {})
        known = {*schema.names, *constants}
        if not known.issuperset(self._filter_columns()):
            return groups, sum(g.rows for g in groups)  # check() names the column
        fragment = dataset.ParquetFileFormat().make_fragment(path, self.filesystem)
        possible = {g.number for g in groups}
        own = without(self.filters, constants)
        if own:
            # The statistics of each row group rule out most that cannot match, without reading them.
            kept = fragment.split_by_row_group(parquet.filters_to_expression(own), schema)
            possible = {info.id for part in kept for info in part.row_groups}
        found = []
        matching = 0
        for group in (g for g in groups if g.number in possible):
            rows = len(self._rows(path, [group]))
            if rows:
                found.append(group)
                matching += rows
        return found, matching

    def _filter_columns(self) -> list[str]:
        if not self.filters:
            return []
        try:
            flat = [term for part in self.filters for term in (part if isinstance(part, list) else [part])]
            columns = [column for column, _, _ in flat]
            self._expression()
        except Exception as error:
            raise UsageError(
                f"filters={self.filters!r}: write [(column, operator, value), …] with one of == != < > <= >="
                f" in, not in ({' '.join(str(error).split())[:120]})"
            ) from None
        return list(dict.fromkeys(columns))

    def _expression(self) -> Any:
        from pyarrow import parquet

        return parquet.filters_to_expression(self.filters)

    def _rows(self, path: str, groups: list[Group]) -> np.ndarray[Any, Any]:
        """Every host: positions within these row groups, one after the other, of the rows to keep."""
        import numpy as np
        import pyarrow as pa
        from pyarrow import parquet

        rows = sum(g.rows for g in groups)
        if not self.filters:
            return np.arange(rows)
        constants = self.constants.get(path, {})
        names = self._filter_columns()
        with self.filesystem.open_input_file(path) as file:
            own = [name for name in names if name not in constants]
            numbers = [g.number for g in groups]
            table = (
                parquet.ParquetFile(file).read_row_groups(numbers, columns=own)
                if own
                else pa.table({"": pa.nulls(rows)})
            )
        for name in names:
            if name in constants:
                table = table.append_column(name, pa.array([constants[name]] * rows))
        table = table.append_column("__row", pa.array(np.arange(rows)))
        kept: np.ndarray[Any, Any] = table.filter(self._expression())["__row"].to_numpy()
        return kept

    def count(self) -> int:
        self._ensure_footers()
        return sum(footer.matching for footer in self.footers)

    def name_of(self, piece: Piece) -> str:
        return piece.path.removeprefix(self.folder)

    def fingerprint(self) -> str:
        self._ensure_footers()
        names = [path.removeprefix(self.folder) for path in self.paths]
        constants = [self.constants.get(path) for path in self.paths]
        layout = names, [f.groups for f in self.footers], self.columns, self.filters, constants
        return fingerprint_of_files(self.filesystem, self.paths, self.sizes, layout)

    def pieces(self, records: int, order: np.random.Generator | None) -> list[Piece]:
        self._ensure_footers()
        pieces: list[Piece] = []
        for path, footer in zip(self.paths, self.footers, strict=True):
            part: list[Group] = []
            for group in footer.groups:
                part.append(group)
                if sum(g.rows for g in part) >= records or group is footer.groups[-1]:
                    rows = None if self.filters else sum(g.rows for g in part)
                    first, last = part[0].number, part[-1].number
                    home = f"{path}:{first}"
                    pieces.append(Piece(path, first, last + 1, rows, tuple(part), home))
                    part = []
        if order is not None:
            pieces = [pieces[i] for i in order.permutation(len(pieces))]
        return pieces

    def arrangement(self, count: int, order: np.random.Generator | None) -> list[int]:
        return list(range(count)) if order is None else order.permutation(count).tolist()

    def read(self, piece: Piece, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        import numpy as np
        from pyarrow import parquet

        groups: list[Group] = list(piece.items)
        kept = self._rows(piece.path, groups)
        constants = self.constants.get(piece.path, {})
        wanted = None if self.columns is None else [c for c in self.columns if c not in constants]
        with self.filesystem.open_input_file(piece.path) as file:
            table = parquet.ParquetFile(file).read_row_groups([g.number for g in groups], columns=wanted)
        name = piece.path.removeprefix(self.folder)
        columns = {column: _values(table[column]) for column in table.column_names}
        added = {c: v for c, v in constants.items() if self.columns is None or c in self.columns}
        in_file = np.concatenate([np.arange(g.first_row, g.first_row + g.rows) for g in groups])
        for row in kept[self.arrangement(len(kept), order)].tolist():
            # A row's number in its file is its identity, whatever the filters leave out.
            record = {"key": f"{name}:{in_file[row]}", **added}
            try:
                for column, value in columns.items():
                    record[column] = value(row)
            except Exception as error:
                yield BadRecord(record["key"], f"column {column}: {error}")
                continue
            yield record

    def label_values(self, column: str) -> set[Any]:
        """Head: the distinct values of a column."""
        from pyarrow import compute, parquet

        self._ensure_footers()
        found: set[Any] = set()
        for path, footer in zip(self.paths, self.footers, strict=True):
            if column in self.constants.get(path, {}):
                found.add(self.constants[path][column])
                continue
            with self.filesystem.open_input_file(path) as file:
                numbers = [g.number for g in footer.groups]
                table = parquet.ParquetFile(file).read_row_groups(numbers, columns=[column])
            values = table[column].take(self._rows(path, footer.groups))
            found.update(compute.unique(values).to_pylist())
        return found


def without(filters: Filters | None, columns: Iterable[str]) -> Filters | None:
    """Head: the filters as far as they ask for other columns; they keep at least the same rows.

    Returns:
        None where that is every row.
    """
    if not filters:
        return None
    either: list[Any] = filters if isinstance(filters[0], list) else [filters]
    left = [[term for term in part if term[0] not in columns] for part in either]
    return left if all(left) else None


def _values(column: Any) -> Any:
    """CPU task: row number → Python value or NumPy array, chosen once per column by its type."""
    import pyarrow as pa

    kind = column.type
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(kind, pa.FixedShapeTensorType) or hasattr(array, "to_numpy_ndarray"):
        tensors = array.to_numpy_ndarray()
        return lambda row: tensors[row]
    if isinstance(kind, pa.ExtensionType):
        tensors = array.to_numpy(zero_copy_only=False)
        return lambda row: tensors[row]
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        content = array.field("bytes")
        return lambda row: content[row].as_py()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return lambda row: array[row].values.to_numpy(zero_copy_only=False)
    return lambda row: array[row].as_py()
