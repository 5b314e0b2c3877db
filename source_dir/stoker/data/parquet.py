"""Parquet: rows with bytes, numbers, strings or tensors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from stoker.config import UsageError
from stoker.data.filesystems import common_folder, filesystem_of_files
from stoker.data.sources import BadRecord, Piece, Record, Source

if TYPE_CHECKING:
    import numpy as np


class ParquetSource(Source):
    """Head and CPU task: one record per row, read by row groups.

    Columns of {bytes, path} structs, as Hugging Face datasets write images, give their bytes;
    lists and Arrow tensors give NumPy arrays.
    """

    def __init__(self, files: list[Any], columns: list[str] | None = None) -> None:
        self.paths = [f.path for f in files]
        self.columns = columns
        self.folder = common_folder(files)
        self.filesystem = filesystem_of_files(files)
        self.groups: list[list[int]] = []

    def check(self) -> None:
        with ThreadPoolExecutor(16) as pool:
            footers = list(pool.map(self._footer, self.paths))
        schema = footers[0][0]
        missing = [c for c in self.columns or [] if c not in schema.names]
        if missing:
            raise UsageError(
                f"{self.paths[0]}: has no column {', '.join(missing)}; it has {', '.join(schema.names)}"
            )
        wanted = self.columns or schema.names
        for path, (other, _) in zip(self.paths, footers, strict=True):
            absent = [c for c in wanted if c not in other.names]
            if absent:
                raise UsageError(f"{path}: lacks the column {', '.join(absent)} that {self.paths[0]} has")
            for column in wanted:
                if other.field(column).type != schema.field(column).type:
                    raise UsageError(
                        f"{path}: column {column} is {other.field(column).type}, in {self.paths[0]}"
                        f" it is {schema.field(column).type}"
                    )
        self.groups = [groups for _, groups in footers]
        if self.count() == 0:
            raise UsageError(f"{self.paths[0]}: the Parquet files hold no row")

    def _footer(self, path: str) -> tuple[Any, list[int]]:
        from pyarrow import parquet

        try:
            with self.filesystem.open_input_file(path) as file:
                content = parquet.ParquetFile(file)
                metadata = content.metadata
                sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                return content.schema_arrow, sizes
        except Exception as error:
            text = " ".join(str(error).split())
            raise UsageError(f"{path}: not a whole Parquet file: {text[:200]}") from None

    def count(self) -> int:
        self._ensure_groups()
        return sum(sum(groups) for groups in self.groups)

    def _ensure_groups(self) -> None:
        if not self.groups:
            self.groups = [self._footer(path)[1] for path in self.paths]

    def pieces(self, records: int, order: np.random.Generator | None) -> list[Piece]:
        self._ensure_groups()
        pieces: list[Piece] = []
        for path, sizes in zip(self.paths, self.groups, strict=True):
            first, rows, row = 0, 0, 0
            for group, size in enumerate(sizes):
                rows += size
                if rows >= records or group == len(sizes) - 1:
                    if rows:
                        items = (row,)
                        pieces.append(Piece(path, first, group + 1, rows, items))
                    first, row, rows = group + 1, row + rows, 0
        if order is not None:
            pieces = [pieces[i] for i in order.permutation(len(pieces))]
        return pieces

    def read(self, piece: Piece, order: np.random.Generator | None) -> Iterator[Record | BadRecord]:
        import numpy as np
        from pyarrow import parquet

        with self.filesystem.open_input_file(piece.path) as file:
            groups = list(range(piece.start, piece.stop))
            table = parquet.ParquetFile(file).read_row_groups(groups, columns=self.columns)
        name = piece.path.removeprefix(self.folder)
        columns = {column: _values(table[column]) for column in table.column_names}
        rows = np.arange(len(table)) if order is None else order.permutation(len(table))
        for row in rows.tolist():
            record = {"key": f"{name}:{piece.items[0] + row}"}
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

        found: set[Any] = set()
        for path in self.paths:
            with self.filesystem.open_input_file(path) as file:
                table = parquet.ParquetFile(file).read(columns=[column])
            found.update(compute.unique(table[column]).to_pylist())
        return found


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
