"""Parquet and Delta tables: columns and filters are pushed down, versions and partitions are honoured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damage import read_all
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import Batches, batches, no_cluster, start
from pyarrow import parquet

from stoker.config.loading import load
from stoker.data import read_any, read_delta, read_parquet
from stoker.entry.job_checks import open_all
from stoker.errors import UsageError

__all__ = ["no_cluster"]


rows_of = partial(read_all, seed=0)


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


def test_columns_and_row_groups_that_are_not_wanted_are_not_read(table: Path) -> None:
    path = table / "train" / "0.parquet"
    about = parquet.ParquetFile(path).metadata
    content = bytearray(path.read_bytes())
    for group in range(about.num_row_groups):
        for number in range(3):
            chunk = about.row_group(group).column(number)
            if group > 1 or number == 2:  # statistics rule the other groups out
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                content[start : start + chunk.total_compressed_size] = b"?" * chunk.total_compressed_size
    path.write_bytes(content)
    source = read_parquet(str(table), "train", columns=["y"], filters=[("x", "<", 150)])
    rows = sorted((int(row["key"].split(":")[1]), row["y"]) for row in rows_of(source))
    assert rows == [(x, x % 7) for x in range(150)]
    with pytest.raises(OSError, match="damaged"):
        rows_of(read_parquet(str(table), "train", columns=["y"]))


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ([("z", "<", 3)], "has no column z; it has x, y, image"),
        ([("x", "<", -1)], "hold no row that matches"),
        ([("x", "~", 1)], "write \\[\\(column, operator, value\\)"),
        ([("x", "<", "a")], "0.parquet: filters=.* do not fit its columns"),
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
    train = read_any(str(delta), "train", ["x"])
    assert len(rows_of(train)) == 6 and "of split a b/ü" in train.notes[0]
    assert sorted(row["x"] for row in rows_of(read_any(str(delta), "val", ["x"]))) == [7, 8, 9]
    with pytest.raises(UsageError, match="cannot be read as a Delta table"):
        read_delta(str(tmp_path / "nowhere"))


def test_tables_named_train_and_val(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    for split, n in (("train", 8), ("val", 4)):
        deltalake.write_deltalake(tmp_path / split, pa.table({"x": range(n)}))
    assert len(rows_of(read_delta(str(tmp_path), "val"))) == 4
    assert len(rows_of(read_any(str(tmp_path), "train"))) == 8


KINDS: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "int": (pa.int64(), lambda i: i % 3),
    "small": (pa.int16(), lambda i: 100 + i),
    "float": (pa.float32(), lambda i: i / 4),
    "text": (pa.string(), lambda i: f"t{i}"),
    "bytes": (pa.binary(), lambda i: b"b%d" % i),
    "image": (
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        lambda i: {"bytes": b"i%d" % i, "path": f"{i}.jpg"},
    ),
    "struct": (
        pa.struct([("b", pa.int64()), ("c", pa.struct([("d", pa.string())]))]),
        lambda i: {"b": -i, "c": {"d": f"d{i}"}},
    ),
    "list": (pa.list_(pa.float32()), lambda i: [i / 2] * (i % 3 + 1)),
    "boxes": (pa.list_(pa.struct([("x", pa.int64())])), lambda i: [{"x": i}, {"x": i + 1}]),
    "map": (pa.map_(pa.string(), pa.int64()), lambda i: [("k", i), ("l", 2 * i)]),
}
NAMES = ["a", "a.b", "b", "a.b.c", "image", "image.bytes", "label", "x.list.element", "bytes"]


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, dict[str, str]]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True))
    kinds = {name: draw(st.sampled_from([*KINDS])) for name in names}
    kinds[draw(st.sampled_from(names))] = "int"
    columns = {n: pa.array([KINDS[k][1](i) for i in range(7)], KINDS[k][0]) for n, k in kinds.items()}
    return pa.table(columns), kinds


def what_a_record_holds(kind: str, i: int) -> Any:
    value = KINDS[kind][1](i)
    return value["bytes"] if kind == "image" else value


def check_whatever_stands_beside_a_column(
    made: tuple[pa.Table, dict[str, str]], data: st.DataObject, read: Callable[..., Any]
) -> None:
    _, kinds = made
    whole = data.draw(st.booleans())
    columns = None if whole else data.draw(st.lists(st.sampled_from([*kinds]), min_size=1, unique=True))
    numbers = [name for name, kind in kinds.items() if kind == "int"]
    by, value = data.draw(st.sampled_from(numbers)), data.draw(st.sampled_from([None, 0, 1, 2]))
    source = read(columns=columns, filters=None if value is None else [(by, "==", value)])
    rows = sorted(rows_of(source, records=2), key=lambda row: int(row["key"].split(":")[-1]))
    assert [int(row["key"].split(":")[-1]) for row in rows] == [i for i in range(7) if value in (None, i % 3)]
    for row in rows:
        assert row.keys() - {"key"} == {*(columns or kinds)}
        for name in columns or kinds:
            kind, i = kinds[name], int(row["key"].split(":")[-1])
            found, expected = row[name], what_a_record_holds(kind, i)
            if kind in ("list", "boxes"):
                assert found.dtype == (np.float32 if kind == "list" else object)
                found = found.tolist()
            assert type(found) is type(expected) and found == expected, (name, kind)
    labels = {name: source.label_values(name) for name in numbers}
    assert labels == dict.fromkeys(numbers, {0, 1, 2} if value is None else {value})


@pytest.mark.long
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(made=tables(), data=st.data(), group=st.sampled_from([2, 7]), statistics=st.booleans())
def test_a_column_is_its_own_whatever_stands_beside_it(
    tmp_path_factory: pytest.TempPathFactory,
    made: tuple[pa.Table, dict[str, str]],
    data: st.DataObject,
    group: int,
    statistics: bool,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    parquet.write_table(made[0], folder / "train.parquet", row_group_size=group, write_statistics=statistics)
    check_whatever_stands_beside_a_column(made, data, partial(read_parquet, str(folder), "train"))


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(made=tables(), data=st.data())
def test_a_delta_column_is_its_own_whatever_stands_beside_it(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[pa.Table, dict[str, str]], data: st.DataObject
) -> None:
    deltalake = pytest.importorskip("deltalake")
    folder = str(tmp_path_factory.mktemp("delta"))
    deltalake.write_deltalake(folder, made[0])
    check_whatever_stands_beside_a_column(made, data, partial(read_delta, folder))


def told(source: str, folder: Path) -> str:
    job = {"recipe": source, "params": {"data": str(folder)}, "train": {"batch_size": 1}}
    with pytest.raises(UsageError) as refused:
        open_all(load(job))
    return str(refused.value)


@pytest.mark.parametrize("rooms", [["3", "4"], ["3", "n/a"]])
def test_text_in_a_column_of_numbers_is_told_before_the_start_with_the_column(
    rooms: list[str], tmp_path: Path
) -> None:
    table = pa.table({"size": [50.0, 60.0], "rooms": rooms, "price": [1.0, 2.0]})
    for split in ("train", "val"):
        parquet.write_table(table, tmp_path / f"{split}.parquet")
    said = told("launcher.projects.tabular.recipe:Table", tmp_path)
    assert "'<' not supported between instances of 'str'" in said
    assert "columns of text: rooms" in said and "size (float), rooms (text), price (float)" in said


def test_text_that_reaches_the_model_is_told_with_the_column(no_cluster: None, tmp_path: Path) -> None:
    made = [{**batch, "x0": ["3", "n/a"], "x2": ["a", "b"]} for batch in batches([2])]
    run = start(
        tmp_path, lambda split, epoch: Batches(split, epoch, made), has_val=False, train={"epochs": 1}
    )
    assert "but got list; the batch has text in the column x0, x2: convert it" in str(run.error)
