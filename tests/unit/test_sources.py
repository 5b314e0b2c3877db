"""Where records come from: every form gives the same records, whole, with keys, in a seeded order."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from damage import blocks, chained, checked, read_all
from pyarrow import parquet

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.data import (
    BadRecord,
    CheckLabel,
    DecodeImage,
    Drop,
    read_any,
    read_images,
    read_parquet,
    read_range,
    read_torch,
)
from stoker.errors import SchemaError, UsageError
from stoker.recipe import Recipe
from stoker.serve.shards import order_of


@pytest.mark.long
def test_the_three_forms_of_the_digits_hold_the_same_images(digits: Path) -> None:
    contents = []
    for form in ("webdataset", "parquet", "images"):
        records = read_all(source := checked(read_any(str(digits / form), "train")))
        assert len(records) == source.count() == 1437
        assert len({r["key"] for r in records}) == 1437
        contents.append(sorted((r["image"], r["label"]) for r in records))
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize("form", ["webdataset", "parquet", "images"])
def test_a_seeded_order_permutes_and_loses_nothing(form: str, digits: Path) -> None:
    orders = [read_all(read_any(str(digits / form), "val"), seed=seed) for seed in (None, 1, 1, 2)]
    plain, once, again, other = ([record["key"] for record in order] for order in orders)
    assert once == again
    assert plain != once != other
    assert sorted(plain) == sorted(once) == sorted(other)


@pytest.mark.parametrize("form", ["webdataset", "parquet", "images"])
@pytest.mark.long
def test_the_order_of_an_epoch_is_the_same_wherever_the_data_lies(
    form: str, digits: Path, tmp_path: Path
) -> None:
    def keys(root: Path) -> list[str]:
        source = checked(read_any(str(root), "train"))
        chain = Chain(as_stages([DecodeImage()]), seed=3, with_keys=True)
        shards = source.shards(100, order_of(3, 1))
        made = blocks(source, chain, shards, seed=3, epoch=1, shuffle=True, block_records=50)
        return [key for columns, _ in made for key in columns["__key"]]

    moved = shutil.copytree(digits / form, tmp_path / "elsewhere" / form)
    assert keys(moved) == keys(digits / form)
    assert len(set(keys(moved))) == 1437


def test_shards_are_as_large_as_asked(digits: Path) -> None:
    for form, expected in (("images", 15), ("parquet", 6)):
        shards = checked(read_any(str(digits / form), "train")).shards(100, None)
        assert len(shards) == expected
        assert sum(shard.rows or 0 for shard in shards) == 1437


def test_parquet_gives_tensors_and_the_columns_that_are_named(tmp_path: Path) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    table = pa.table({"x": [1.5, 2.5, 3.5, 4.5], "pixels": tensors})
    parquet.write_table(table, tmp_path / "train-0.parquet")
    record = read_all(read_parquet(str(tmp_path), "train"))[1]
    assert (record["key"], record["x"]) == ("train-0.parquet:1", 2.5)
    assert np.array_equal(record["pixels"], pixels[1])
    assert list(read_all(read_parquet(str(tmp_path), "train", columns=["x"]))[0]) == ["key", "x"]
    assert read_parquet(str(tmp_path), "val") is None
    with pytest.raises(UsageError, match="has no column y; it has x, pixels"):
        read_all(read_parquet(str(tmp_path), "train", columns=["y"]))


def test_a_torch_dataset_gives_tuples_and_dicts_and_survives_a_bad_item() -> None:
    class Pairs:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> tuple[Any, int]:
            if i == 1:
                raise ValueError("torn")
            return np.zeros(2), i

    records = read_all(read_torch(Pairs(), columns=("x", "y")))
    assert records[0]["y"] == 0
    assert records[1] == BadRecord("1", "cannot be read, 2 tries: ValueError: torn", name="item 1")
    with pytest.raises(UsageError, match="needs a map-style dataset"):
        read_torch(iter([]))
    with pytest.raises(UsageError, match="the dataset is empty"):
        checked(read_torch([]))
    with pytest.raises(UsageError, match=r"read_range\(0\): a split needs at least one record"):
        read_range(0)


def test_files_of_one_name_in_several_folders_keep_their_records_apart(tmp_path: Path) -> None:
    for part in ("a", "b"):
        (tmp_path / "train" / part).mkdir(parents=True)
        parquet.write_table(pa.table({"x": [1, 2]}), tmp_path / "train" / part / "rows.parquet")
    keys = [record["key"] for record in read_all(read_parquet(str(tmp_path), "train"))]
    assert keys == ["a/rows.parquet:0", "a/rows.parquet:1", "b/rows.parquet:0", "b/rows.parquet:1"]


def images(root: Path, **classes: str) -> None:
    """Files in the class folders of each split; classes are separated by spaces."""
    for split, names in classes.items():
        for name in names.split():
            (root / split / name).mkdir(parents=True)
            (root / split / name / "1.jpg").write_bytes(b"image")


def test_a_class_has_one_label_in_all_splits(tmp_path: Path) -> None:
    """A validation split without the first class must not be numbered from 0 again."""
    images(tmp_path, train="circle square triangle", val="square triangle")
    train, val = (read_all(read_images(str(tmp_path), split)) for split in ("train", "val"))
    labels = {record["key"]: record["label"] for record in train}
    assert labels == {"circle/1.jpg": 0, "square/1.jpg": 1, "triangle/1.jpg": 2}
    assert {record["key"]: record["label"] for record in val} == {
        "square/1.jpg": 1,
        "triangle/1.jpg": 2,
    }
    source = read_images(str(tmp_path), "val")
    assert source is not None and source.classes() == ["circle", "square", "triangle"]


def test_a_folder_without_images_is_no_class_of_any_split(tmp_path: Path) -> None:
    images(tmp_path, training="a c", val="a c")
    (tmp_path / "training" / "b").mkdir()
    (tmp_path / "training" / "b" / "a.xml").write_text("<a/>")
    for split in ("train", "val"):
        found = read_all(read_images(tmp_path, split, ignore=["*.xml"]))
        assert {record["key"]: record["label"] for record in found} == {"a/1.jpg": 0, "c/1.jpg": 1}


def test_the_pages_dataset_of_images_and_masks_in_two_folders(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/write-a-recipe.md").read_text()
    found = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (block for block in found if "class Pairs" in block)
    images = [f"train/images/{name}.jpg" for name in "ab"]
    for name in [*images, *(name.replace("images", "masks")[:-3] + "png" for name in images)]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name.encode())
    names = {"torch": torch, "Path": Path, "Recipe": Recipe, "read_torch": read_torch}
    exec("from __future__ import annotations\n" + code, names)  # noqa: S102 - as a reader types it
    assert read_all(names["Roads"](data=str(tmp_path)).read("train")) == [
        {"key": f"{name}.jpg", "image": f"{name}.jpg".encode(), "mask": f"{name}.png".encode()}
        for name in ("a", "b")
    ]


def test_a_torch_dataset_names_its_classes_also_below_a_subset() -> None:
    class Named(list[Any]):
        classes = ("cat", "dog")

    from torch.utils.data import Subset

    assert read_torch(Subset(Named([(1, 0), (2, 1)]), [0])).classes() == ["cat", "dog"]  # type: ignore[arg-type]
    assert read_torch([(1, 0)]).classes() is None


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"key": 3, "x": 1}, "item 0 has the key 3; a key names a record, so make it text"),
        ({1: 2, "x": 3}, "column 1: the name of a column must be text"),
        ({"x": torch.zeros(3).to_sparse()}, "column 'x' holds tensors that cannot be batched"),
    ],
)
def test_an_item_that_gives_no_record_is_refused_in_one_line(
    item: dict[Any, Any], says: str
) -> None:
    source = read_torch([item])
    (shard,) = source.shards(1, None)
    with pytest.raises((UsageError, SchemaError), match=says):
        chained(source.read(shard, None), Drop("other"))


@pytest.mark.parametrize(
    ("label", "number"), [("1_0", None), ("\u0663", None), (" 3 ", 3), ("07", 7)]
)
def test_a_label_in_text_is_a_number_only_in_plain_digits(label: str, number: int | None) -> None:
    columns, report = chained([{"key": "a", "label": label}], CheckLabel(20))
    assert columns.get("label", [None]) == [number] and len(report.bad) == (number is None)
