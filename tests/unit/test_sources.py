"""Sources of every form: the same records in a seeded order; failed reads are tried again."""

from __future__ import annotations

import io
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import spoilt
import torch
from damage import blocks, chained, checked, read_all
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import fs, parquet

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.config.schema import Config
from stoker.data import (
    BadRecord,
    CheckLabel,
    DecodeImage,
    Drop,
    Shard,
    Source,
    cut_indices,
    read_any,
    read_images,
    read_parquet,
    read_range,
    read_torch,
)
from stoker.errors import SchemaError, UsageError
from stoker.read import images as image_files
from stoker.read import sources
from stoker.read.identity import agree, fingerprint_of_files
from stoker.recipe import Recipe
from stoker.serve.passes import Passes
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


class Flaky:
    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error = times, error
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        if index == 1 and self.reads[1] <= self.times:
            raise self.error
        return {"x": float(index)}


class Damaged(Flaky):
    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return {"x": Image.open(io.BytesIO(b"no image"))}


class Drawing(Flaky):
    """Draws before it fails, as augmentation inside a dataset does."""

    def __getitem__(self, index: int) -> Any:
        drawn = random.random() + float(np.random.random()) + float(torch.rand(()))
        return super().__getitem__(index) | {"drawn": drawn}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WAITS_S", (0.0, 0.0))


def read(dataset: Any) -> list[Any]:
    [shard] = read_torch(dataset).shards(3, None)
    return [*read_torch(dataset).read(shard, None)]


@pytest.mark.parametrize(
    ("times", "error"),
    [(2, OSError(116, "Stale file handle")), (1, RuntimeError("busy")), (2, TimeoutError())],
)
def test_a_hiccup_is_read_again(times: int, error: Exception) -> None:
    assert [record["x"] for record in read(Flaky(times, error))] == [0, 1, 2]


def test_a_record_that_is_read_again_draws_what_it_would_have_drawn() -> None:
    drawn = []
    for times in (0, 1, 2):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        drawn.append([record["drawn"] for record in read(Drawing(times, OSError(5, "mount")))])
    assert drawn[0] == drawn[1] == drawn[2] and len(set(drawn[0])) == 3


LASTING = [
    (OSError(5, "Input/output error"), 3, True),
    (ConnectionResetError(104, "reset"), 3, True),
    (FileNotFoundError(2, "No such file", "1.jpg"), 2, False),
    (PermissionError(13, "Permission denied"), 2, False),
    (ValueError("no such class"), 2, False),
]


@pytest.mark.parametrize(("error", "reads", "passing"), LASTING)
def test_what_goes_on_failing_is_named_with_its_reason(
    error: Exception, reads: int, passing: bool
) -> None:
    dataset = Flaky(99, error)
    bad = read(dataset)[1]
    assert isinstance(bad, BadRecord) and bad.key == "1" and bad.passing is passing
    assert f"cannot be read, {reads} tries: {type(error).__name__}" in bad.reason
    assert dataset.reads == {0: 1, 1: reads, 2: 1}


def test_a_missing_object_of_a_store_is_read_again() -> None:
    reads: Counter[str] = Counter()

    def missing() -> None:
        reads["x"] += 1
        raise FileNotFoundError(2, "No such object", "x")

    bad = sources.read_again("x", missing, far=True)
    assert isinstance(bad, BadRecord) and reads["x"] == 2


def test_a_damaged_image_is_no_matter_of_the_host() -> None:
    bad = read(Damaged(0, ValueError()))
    assert [record.passing for record in bad] == [False] * 3
    assert "UnidentifiedImageError" in bad[0].reason


def test_an_image_file_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt.images(splits="train", classes="a b")(tmp_path)
    source = read_images(str(tmp_path), "train")
    assert source
    found = image_files.filesystem_of
    opened: Counter[str] = Counter()

    class Mount:
        def open_input_file(self, path: str) -> Any:
            opened[path] += 1
            if opened[path] <= 2:
                raise OSError(5, "Input/output error", path)
            return fs.LocalFileSystem().open_input_file(path)

    monkeypatch.setattr(image_files, "filesystem_of", lambda uri: (Mount(), found(uri)[1]))
    (shard,) = source.shards(10, None)
    assert [record["image"] for record in source.read(shard, None)] == [spoilt.JPG] * 4
    assert set(opened.values()) == {3}


def test_a_file_that_is_gone_is_read_once(tmp_path: Path) -> None:
    spoilt.images(splits="train", classes="a b")(tmp_path)
    source = read_images(str(tmp_path), "train")
    assert source
    (tmp_path / "train/a/0.jpg").unlink()
    [shard] = source.shards(10, None)
    [bad, *whole] = source.read(shard, None)
    assert isinstance(bad, BadRecord) and bad.reason.startswith("cannot be read: FileNotFoundError")
    assert len(whole) == 3


class FlakyFiles:
    """A file system whose opens fail by number."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        self.opens, self.fails = count(), fails

    def open_input_file(self, path: str) -> Any:
        if self.fails(next(self.opens)):
            raise OSError(116, "Stale file handle")
        return fs.LocalFileSystem().open_input_file(path)


def test_a_read_that_fails_makes_no_other_fingerprint(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(40)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(b"%03d" % number)

    def fingerprint(fails: Callable[[int], bool] = lambda number: False) -> str:
        return fingerprint_of_files(FlakyFiles(fails), paths, [3] * 40, "about")

    whole = fingerprint()
    assert fingerprint(lambda number: number == 2) == whole
    first, later = fingerprint(lambda number: True), fingerprint(lambda number: number > 30)
    assert whole.startswith(first) and whole.startswith(later)
    assert len(first) < len(later) < len(whole)
    Path(paths[0]).write_bytes(b"new")
    assert not agree(later, fingerprint()), "the samples before still count"


def cut_at_once(n: int, records: int, order: Any, homes: int) -> list[Shard]:
    """How shards were listed when checkpoints were first written; their cursors count on this order."""
    parts: list[tuple[str, list[int]]]
    if order is None:
        parts = [(str(i), list(range(i, min(i + records, n)))) for i in range(0, n, records)]
    elif homes < 2:
        indices = order.permutation(n).tolist()
        parts = [("", indices[i : i + records]) for i in range(0, n, records)]
    else:
        whole = np.random.default_rng(0).permutation(n)
        parts = []
        for home in range(homes):
            own = order.permutation(whole[home::homes]).tolist()
            parts += [(str(home), own[i : i + records]) for i in range(0, len(own), records)]
        parts = [parts[i] for i in order.permutation(len(parts))]
    return [Shard("", rows=len(part), items=tuple(part), home=home) for home, part in parts]


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(0, 500),
    records=st.integers(1, 60),
    seed=st.none() | st.integers(0, 2**64 - 1),
    homes=st.integers(0, 12),
)
def test_shards_of_numbered_records_are_those_of_before(
    n: int, records: int, seed: int | None, homes: int
) -> None:
    orders = [None if seed is None else np.random.default_rng(seed) for _ in range(3)]
    before = cut_at_once(n, records, orders[0], homes)
    assert cut_indices(n, records, orders[1], homes) == before
    if n:
        now = read_range(n).shards(records, orders[2], homes)  # type: ignore[call-arg]
        assert len(now) == len(before) and [*now] == before
        assert [now[at] for at in reversed(range(-len(now), len(now)))] == [*reversed(before * 2)]
        assert now[1:-1:2] == before[1:-1:2]
        with pytest.raises(IndexError):
            now[len(now)]
    draws = [
        order.random() for order in orders if order is not None and (n or order is not orders[2])
    ]
    assert len({*draws}) <= 1, "and as many numbers are drawn"


class Reordering(Source):
    random = False

    def __init__(self) -> None:
        self.all = [Shard(f"s{n}", rows=1) for n in range(50)]

    def shards(self, records: int, order: Any) -> list[Shard]:
        order.shuffle(self.all)
        return self.all

    def read(self, shard: Shard, order: Any) -> Any:
        raise NotImplementedError

    def count(self) -> int:
        return len(self.all)


def test_the_list_of_a_users_source_may_change_with_the_next_pass() -> None:
    passes = Passes(Config.model_validate({"recipe": "r"}), {"train": Reordering()}, {})
    plans = [passes.plan("train", epoch, None) for epoch in range(2)]
    first = passes.rest(plans[0], None)
    now = [work.shard.path for work in first.take(10)]
    passes.rest(plans[1], None)
    now += [work.shard.path for work in first.take(100)]
    assert len({*now}) == 50, "each record once, although the second pass was listed meanwhile"
