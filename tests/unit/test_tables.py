"""Parquet and Delta tables: columns and filters are pushed down, versions and partitions are honoured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from stoker.data import read_any, read_delta, read_parquet
from stoker.data.sources.base import Source
from stoker.errors import UsageError


def rows_of(source: Source | None, records: int = 64) -> list[dict[str, Any]]:
    """What the tasks read, through the pickled form that they get."""
    assert source is not None
    source.check()
    import pickle

    theirs = pickle.loads(pickle.dumps(source.for_workers()))  # noqa: S301
    order = np.random.default_rng(0)
    found = [row for shard in source.shards(records, order) for row in theirs.read(shard, order)]
    assert len(found) == source.count()
    return found


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """1,000 rows in row groups of 100, sorted by x, with a heavy column."""
    folder = tmp_path / "rows" / "train"
    folder.mkdir(parents=True)
    content = pa.table({"x": range(1000), "y": [i % 7 for i in range(1000)], "image": [b"i" * 9000] * 1000})
    parquet.write_table(content, folder / "0.parquet", row_group_size=100)
    return tmp_path / "rows"


def test_a_filter_keeps_matching_rows_and_their_identity(table: Path) -> None:
    every = {row["key"]: row["x"] for row in rows_of(read_parquet(str(table), "train"))}
    some = rows_of(read_parquet(str(table), "train", filters=[("x", ">=", 250), ("y", "in", [3, 5])]))
    assert sorted(row["x"] for row in some) == [x for x in range(250, 1000) if x % 7 in (3, 5)]
    assert all(every[row["key"]] == row["x"] for row in some)


def test_either_of_two_filters(table: Path) -> None:
    found = rows_of(read_parquet(str(table), "train", filters=[[("x", "<", 3)], [("x", "==", 999)]]))
    assert sorted(row["x"] for row in found) == [0, 1, 2, 999]


def test_columns_and_row_groups_that_are_not_wanted_are_not_read(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[tuple[int, ...], tuple[str, ...] | None]] = []
    real = parquet.ParquetFile.read_row_groups

    def spy(self: Any, groups: list[int], columns: list[str] | None = None, **others: Any) -> Any:
        read.append((tuple(groups), tuple(columns) if columns is not None else None))
        return real(self, groups, columns=columns, **others)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_groups", spy)
    source = read_parquet(str(table), "train", columns=["y"], filters=[("x", "<", 150)])
    assert {tuple(row) for row in rows_of(source)} == {("key", "y")}
    assert {group for groups, _ in read for group in groups} == {0, 1}, "statistics rule the others out"
    assert all(columns in (("x",), ("y",)) for _, columns in read), "the images stay on disk"


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([("z", "<", 3)], "has no column z; it has x, y, image"),
        ([("x", "<", -1)], "hold no row that matches"),
        ([("x", "~", 1)], "write \\[\\(column, operator, value\\)"),
        ("x < 3", "write \\[\\(column, operator, value\\)"),
    ],
)
def test_wrong_filters_are_named(table: Path, filters: Any, message: str) -> None:
    source = None
    with pytest.raises(UsageError, match=message):
        source = read_parquet(str(table), "train", filters=filters)
        rows_of(source)


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """Version 0: partitions train and val; 1: more rows with a new column; 2: a row deleted."""
    deltalake = pytest.importorskip("deltalake")
    path = tmp_path / "table"
    first = pa.table({"x": range(10), "split": ["train"] * 7 + ["val"] * 3})
    deltalake.write_deltalake(path, first, partition_by=["split"])
    more = pa.table({"x": [11], "split": ["a b/ü"], "y": [2.0]})
    deltalake.write_deltalake(path, more, mode="append", schema_mode="merge")
    deltalake.DeltaTable(path).delete("x = 3")
    return path


def test_a_delta_table_is_read_as_it_is_now(delta: Path) -> None:
    rows = rows_of(read_delta(str(delta), nulls={"y": -1}))
    assert sorted(row["x"] for row in rows) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 11]
    assert {row["x"]: (row["split"], row["y"]) for row in rows}[11] == ("a b/ü", 2.0)
    assert {row["x"]: (row["split"], row["y"]) for row in rows}[8] == ("val", -1.0)


def test_splits_of_one_delta_table_by_partition(delta: Path) -> None:
    train = read_delta(str(delta), filters=[("split", "==", "train")], columns=["x"])
    val = read_delta(str(delta), filters=[("split", "==", "val")], columns=["x"])
    assert sorted(row["x"] for row in rows_of(train)) == [0, 1, 2, 4, 5, 6]
    assert [sorted(row) for row in rows_of(val)] == [["key", "x"]] * 3


def test_files_that_a_delta_tables_log_rules_out_are_not_opened(delta: Path) -> None:
    for path in delta.glob("split=val/*.parquet"):
        path.unlink()
    train = read_delta(str(delta), columns=["x"], filters=[("split", "==", "train"), ("x", "<", 5)])
    assert sorted(row["x"] for row in rows_of(train)) == [0, 1, 2, 4]
    filters = [[("split", "==", "train"), ("x", ">", 5)], [("x", "==", 11)]]
    either = read_delta(str(delta), columns=["x"], filters=filters)
    assert sorted(row["x"] for row in rows_of(either)) == [6, 11]


def test_a_delta_table_as_it_was(delta: Path) -> None:
    assert sorted(row["x"] for row in rows_of(read_delta(str(delta), version=0))) == list(range(10))
    with pytest.raises(UsageError, match="at version 9"):
        read_delta(str(delta), version=9)


@pytest.mark.parametrize("name", ["main.vision.digits", "uc://main.vision.digits"])
def test_the_name_of_a_catalogs_table_is_refused_with_the_way_to_read_it(name: str) -> None:
    for read in (read_delta, read_any):
        with pytest.raises(UsageError, match=r"spark.table\('main.vision.digits'\).*'/Volumes/…'"):
            read(name, "train")
    with pytest.raises(UsageError, match="write /Volumes/main/vision/digits, the path that all hosts mount"):
        read_delta("dbfs:/Volumes/main/vision/digits")


def test_delta_is_told_from_a_heap_of_parquet_files(delta: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="read it with read_delta"):
        read_parquet(str(delta), "train")
    assert len(rows_of(read_any(str(delta), "train", ["x"]))) == 10
    assert read_any(str(delta), "val") is None
    with pytest.raises(UsageError, match="cannot be read as a Delta table"):
        read_delta(str(tmp_path / "nowhere"))


def test_tables_named_train_and_val(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    for split, n in (("train", 8), ("val", 4)):
        deltalake.write_deltalake(tmp_path / split, pa.table({"x": range(n)}))
    assert len(rows_of(read_delta(str(tmp_path), "val"))) == 4
    assert len(rows_of(read_any(str(tmp_path), "train"))) == 8
