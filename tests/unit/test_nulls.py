"""NULLs in Parquet and Delta columns: refused before training, or what the recipe says."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damage import read_all
from pyarrow import parquet

from stoker.data import read_delta, read_parquet
from stoker.errors import UsageError
from stoker.protocol import BadRecord

records = partial(read_all, records=3)


def write(folder: Path, statistics: bool = True, **columns: Any) -> str:
    table = pa.table({"n": pa.array(range(8)), **columns})
    parquet.write_table(table, folder / "train-0.parquet", row_group_size=3, write_statistics=statistics)
    return str(folder)


INTS = pa.array([1, 2, None, 4, 5, 6, None, 8])
COLUMNS = {
    "int": INTS,
    "float": INTS.cast(pa.float32()),
    "text": pa.array(["a", "b", None, "d", "e", "f", None, "h"]),
    "list": pa.array([[1.0], [2.0], None, [4.0], [5.0], [6.0], [None], [8.0]], pa.list_(pa.float32())),
    "nested": pa.array([[[1]], [[2]], [None], [[4]], [[5]], [[6]], [[None]], [[8]]]),
    "image": pa.array([{"bytes": None if i in (2, 6) else b"x", "path": None} for i in range(8)]),
    "struct": pa.array([None if i in (2, 6) else {"a": None} for i in range(8)]),
    "all null": pa.nulls(8),
}


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("name", COLUMNS)
def test_nulls_are_refused_before_training_with_column_file_and_count(
    name: str, statistics: bool, tmp_path: Path
) -> None:
    root = write(tmp_path, statistics, **{name: COLUMNS[name]})
    count = 8 if name == "all null" else 2
    expected = rf"train-0.parquet: column {name} holds {count} NULLs? in 8 rows; handle them with nulls="
    with pytest.raises(UsageError, match=expected):
        records(read_parquet(root, "train"))
    assert len(records(read_parquet(root, "train", columns=["n"]))) == 8


def test_empty_lists_are_no_nulls(tmp_path: Path) -> None:
    root = write(tmp_path, x=pa.array([[]] * 8, pa.list_(pa.int64())))
    assert [record["x"].tolist() for record in records(read_parquet(root, "train"))] == [[]] * 8


def test_nulls_in_several_files_and_columns_are_told_at_once(tmp_path: Path) -> None:
    for number in range(3):
        table = pa.table({"x": pa.array([1, None]), "y": pa.array([None, "a"])})
        parquet.write_table(table, tmp_path / f"train-{number}.parquet")
    with pytest.raises(UsageError) as caught:
        records(read_parquet(str(tmp_path), "train"))
    assert [line.split("column ")[1][:1] for line in caught.value.problems] == ["x", "y"]
    assert "1 NULL in 2 rows, and 2 in 2 other files" in str(caught.value)


def test_only_nulls_of_rows_that_match_count(tmp_path: Path) -> None:
    root = write(tmp_path, x=INTS)
    whole = records(read_parquet(root, "train", filters=[("n", "not in", [2, 6])]))
    assert [record["x"] for record in whole] == [1, 2, 4, 5, 6, 8]
    with pytest.raises(UsageError, match="holds 1 NULL"):
        records(read_parquet(root, "train", filters=[("n", "<", 5)]))


def test_quarantine_books_the_record(tmp_path: Path) -> None:
    found = records(read_parquet(write(tmp_path, x=INTS), "train", nulls={"x": "quarantine"}))
    bad = [record for record in found if isinstance(record, BadRecord)]
    assert bad == [
        BadRecord("train-0.parquet:2", "column x is NULL"),
        BadRecord("train-0.parquet:6", "column x is NULL"),
    ]
    assert len(found) == 8


def test_keep_gives_nan_or_says_which_values_are_valid(tmp_path: Path) -> None:
    view = COLUMNS["text"].cast(pa.string_view())
    columns = {"f": COLUMNS["float"], "i": INTS, "t": COLUMNS["text"], "v": view}
    rule = dict.fromkeys(columns, "keep")
    found = records(read_parquet(write(tmp_path, **columns), "train", nulls=rule))
    assert math.isnan(found[2]["f"]) and found[0]["f"] == 1.0
    assert [record["i"] for record in found] == [1, 2, 0, 4, 5, 6, 0, 8]
    for name in "tv":
        assert [record[name] for record in found] == ["a", "b", "", "d", "e", "f", "", "h"]
    # Every row group has the column, also the one without a NULL.
    for name in ("i__valid", "t__valid"):
        assert [record[name] for record in found] == [True, True, False, True, True, True, False, True]
    assert "f__valid" not in found[0]


def test_a_value_stands_for_nulls(tmp_path: Path) -> None:
    columns = {"f": COLUMNS["float"], "i": INTS, "t": COLUMNS["text"]}
    found = records(read_parquet(write(tmp_path, **columns), "train", nulls={"f": 0, "i": 7.0, "t": "none"}))
    assert (found[2]["f"], found[2]["i"], found[2]["t"]) == (0.0, 7, "none")
    assert [type(found[2][name]) for name in "fit"] == [float, int, str]


@pytest.mark.parametrize(
    ("column", "rule", "expected"),
    [
        ("int", 0.5, "nulls: 0.5 does not fit column int, which is int64"),
        ("text", 0, "nulls: 0 does not fit column text, which is string"),
        ("float", True, "nulls: True does not fit column float"),
        ("list", "keep", "keep is for numbers, booleans and text: use quarantine"),
        ("absent", "keep", "has no column absent"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(column: str, rule: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=expected):
        records(read_parquet(write(tmp_path, **COLUMNS), "train", nulls={column: rule}))


def test_a_null_that_nobody_found_before_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.read.arrow.READ_LIMIT_BYTES", 0)
    with pytest.raises(UsageError, match="column x holds 1 NULL"):
        records(read_parquet(write(tmp_path, statistics=False, x=INTS), "train"))


@pytest.mark.long
def test_columns_added_to_a_delta_table_later_are_nulls_of_its_older_files(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    root = str(tmp_path / "table")
    deltalake.write_deltalake(root, pa.table({"x": [1, 2], "part": ["a", "b"]}), partition_by=["part"])
    new = pa.table({"x": [3], "part": ["a"], "y": [5]})
    deltalake.write_deltalake(root, new, mode="append", schema_mode="merge")
    with pytest.raises(UsageError, match=r"column y holds 1 NULL in 1 row, and 1 in 1 other file"):
        records(read_delta(root))
    found = records(read_delta(root, nulls={"y": "keep"}))
    assert sorted((r["x"], r["part"], r["y"], r["y__valid"]) for r in found) == [
        (1, "a", 0, False),
        (2, "b", 0, False),
        (3, "a", 5, True),
    ]
    assert sum(isinstance(r, BadRecord) for r in records(read_delta(root, nulls={"y": "quarantine"}))) == 2
    assert np.isfinite([r["x"] for r in records(read_delta(root, columns=["x"]))]).all()


def test_images_in_structs_of_a_ray_dataset_are_images() -> None:
    from stoker.serve.shards import as_records

    spark = {"origin": "f", "height": 1, "width": 1, "nChannels": 3, "mode": 16, "data": b"\1\2\3"}
    columns = {"hf": [{"bytes": b"x", "path": "p"}] * 2, "spark": [spark] * 2, "other": [{"bytes": 1}] * 2}
    _, row = as_records(pa.table({"key": ["a", "b"], **columns}))
    assert (row["hf"], row["spark"].tolist(), row["other"]) == (b"x", [[[3, 2, 1]]], {"bytes": 1})
