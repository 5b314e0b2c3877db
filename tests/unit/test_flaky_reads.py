"""A read that fails once is no bad record; one that goes on failing is, or its shard goes to another host."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spoilt
import torch
from PIL import Image
from pyarrow import fs

from stoker.data import BadRecord, read_images, read_torch
from stoker.read import images, sources
from stoker.read.identity import agree, fingerprint_of_files


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
    found = images.filesystem_of
    opened: Counter[str] = Counter()

    class Mount:
        def open_input_file(self, path: str) -> Any:
            opened[path] += 1
            if opened[path] <= 2:
                raise OSError(5, "Input/output error", path)
            return fs.LocalFileSystem().open_input_file(path)

    monkeypatch.setattr(images, "filesystem_of", lambda uri: (Mount(), found(uri)[1]))
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
