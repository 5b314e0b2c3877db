"""Images and labels in tables as other tools write them: a job trains on the rows, or says what it lacks."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import damage
import numpy as np
import pyarrow as pa
import pytest
import torch
from damage import checked, preprocessed, read_all
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from spoilt import encoded, images

from stoker.accuracy import F1
from stoker.data import read_parquet
from stoker.errors import UsageError
from stoker.image_classification import ImageClassification

COLOURS = [(40 * i, 255 - 30 * i, 10 * i) for i in range(6)]
LABELS = [i % 2 for i in range(6)]


PNGS = [encoded("PNG", Image.new("RGB", (8, 8), colour)) for colour in COLOURS]
STRUCTS = pa.array([{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(PNGS)])


def pictures(**columns: Any) -> pa.Table:
    return pa.table({"image": PNGS, "label": LABELS, **columns})


def write(
    root: Path, table: pa.Table, name: str = "0.parquet", splits: tuple[str, ...] = ("train", "val")
) -> str:
    for split in splits:
        (root / split).mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, root / split / name)
    return str(root)


def rows_of(root: Any, columns: list[str] | None = None) -> list[Any]:
    return read_all(read_parquet(str(root), "train", columns), 9)


def opened(root: Any, **params: Any) -> tuple[dict[str, Any], Any]:
    config, data = damage.opened(root, image_size=8, **params)
    return config.params, data


def refused(says: str, root: Any, **params: Any) -> None:
    with pytest.raises(UsageError, match=says):
        opened(root, **params)


def trained(data: Any, split: str = "train") -> list[tuple[tuple[int, ...], int]]:
    found: list[Any] = []
    for columns, report in preprocessed(data, split, 4):
        image = columns["image__hwc"]
        assert not report.bad and (image == image[:, :1, :1]).all()
        found += [
            (tuple(p.tolist()), int(n))
            for p, n in zip(image[:, 0, 0], columns["label"], strict=True)
        ]
    assert len(found) == data.totals[split]
    return found


WHOLE = list(zip(COLOURS, LABELS, strict=True))


TABLES = ["0.parquet", "1.pq", "2.PARQUET", "sub/part-00001.c000.parquet"]
HARMLESS = ["_SUCCESS", "_common_metadata", ".0.parquet.crc", "README.md"]
OTHERS = ["0.csv", "1.orc", "part-00002", "2.parquet.gz", "3.parquet.tmp", "dataset_info.json"]


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(names=st.sets(st.sampled_from([*TABLES, *HARMLESS, *OTHERS]), min_size=1))
def test_each_file_of_a_folder_of_tables_is_read_refused_or_named(
    tmp_path_factory: pytest.TempPathFactory, names: set[str]
) -> None:
    root = tmp_path_factory.mktemp("tables")
    for number, name in enumerate(sorted(names)):
        path = root / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in TABLES:
            parquet.write_table(pa.table({"x": [number]}), path)
        else:
            path.write_bytes(b"a,b")
    there = [number for number, name in enumerate(sorted(names)) if name in TABLES]
    others = [name for name in names if name in OTHERS]
    try:
        source = read_parquet(str(root), "train")
        assert source is not None
        found = [row["x"] for shard in source.shards(9, None) for row in source.read(shard, None)]
    except UsageError as error:
        assert not there or f"{len(others)} file" in str(error)
        return
    assert sorted(found) == there and not others


def test_types_of_several_writers_are_one(tmp_path: Path) -> None:
    turned = [STRUCTS.field("path"), STRUCTS.field("bytes")]
    turned = pa.StructArray.from_arrays(turned, names=["path", "bytes"])
    images = [PNGS, pa.array(PNGS, pa.large_binary()), STRUCTS, turned]
    labels = [LABELS, pa.array(LABELS, pa.int32()), pa.array(LABELS, pa.uint8()), LABELS]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        write(tmp_path, pictures(image=image, label=label), f"{number}.parquet")
    write(tmp_path, pictures(image=pa.nulls(0), label=pa.nulls(0)), "00.parquet")
    params, data = opened(tmp_path)
    assert params["num_classes"] == 2
    assert trained(data) == 4 * WHOLE
    write(tmp_path, pictures(label=[float(n) for n in LABELS]), "9.parquet")
    refused(r"9.parquet: column label is double, in .*0.parquet it is int64", tmp_path)


def test_a_column_of_one_type_stays_so_in_all_files(tmp_path: Path) -> None:
    """Lists become arrays of their own type, so two types would be two types of a batch's column."""
    kinds = [pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.list_(pa.int32(), 1)]
    for name, kind in enumerate(kinds):
        write(tmp_path, pa.table({"x": pa.array([[1]], kind)}), f"{name}.parquet")
    rows = [row["x"] for row in rows_of(tmp_path)]
    assert [(row.dtype, row.tolist()) for row in rows] == [(np.int32, [1])] * 3
    write(tmp_path, pa.table({"x": pa.array([[1]], pa.list_(pa.int64()))}), "3.parquet")
    with pytest.raises(UsageError, match=r"3.parquet: column x is list"):
        rows_of(tmp_path)


def test_a_file_without_a_column_or_with_one_more_is_named(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"x": [1], "y": [2]}), "0.parquet")
    write(tmp_path, pa.table({"x": [1], "z": [2]}), "1.parquet")
    for columns in (["y"], None):
        with pytest.raises(UsageError, match=r"1.parquet: lacks the column y that .*0.parquet has"):
            checked(read_parquet(str(tmp_path), "train", columns))
    write(tmp_path, pa.table({"x": [1], "y": [2], "z": [2]}), "1.parquet")
    with pytest.raises(UsageError, match=r"0.parquet: lacks the column z that .*1.parquet has"):
        rows_of(tmp_path)


def test_a_column_named_key_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    root = write(tmp_path, pa.table({"key": [7, 7], "x": [1, 2]}))
    with pytest.raises(UsageError, match=r"0.parquet: has a column key.*columns=\[…\], or rename"):
        rows_of(root)
    rows = rows_of(root, ["x"])
    assert rows == [{"key": "0.parquet:0", "x": 1}, {"key": "0.parquet:1", "x": 2}]


def test_a_struct_that_is_no_image_keeps_its_fields(tmp_path: Path) -> None:
    """Only the bytes of {bytes, path} are a value: of other structs, nothing may be left out."""
    structs = [{"bytes": 12, "path": "a"}, {"bytes": 13, "path": "b"}]
    captions = [{"bytes": b"1", "caption": "a"}, {"bytes": b"2", "caption": "b"}]
    found = rows_of(write(tmp_path, pa.table({"x": structs, "y": captions})))
    assert [(row["x"], row["y"]) for row in found] == list(zip(structs, captions, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("struct", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_row_group_of_more_than_2_gb_is_read_in_batches(struct: bool, tmp_path: Path) -> None:
    big, rows, step = bytes(range(256)) * 4096, 2100, 300
    part: Any = pa.array([big, big[::-1]] * (step // 2), pa.binary())
    if struct:
        part = pa.StructArray.from_arrays([part, pa.array(["x"] * step)], names=["bytes", "path"])
    image = pa.chunked_array([part] * (rows // step))
    table = pa.table({"label": [i % 2 for i in range(rows)], "image": image})
    options = {"row_group_size": rows, "dictionary_pagesize_limit": 1 << 27}
    parquet.write_table(table, tmp_path / "train.parquet", **options)
    source = checked(read_parquet(str(tmp_path), "train"))
    (shard,) = source.shards(10, None)
    count, images = 0, (big, big[::-1])
    for count, row in enumerate(source.read(shard, None), start=1):
        assert row["image"] == images[row["label"]] and row["key"] == f"train.parquet:{count - 1}"
    assert count == rows


NAMES = ["dog", "cat"]
TEXT = [NAMES[label] for label in LABELS]


def write_delta(root: Path, table: pa.Table, mode: str = "error") -> str:
    deltalake = pytest.importorskip("deltalake")
    for split in ("train", "val"):
        deltalake.write_deltalake(root / split, table, mode=mode)
    return str(root)


class Shown(ImageClassification):
    class_names = ("dog", "cat")


def test_a_recipe_names_the_classes_of_numbers_and_folders_and_orders_those_of_text(
    tmp_path: Path,
) -> None:
    def shown(root: Path) -> tuple[dict[str, Any], Any]:
        params = {"data": str(root), "image_size": 8}
        job = {"recipe": "test_images_in_tables:Shown", "params": params}
        config, data = damage.opened_job(job)
        return config.params, data

    for name, labels in (("numbers", LABELS), ("text", TEXT)):
        write(tmp_path / name, pictures(label=labels))
        params, data = shown(tmp_path / name)
        assert (params["num_classes"], params["class_names"]) == (2, ["dog", "cat"])
        assert trained(data) == WHOLE
    images(splits="train val", classes="a b")(tmp_path / "folders")
    assert shown(tmp_path / "folders")[0]["num_classes"] == 2


def test_text_labels_in_a_given_order_and_number(tmp_path: Path) -> None:
    root = write(tmp_path, pictures(label=TEXT))
    params, data = opened(root, class_names=[*NAMES, "bird"])
    assert params["num_classes"] == 3
    assert trained(data) == WHOLE
    refused("params: class_names has a name twice", root, class_names=["dog", "cat", "dog"])
    for number, names in ((5, []), (2, [*NAMES, "bird"])):
        says = rf"params.num_classes: {number}, but the data has .* classes: "
        refused(says, root, num_classes=number, class_names=names)


AS_WRITTEN = [["cat", "dog", "nan"], ["0", "1", "None"], ["True", "true", "False"]]
AS_WRITTEN += [["2", "10", "K"], ["cat", "Cat ", "dog"]]


@pytest.mark.parametrize("labels", AS_WRITTEN)
def test_text_labels_are_classes_as_written(labels: list[str], tmp_path: Path) -> None:
    root = write(tmp_path, pictures(label=labels * 2))
    for names in (sorted(labels), labels):
        params, data = opened(root, class_names=names) if names is labels else opened(root)
        assert params["class_names"] == names and not data.notes()
        assert [label for _, label in trained(data)] == [names.index(text) for text in labels * 2]


def test_a_label_that_training_lacks_is_refused_before_the_start(tmp_path: Path) -> None:
    root = write(tmp_path, pictures(label=TEXT), splits=("train",))
    write(tmp_path, pictures(label=["bird", *TEXT[1:]]), splits=("val",))
    refused("val has the label bird, which is no class of train: cat, dog", root)
    says = "the label dog, which is no class of params.class_names"
    refused(says, root, class_names=["cat", "bird"])


@pytest.mark.parametrize(
    "names", [("img", "label"), ("image", "fine_label"), ("a.image", "a.label")]
)
def test_columns_of_other_names_are_refused_with_the_line_to_write_and_read_with_it(
    names: tuple[str, str], tmp_path: Path
) -> None:
    image, label = names
    columns = {"a": [{"image": 1}] * 6, image: PNGS, "size": [0.5] * 6, label: LABELS}
    root = write(tmp_path, pa.table(columns))
    with pytest.raises(UsageError) as lacking:
        opened(root)
    own = {"image_column": image, "label_column": label}
    keys = [key for key, name in own.items() if name not in ("image", "label")]
    for problem, key in zip(lacking.value.problems, keys, strict=True):
        assert problem.endswith(f"set params.{key}")
        assert f"{image} (binary), size (double)" in problem
    params, data = opened(root, **{key: own[key] for key in keys})
    assert params["num_classes"] == 2
    assert trained(data) == WHOLE


@pytest.mark.parametrize("odd", [[1, -1, 0], [2, 0, 1], [float("nan"), 0, 1], [0.5, 0, 1]])
def test_several_labels_are_a_vector_of_0_and_1_or_the_record_is_quarantined(
    odd: list[float], tmp_path: Path
) -> None:
    labels = [odd, [1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]]
    table = pictures(label=pa.array(labels, pa.list_(pa.float32())))
    _, data = opened(write(tmp_path, table), num_classes=3, multi_label=True)
    [(columns, report)] = preprocessed(data, "train", 4)
    assert columns["label"].tolist() == labels[1:]
    [bad] = report.bad
    assert f"label holds {next(x for x in odd if x not in (0, 1))}" in bad.reason
    with pytest.raises(ValueError, match="holds other values than 0 and 1"):
        F1().update(torch.zeros(1, 3), torch.tensor([[1, -1, 0]]))
    _, data = opened(tmp_path, num_classes=4, multi_label=True)
    [(_, report)] = preprocessed(data, "train", 4)
    assert len(report.bad) == 6 and "(3,) is not a vector of 4 zeros" in report.bad[0].reason


def write_partitions(root: Path, folders: dict[str, list[int]], **more: Any) -> str:
    for number, (folder, rows) in enumerate(folders.items()):
        columns = {name: [values[i] for i in rows] for name, values in more.items()}
        table = pa.table({"image": [PNGS[i] for i in rows], **columns})
        path = root / folder / f"part-{number:05}-a1b2.c000.snappy.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path)
    (root / "_SUCCESS").touch()
    return str(root)


@pytest.mark.parametrize("values", [(0, 1), ("a dog", "cat/s")])
@pytest.mark.parametrize(
    "order", ["{split}/label={label}", "split={split}/label={label}", "label={label}/split={split}"]
)
def test_partitions_of_spark_are_splits_and_labels(
    order: str, values: tuple[Any, Any], tmp_path: Path
) -> None:
    folders = {
        order.format(split=split, label=quote(str(value), safe="")): list(range(6))[number::2]
        for split in ("train", "val")
        for number, value in enumerate(values)
    }
    params, data = opened(write_partitions(tmp_path, folders))
    names = [] if values == (0, 1) else ["a dog", "cat/s"]
    assert (params["num_classes"], params.get("class_names", [])) == (2, names)
    assert sorted(trained(data)) == sorted(trained(data, "val")) == sorted(WHOLE)
    assert not data.notes()


def test_partitions_are_columns_and_filters_skip_them(tmp_path: Path) -> None:
    sites = {"train/year=2024/site=a%3Db": [0, 1], "train/year=2025/site=c": [2, 3]}
    root = write_partitions(tmp_path, sites)
    rows = [(row["year"], row["site"], row["image"]) for row in rows_of(root)]
    years = [(2024, "a=b")] * 2 + [(2025, "c")] * 2
    assert rows == [(*year, image) for year, image in zip(years, PNGS, strict=False)]
    source = read_parquet(root, "train", ["site"], [("year", ">", 2024)])
    assert source is not None and source.count() == 2


def test_a_partition_is_text_in_both_splits_if_it_is_in_one(tmp_path: Path) -> None:
    """As a number, the label 1 of validation would be the second class, whatever its name."""
    folders = {"train/label=1": [0], "train/label=b": [1], "train/label=a": [2], "val/label=1": [3]}
    params, data = opened(write_partitions(tmp_path, folders))
    assert params["class_names"] == ["1", "a", "b"]
    assert trained(data, "val") == [(COLOURS[3], 0)]


def test_a_partition_with_a_leading_zero_is_text(tmp_path: Path) -> None:
    """As numbers, `01` and `1` would be one class."""
    params, _ = opened(write_partitions(tmp_path, {"train/label=01": [0, 1], "train/label=1": [2]}))
    assert params["class_names"] == ["01", "1"]
    numbers = write_partitions(tmp_path / "n", {"train/y=-3": [0], "train/y=0": [1]})
    assert [row["y"] for row in rows_of(numbers)] == [-3, 0]
    with pytest.raises(UsageError, match=r"filters=.* do not fit its columns"):
        checked(read_parquet(str(tmp_path), "train", ["label"], [("label", "==", 1)]))


def test_an_unknown_partition_is_a_null_and_a_contradiction_is_refused(tmp_path: Path) -> None:
    rows = {"0": [0], "__HIVE_DEFAULT_PARTITION__": [1], "1": [2]}
    hole = write_partitions(tmp_path / "hole", {f"train/label={k}": v for k, v in rows.items()})
    refused("column label holds 1 NULL in 1 row; handle them with nulls=", hole)
    for known in ("in", "not in"):
        source = read_parquet(str(hole), "train", filters=[("label", known, [0])])
        assert source.count() == {"in": 1, "not in": 2}[known]
    twice = {"train/label=0": [0, 2], "train/label=1": [1, 3]}
    _, data = opened(write_partitions(tmp_path / "same", twice, label=LABELS))
    assert sorted(trained(data)) == sorted(WHOLE[:4])
    other = {"train/label=0": [0, 1], "train/label=1": [3]}
    root = write_partitions(tmp_path / "other", other, label=LABELS)
    refused("column label holds 1, but its folder says 0; rename one", root)


def test_a_folder_that_its_writer_calls_a_file_is_read_as_one(tmp_path: Path) -> None:
    """As `df.write.parquet("train.parquet")` of Spark and Dask leave it."""
    table = pictures()
    for split in ("train", "val"):
        write(tmp_path / "a", table.slice(0, 3), "part-00000.snappy.parquet", (f"{split}.parquet",))
        write(tmp_path / "a", table.slice(3, 3), "part-00001.snappy.parquet", (f"{split}.parquet",))
        write(tmp_path / "b.parquet", table, splits=(split,))
    for root in ("a", "b.parquet"):
        _, data = opened(tmp_path / root)
        assert trained(data) == trained(data, "val") == WHOLE and not data.notes()
    _, data = opened(tmp_path / "a/train.parquet")
    assert trained(data) == WHOLE and "val" not in data.sources and not data.notes()


def test_a_table_with_an_underscore_is_named(tmp_path: Path) -> None:
    write(tmp_path, pictures())
    write(tmp_path, pictures(), "_old.parquet", ("train",))
    _, data = opened(tmp_path)
    assert trained(data) == WHOLE
    (note,) = data.notes()
    assert "1 file not read" in note and "train/_old.parquet" in note


@pytest.mark.parametrize("form", ["delta", "partitioned", "all.parquet", "spark.parquet"])
def test_a_column_split_of_a_single_table_tells_training_from_validation(
    form: str, tmp_path: Path
) -> None:
    splits = ["train"] * 6 + ["validation"] * 6 + ["extra"] * 5 + [None]
    rows = {"image": PNGS * 3, "label": LABELS * 3, "split": splits}
    if form == "spark.parquet":
        root = Path(write(tmp_path / form, pa.table(rows), "part-0.parquet", ("",)))
        (root / "_SUCCESS").touch()
    elif form.startswith("all"):
        root = tmp_path / form
        parquet.write_table(pa.table(rows), root)
    else:
        by = ["split"] if form == "partitioned" else None
        root = tmp_path / "table"
        pytest.importorskip("deltalake").write_deltalake(root, pa.table(rows), partition_by=by)
    _, data = opened(root)
    assert trained(data) == trained(data, "val") == WHOLE
    (note,) = data.notes()
    assert note.endswith("rows not read: of split NULL, extra")


NESTED = [np.full((8, 8, 3), colour, np.uint8).tolist() for colour in COLOURS]
WRITTEN: dict[str, tuple[Any, Any]] = {
    "Hugging Face": (STRUCTS, LABELS),
    "nested lists": (pa.array(NESTED, pa.list_(pa.list_(pa.list_(pa.uint8())))), LABELS),
    "pandas beside a NULL": (PNGS, pa.array(LABELS).cast(pa.float64())),
    "Snowflake": (PNGS, pa.array([Decimal(label) for label in LABELS], pa.decimal128(38, 0))),
    "booleans": (PNGS, pa.array(LABELS).cast(pa.bool_())),
    "bytes": (PNGS, pa.array(LABELS).cast(pa.uint8())),
    "text": (PNGS, TEXT),
    "categories": (PNGS, pa.array(TEXT).dictionary_encode()),
    "views": (pa.array(PNGS, pa.binary_view()), pa.array(TEXT, pa.string_view())),
}


DELTA = ("Hugging Face", "Snowflake", "text", "categories")


@pytest.mark.parametrize(
    ("case", "save"), [*((c, write) for c in WRITTEN), *((c, write_delta) for c in DELTA)]
)
def test_images_and_labels_are_read_as_each_writer_stores_them(
    case: str, save: Any, tmp_path: Path
) -> None:
    """Text labels are classes in sorted order; other columns stand beside them."""
    image, label = WRITTEN[case]
    table = pa.table({"width": [40] * 6, "image": image, "label": label})
    params, data = opened(save(tmp_path, table))
    assert (params["num_classes"], type(params["num_classes"])) == (2, int)
    names = params.get("class_names", [])
    assert names == (["cat", "dog"] if case in ("text", "categories", "views") else [])
    rows = [(colour, 1 - label) for colour, label in WHOLE] if names else WHOLE
    assert sorted(trained(data)) == sorted(trained(data, "val")) == sorted(rows)


def one_table(*splits: Any) -> Any:
    def make(root: Path) -> Path:
        parquet.write_table(pictures(split=splits), root / "all.parquet")
        return root / "all.parquet"

    return make


def classes(root: Path) -> str:
    return write_partitions(root, {"label=train": [0, 1], "label=car": [2, 3]})


WORDS, NUMBERS, FLAGS = ["TRAIN"] * 4 + ["TEST"] * 2, [0, 0, 0, 0, 1, 1], [False] * 4 + [True] * 2
OTHER_ORDER, IN_ORDER = {"class_names": ["dog", "cat"]}, "class_names: the classes are cat, dog, in"
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no training": (one_table(*WORDS), {}, "column split holds TEST, TRAIN, but no train"),
    "numbers": (one_table(*NUMBERS), {}, "column split is int64; write train and val into it"),
    "booleans": (one_table(*FLAGS), {}, "column split is bool"),
    "other names than the folders'": (images(splits="train val"), OTHER_ORDER, IN_ORDER),
    "a class named train": (classes, {}, "no train split"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_splits_and_classes_that_contradict_are_refused(case: str, tmp_path: Path) -> None:
    make, params, expected = REFUSED[case]
    refused(expected, make(tmp_path) or tmp_path, **params)


def test_tables_with_versions_are_not_read_as_a_heap_of_files(tmp_path: Path) -> None:
    """Their folders hold files that are deleted in the newest version."""
    write_delta(tmp_path / "delta", pictures())
    write_delta(tmp_path / "delta", pictures(), mode="overwrite")
    _, data = opened(tmp_path / "delta")
    assert trained(data) == trained(data, "val") == WHOLE
    with pytest.raises(UsageError, match="the val split holds a Delta or Iceberg table"):
        read_parquet(str(tmp_path / "delta"), "val")
    root = write(tmp_path / "iceberg", pictures(), splits=("train/data", "val/data"))
    (tmp_path / "iceberg/train/metadata").mkdir()
    (tmp_path / "iceberg/train/metadata/v1.metadata.json").write_text("{}")
    refused("the train split holds a Delta or Iceberg table", root)
    refused("is of a Hudi table", write(tmp_path / "hudi", pictures(_hoodie_commit_time=TEXT)))
