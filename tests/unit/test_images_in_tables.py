"""Images and labels in tables as other tools write them: a job trains on the rows, or says what it lacks."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pytest
import torch
from damage import checked, preprocessed, read_all
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from stoker.accuracy import F1
from stoker.config.loading import load
from stoker.data import read_parquet
from stoker.entry.job_checks import open_all
from stoker.errors import UsageError
from stoker.image_classification import ImageClassification

COLOURS = [(40 * i, 255 - 30 * i, 10 * i) for i in range(6)]
LABELS = [i % 2 for i in range(6)]


def png(colour: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


PNGS = [png(colour) for colour in COLOURS]
STRUCTS = pa.array([{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(PNGS)])


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
    recipe = params.pop("recipe", "ImageClassification")
    params = {
        "data": str(root),
        "model": "test_resnet",
        "image_size": 8,
        "augment": "none",
        **params,
    }
    config, data = open_all(load({"recipe": recipe, "params": params}))
    return config.params, data


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


def test_files_that_spark_leaves_are_no_records(tmp_path: Path) -> None:
    table = pa.table({"image": PNGS, "label": LABELS})
    root = write(tmp_path, table, "part-00000.snappy.parquet")
    for name in ("_SUCCESS", "_metadata", ".part-00000.crc", "README.md"):
        (tmp_path / "train" / name).write_bytes(b"?")
    _, data = opened(root)
    assert trained(data) == WHOLE
    assert not data.notes()


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
    turned = pa.StructArray.from_arrays(
        [STRUCTS.field("path"), STRUCTS.field("bytes")], names=["path", "bytes"]
    )
    images = [PNGS, pa.array(PNGS, pa.large_binary()), STRUCTS, turned]
    labels = [LABELS, pa.array(LABELS, pa.int32()), pa.array(LABELS, pa.uint8()), LABELS]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        write(tmp_path, pa.table({"image": image, "label": label}), f"{number}.parquet")
    nothing = pa.table({"image": pa.nulls(0), "label": pa.nulls(0)})
    root = write(tmp_path, nothing, "00.parquet")
    params, data = opened(root)
    assert params["num_classes"] == 2
    assert trained(data) == 4 * WHOLE
    write(tmp_path, pa.table({"image": PNGS, "label": [float(n) for n in LABELS]}), "9.parquet")
    with pytest.raises(
        UsageError, match=r"9.parquet: column label is double, in .*0.parquet it is int64"
    ):
        opened(root)


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
    with pytest.raises(
        UsageError, match=r"0.parquet: has a column key.*columns=\[…\], or rename it"
    ):
        rows_of(root)
    rows = rows_of(root, ["x"])
    assert rows == [{"key": "0.parquet:0", "x": 1}, {"key": "0.parquet:1", "x": 2}]


def spark(pixels: Any, mode: int | None = None, data: bytes | None = None) -> dict[str, Any]:
    """An image as `spark.read.format("image")` gives it: OpenCV's order of channels."""
    height, width, channels = pixels.shape
    stored = pixels[..., [2, 1, 0, 3][:channels] if channels > 1 else [0]]
    mode, data = (
        8 * (channels - 1) if mode is None else mode,
        stored.tobytes() if data is None else data,
    )
    size = {"height": height, "width": width, "nChannels": channels}
    return {"origin": "f", **size, "mode": mode, "data": data}


def test_the_image_struct_of_spark_has_its_channels_or_is_quarantined(tmp_path: Path) -> None:
    grey, colour = (np.arange(6 * n, dtype=np.uint8).reshape(2, 3, n) for n in (1, 4))
    undefined, short = spark(grey, mode=-1, data=b""), spark(grey, data=b"12345")
    images = [spark(grey), spark(colour), undefined, short, spark(grey, mode=5)]
    found = rows_of(write(tmp_path, pa.table({"picture": images})))
    assert found[0]["picture"].tolist() == grey.tolist()
    assert found[1]["picture"].tolist() == colour.tolist()
    assert [
        "mode -1" in found[2].reason,
        "size 5" in found[3].reason,
        "mode 5" in found[4].reason,
    ] == [True] * 3


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
    parquet.write_table(
        table, tmp_path / "train.parquet", row_group_size=rows, dictionary_pagesize_limit=1 << 27
    )
    source = checked(read_parquet(str(tmp_path), "train"))
    (shard,) = source.shards(10, None)
    count, images = 0, (big, big[::-1])
    for count, row in enumerate(source.read(shard, None), start=1):
        assert row["image"] == images[row["label"]] and row["key"] == f"train.parquet:{count - 1}"
    assert count == rows


NAMES = ["dog", "cat"]
TEXT = [NAMES[label] for label in LABELS]


def write_delta(root: Path, table: pa.Table) -> str:
    deltalake = pytest.importorskip("deltalake")
    for split in ("train", "val"):
        deltalake.write_deltalake(root / split, table)
    return str(root)


class Shown(ImageClassification):
    class_names = ("dog", "cat")


def test_a_recipe_names_the_classes_of_numbers_and_folders_and_orders_those_of_text(
    tmp_path: Path,
) -> None:
    recipe = "test_images_in_tables:Shown"
    params, data = opened(
        write(tmp_path / "n", pa.table({"image": PNGS, "label": LABELS})), recipe=recipe
    )
    assert params["num_classes"] == 2 and trained(data) == WHOLE
    params, data = opened(
        write(tmp_path / "t", pa.table({"image": PNGS, "label": TEXT})), recipe=recipe
    )
    assert params["class_names"] == ["dog", "cat"] and trained(data) == WHOLE
    for at, content in enumerate(PNGS):
        for split in ("train", "val"):
            file = tmp_path / "f" / split / f"class{LABELS[at]}" / f"{at}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    assert opened(tmp_path / "f", recipe=recipe)[0]["num_classes"] == 2


def test_text_labels_in_a_given_order_and_number(tmp_path: Path) -> None:
    root = write(tmp_path, pa.table({"image": PNGS, "label": TEXT}))
    params, data = opened(root, class_names=[*NAMES, "bird"])
    assert params["num_classes"] == 3
    assert trained(data) == WHOLE
    with pytest.raises(UsageError, match=r"params: class_names has a name twice"):
        opened(root, class_names=["dog", "cat", "dog"])
    for number, names in ((5, []), (2, [*NAMES, "bird"])):
        with pytest.raises(
            UsageError, match=rf"params.num_classes: {number}, but the data has .* classes: "
        ):
            opened(root, num_classes=number, class_names=names)


@pytest.mark.parametrize(
    "labels",
    [
        ["cat", "dog", "nan"],
        ["0", "1", "None"],
        ["True", "true", "False"],
        ["2", "10", "K"],
        ["cat", "Cat ", "dog"],
    ],
)
def test_text_labels_are_classes_as_written(labels: list[str], tmp_path: Path) -> None:
    root = write(tmp_path, pa.table({"image": PNGS, "label": labels * 2}))
    for names in (sorted(labels), labels):
        params, data = opened(root, class_names=names) if names is labels else opened(root)
        assert params["class_names"] == names and not data.notes()
        assert [label for _, label in trained(data)] == [names.index(text) for text in labels * 2]


def test_a_label_that_training_lacks_is_refused_before_the_start(tmp_path: Path) -> None:
    root = write(tmp_path, pa.table({"image": PNGS, "label": TEXT}), splits=("train",))
    write(tmp_path, pa.table({"image": PNGS, "label": ["bird", *TEXT[1:]]}), splits=("val",))
    with pytest.raises(
        UsageError, match=r"val has the label bird, which is no class of train: cat, dog"
    ):
        opened(root)
    with pytest.raises(UsageError, match=r"the label dog, which is no class of params.class_names"):
        opened(root, class_names=["cat", "bird"])


def test_names_that_hugging_face_left_in_the_schema_are_those_of_the_classes(
    tmp_path: Path,
) -> None:
    features = {
        "image": {"_type": "Image"},
        "label": {"names": ["a", "b", "c"], "_type": "ClassLabel"},
    }
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"image": STRUCTS, "label": LABELS}).replace_schema_metadata(about)
    params, data = opened(write(tmp_path, table))
    assert (params["num_classes"], params["class_names"]) == (3, ["a", "b", "c"])
    assert trained(data) == WHOLE
    for swapped in (["b", "a", "c"], ["c", "x", "y"]):
        with pytest.raises(
            UsageError, match="the classes of column label are a, b, c, in this order"
        ):
            opened(tmp_path, class_names=swapped)
    for fitting in (["a", "b", "c"], ["eins", "zwei", "drei"], ["a", "zwei", "c"]):
        assert opened(tmp_path, class_names=fitting)[0]["class_names"] == fitting
    features["label"]["names"] = ["b", "a", "c"]
    other = table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    for split in ("val", "train"):
        root = write(tmp_path / split, table)
        write(tmp_path / split, other, "part-1.parquet", (split,))
        with pytest.raises(UsageError, match="0 in column label is a in one file and b in another"):
            opened(root)


@pytest.mark.parametrize(
    "names", [("img", "label"), ("image", "fine_label"), ("a.image", "a.label")]
)
def test_columns_of_other_names_are_refused_with_the_line_to_write_and_read_with_it(
    names: tuple[str, str], tmp_path: Path
) -> None:
    image, label = names
    root = write(
        tmp_path, pa.table({"a": [{"image": 1}] * 6, image: PNGS, "size": [0.5] * 6, label: LABELS})
    )
    with pytest.raises(UsageError) as refused:
        opened(root)
    own = {"image_column": image, "label_column": label}
    keys = [key for key, name in own.items() if name not in ("image", "label")]
    for problem, key in zip(refused.value.problems, keys, strict=True):
        assert (
            problem.endswith(f"set params.{key}") and f"{image} (binary), size (double)" in problem
        )
    params, data = opened(root, **{key: own[key] for key in keys})
    assert params["num_classes"] == 2
    assert trained(data) == WHOLE


@pytest.mark.parametrize("odd", [[1, -1, 0], [2, 0, 1], [float("nan"), 0, 1], [0.5, 0, 1]])
def test_several_labels_are_a_vector_of_0_and_1_or_the_record_is_quarantined(
    odd: list[float], tmp_path: Path
) -> None:
    labels = [odd, [1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]]
    table = pa.table({"image": PNGS, "label": pa.array(labels, pa.list_(pa.float32()))})
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
    root = write_partitions(
        tmp_path, {"train/year=2024/site=a%3Db": [0, 1], "train/year=2025/site=c": [2, 3]}
    )
    rows = [(row["year"], row["site"], row["image"]) for row in rows_of(root)]
    assert rows == [
        (2024, "a=b", PNGS[0]),
        (2024, "a=b", PNGS[1]),
        (2025, "c", PNGS[2]),
        (2025, "c", PNGS[3]),
    ]
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
    hole = {
        "train/label=0": [0],
        "train/label=__HIVE_DEFAULT_PARTITION__": [1],
        "train/label=1": [2],
    }
    with pytest.raises(
        UsageError, match=r"column label holds 1 NULL in 1 row; handle them with nulls="
    ):
        opened(write_partitions(tmp_path / "hole", hole))
    twice = {"train/label=0": [0, 2], "train/label=1": [1, 3]}
    _, data = opened(write_partitions(tmp_path / "same", twice, label=LABELS))
    assert sorted(trained(data)) == sorted(WHOLE[:4])
    with pytest.raises(
        UsageError, match=r"column label holds 1, but its folder says 0; rename one"
    ):
        opened(
            write_partitions(
                tmp_path / "other", {"train/label=0": [0, 1], "train/label=1": [3]}, label=LABELS
            )
        )


def test_a_folder_that_its_writer_calls_a_file_is_read_as_one(tmp_path: Path) -> None:
    """As `df.write.parquet("train.parquet")` of Spark and Dask leave it."""
    table = pa.table({"image": PNGS, "label": LABELS})
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
    table = pa.table({"image": PNGS, "label": LABELS})
    root = write(tmp_path / "a", table)
    write(tmp_path / "a", table, "_old.parquet", ("train",))
    _, data = opened(root)
    assert trained(data) == WHOLE
    (note,) = data.notes()
    assert "1 file not read" in note and "train/_old.parquet" in note


@pytest.mark.parametrize("form", ["delta", "partitioned", "all.parquet", "spark.parquet"])
def test_a_column_split_of_a_single_table_tells_training_from_validation(
    form: str, tmp_path: Path
) -> None:
    rows = {
        "image": PNGS * 3,
        "label": LABELS * 3,
        "split": ["train"] * 6 + ["validation"] * 6 + ["extra"] * 5 + [None],
    }
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


SPARK = [spark(np.full((8, 9, 3), colour, np.uint8)) for colour in COLOURS]
NESTED = [np.full((8, 8, 3), colour, np.uint8).tolist() for colour in COLOURS]
WRITTEN: dict[str, tuple[Any, Any]] = {
    "Hugging Face": (STRUCTS, LABELS),
    "Spark": (SPARK, LABELS),
    "nested lists": (pa.array(NESTED, pa.list_(pa.list_(pa.list_(pa.uint8())))), LABELS),
    "pandas beside a NULL": (PNGS, pa.array(LABELS).cast(pa.float64())),
    "Snowflake": (PNGS, pa.array([Decimal(label) for label in LABELS], pa.decimal128(38, 0))),
    "booleans": (PNGS, pa.array(LABELS).cast(pa.bool_())),
    "bytes": (PNGS, pa.array(LABELS).cast(pa.uint8())),
    "text": (PNGS, TEXT),
    "categories": (PNGS, pa.array(TEXT).dictionary_encode()),
    "views": (pa.array(PNGS, pa.binary_view()), pa.array(TEXT, pa.string_view())),
}


DELTA = ("Hugging Face", "Spark", "Snowflake", "text", "categories")


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


def one_table(**columns: Any) -> Any:
    def make(root: Path) -> Path:
        table = pa.table({"image": PNGS, "label": LABELS, **columns})
        parquet.write_table(table, root / "all.parquet")
        return root / "all.parquet"

    return make


def class_folders(root: Path) -> Path:
    for path in (root / s / c / "0.png" for s in ("train", "val") for c in ("cat", "dog")):
        path.parent.mkdir(parents=True)
        path.write_bytes(PNGS[0])
    return root


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a split without training": (
        one_table(split=["TRAIN"] * 4 + ["TEST"] * 2),
        {},
        "column split holds TEST, TRAIN, but no train",
    ),
    "numbers as splits": (
        one_table(split=[0, 0, 0, 0, 1, 1]),
        {},
        "column split is int64; write train and val into it",
    ),
    "booleans as splits": (one_table(split=[False] * 4 + [True] * 2), {}, "column split is bool"),
    "other names than the folders'": (
        class_folders,
        {"class_names": ["dog", "cat"]},
        "params.class_names: the classes are cat, dog, in this order",
    ),
    "a class named train": (
        lambda root: write_partitions(root, {"label=train": [0, 1], "label=car": [2, 3]}),
        {},
        "no train split",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_splits_and_classes_that_contradict_are_refused(case: str, tmp_path: Path) -> None:
    make, params, expected = REFUSED[case]
    with pytest.raises(UsageError, match=expected):
        opened(make(tmp_path), **params)


def test_tables_with_versions_are_not_read_as_a_heap_of_files(tmp_path: Path) -> None:
    """Their folders hold files that are deleted in the newest version."""
    deltalake = pytest.importorskip("deltalake")
    table = pa.table({"image": PNGS, "label": LABELS})
    for split in ("training", "validation"):
        for _ in range(2):
            deltalake.write_deltalake(tmp_path / "delta" / split, table, mode="overwrite")
    _, data = opened(tmp_path / "delta")
    assert trained(data) == trained(data, "val") == WHOLE
    with pytest.raises(UsageError, match="the val split holds a Delta or Iceberg table"):
        read_parquet(str(tmp_path / "delta"), "val")
    root = write(tmp_path / "iceberg", table, splits=("train/data", "val/data"))
    (tmp_path / "iceberg/train/metadata").mkdir()
    (tmp_path / "iceberg/train/metadata/v1.metadata.json").write_text("{}")
    with pytest.raises(UsageError, match=r"the train split holds a Delta or Iceberg table"):
        opened(root)
    write(tmp_path / "hudi", table.append_column("_hoodie_commit_time", pa.array(["1"] * 6)))
    with pytest.raises(UsageError, match="is of a Hudi table"):
        opened(tmp_path / "hudi")
