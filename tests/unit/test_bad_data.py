"""What becomes of each way of getting the data wrong: refused before training, or quarantined and counted.

Never does a run go on with other records than the user meant.
"""

from __future__ import annotations

import gzip
import os
import tempfile
from base64 import b64encode
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from damage import opened, preprocessed, tar_of
from spoilt import (
    FLAT,
    JPG,
    PNG,
    Make,
    and_then,
    bomb,
    both,
    column_twice,
    cut,
    encoded,
    flipped,
    images,
    linked,
    of,
    one,
    shard,
    table,
    tensors,
    written,
)

from stoker.entry import driver
from stoker.entry import main as bootstrap
from stoker.errors import UsageError
from stoker.storage.filesystems import list_files

HEIC = b"\0\0\0\x18ftypheic"

REFUSED: dict[str, tuple[Make, str]] = {
    "a link that leads nowhere": (
        linked("train/cat/x.jpg", "/nowhere/x.jpg"),
        "x.jpg: is a link to /nowhere",
    ),
    "a link to itself": (
        linked("train/cat/x.jpg", "x.jpg"),
        "x.jpg: is a link to x.jpg, which is not there",
    ),
    "a class that leads nowhere": (
        linked("train/eel", "/nowhere"),
        "train/eel: is a link to /nowhere",
    ),
    "a split that leads nowhere": (linked("val", "/nowhere"), "val: is a link to /nowhere"),
    "a link to a folder above": (
        linked("train/cat/up", ".."),
        "cat/up: is a link to a folder above it",
    ),
    "two links to folders above": (
        and_then(
            linked("train/cat/up", ".."), lambda root: (root / "train/dog/up").symlink_to("..")
        ),
        "up: is a link to a folder above it; remove it",
    ),
    "a file name in Latin-1": (
        and_then(
            images(),
            lambda r: Path(os.fsdecode(os.fsencode(r / "train/cat") + b"/\xe4.jpg")).touch(),
        ),
        r"the name b'\xe4.jpg' is not UTF-8; rename it",
    ),
    "a class in Latin-1": (
        and_then(
            images(), lambda r: Path(os.fsdecode(os.fsencode(r / "train") + b"/\xe4")).mkdir()
        ),
        r"the name b'\xe4' is not UTF-8; rename it",
    ),
    "a phone's photos among others": (
        images("train/cat/x.HEIC"),
        "1 file not of the kind .jpg or .png (first: cat/x.HEIC)",
    ),
    "a class of a phone's photos": (
        images("train/eel/x.heic"),
        "1 file not of the kind .jpg or .png (first: eel/x.heic)",
    ),
    "a camera's raw file": (images("train/cat/x.NEF"), "(first: cat/x.NEF)"),
    "two training folders": (
        images(splits="train training"),
        "train and training both name the train split",
    ),
    "two validation folders": (
        images(splits="train val valid"),
        "val and valid both name the val split",
    ),
    "training in capitals": (
        images(splits="Training Testing"),
        "has no folder train/ (found: Test",
    ),
    "empty validation": (
        and_then(images(), lambda root: (root / "val").mkdir()),
        "val: the folder holds no",
    ),
    "validation of another format": (
        images(("val/x.csv", b"a,b")),
        "neither images nor .parquet nor .tar",
    ),
    "a class of validation only": (
        images("val/eel/0.jpg"),
        "the training split has no class folder eel",
    ),
    "a class in capitals": (images("val/Cat/0.jpg"), "no class folder Cat (it has cat, dog)"),
    "a class in another Unicode form": (
        images("val/cafe\u0301/0.jpg", classes="caf\u00e9 dog"),
        "the training split has no class folder cafe",
    ),
    "one class": (images(classes="cat"), "holds one class only (cat)"),
    "a photo outside the classes": (images("train/x.jpg"), "x.jpg lies outside any class folder"),
    "no split": (
        images(splits="."),
        "has no folder train/ (found: cat, dog); split it into train/ and val/",
    ),
    "a folder too high": (images(splits="flowers/train"), "has no folder train/ (found: flowers)"),
    "a folder too deep": (and_then(images(), lambda root: f"{root}/train"), "(found: cat, dog)"),
    "a class that is called train": (
        images(splits=".", classes="train bus"),
        "outside any class folder",
    ),
    "shards among images": (
        images("train/a.tar"),
        "the train split mixes formats (a.tar and 0.jpg)",
    ),
    "shards among Parquet files": (
        both(table(), shard(name="train-1.tar")),
        "mixes formats (train-1.tar and",
    ),
    "a zip file": (
        and_then(written("x.zip", b"PK"), lambda root: f"{root}/x.zip"),
        "neither images nor",
    ),
    "a table in CSV": (
        written("train.csv", b"image,label\n"),
        "holds neither images nor .parquet nor .tar",
    ),
    "one photo": (
        and_then(written("x.jpg", JPG), lambda root: f"{root}/x.jpg"),
        "x.jpg: has no folder train/",
    ),
    "an absent folder": (lambda root: f"{root}/there", "there: no such file or folder"),
    "an empty folder": (lambda root: None, "the folder holds no file"),
    "an address with %20": (
        and_then(images(splits="a b/train"), lambda root: f"file://{root}/a%20b"),
        "a%20b: no such file or folder",
    ),
    "an address on the web": (
        lambda root: "https://host/flowers",
        "cannot read https:// addresses",
    ),
    "an address with one slash": (
        lambda root: "s3:/bucket/flowers",
        "s3:/bucket/flowers: no such file",
    ),
    "a truncated table": (
        and_then(
            table(),
            lambda r: written("train-0.parquet", cut((r / "train-0.parquet").read_bytes()))(r),
        ),
        "train-0.parquet: not a whole Parquet file",
    ),
    "a table that is CSV": (
        written("train-0.parquet", b"image,label\n"),
        "not a whole Parquet file",
    ),
    "an empty table": (written("train-0.parquet"), "train-0.parquet: not a whole Parquet file"),
    "a table without rows": (
        table(image=pa.array([], pa.binary()), label=pa.array([], pa.int64())),
        "hold no row",
    ),
    "a compressed table among others": (
        both(table(), written("train-1.parquet.gz", gzip.compress(b"x"))),
        "1 file not of the kind .parquet or .pq (first: train-1.parquet.gz)",
    ),
    "no column of labels": (table(label=None), "has no column label; it has image"),
    "validation without labels": (
        both(table(), table("val-0.parquet", label=None)),
        "has no column label",
    ),
    "a table with fewer columns": (
        both(table(), table("train-1.parquet", label=None)),
        "lacks the column label",
    ),
    "a table of other types": (
        both(table(), table("train-1.parquet", label=["a", "b", "c"])),
        "train-1.parquet: column label is string, in ",
    ),
    "a column twice": (
        column_twice,
        "train-0.parquet: has the column label twice; rename or remove one",
    ),
    "a NULL image": (table(image=[JPG, None, JPG]), "column image holds 1 NULL in 3 rows"),
    "a NULL label": (table(label=[0, None, 2]), "column label holds 1 NULL in 3 rows"),
    "images elsewhere": (
        table(image=[{"bytes": None, "path": "a"}] * 3),
        "column image holds 3 NULLs",
    ),
    "two prefixes": (
        both(table(), table("training-0.parquet")),
        "train and training both name the train",
    ),
    "no prefix": (
        table("part-0.parquet"),
        "no train split: expected a folder train/ or files train-*",
    ),
    "a truncated shard": (shard(change=cut), "train-0.tar: not a whole tar shard"),
    "an empty shard": (written("train-0.tar"), "train-0.tar: the tar shard is empty (0 bytes)"),
    "a shard without records": (
        written("train-0.tar", tar_of([])),
        "the tar shards hold no records",
    ),
    "a compressed shard": (shard(change=gzip.compress), "train-0.tar: not a whole tar shard"),
    "a compressed shard among others": (
        both(shard(), shard(name="train-1.tar.gz", change=gzip.compress)),
        "1 file not of the kind .tar (first: train-1.tar.gz)",
    ),
}

UNUSABLE: dict[str, tuple[Make, str]] = {
    "a date as a label": (table(label=[date(2020, 1, 1)] * 3), "not 'datetime.date'"),
    "labels one-hot": (table(label=[[0, 1], [1, 0], [0, 1]]), "only 0-dimensional arrays"),
    "paths for images": (
        table(image=["a.jpg"] * 3),
        "column image is text, neither an encoded image nor",
    ),
    "images as base64 in text": (
        table(image=[b64encode(JPG).decode()] * 3),
        "column image is text",
    ),
    "images of 0 to 1": (
        table(image=tensors(np.ones((3, 30, 40, 3), np.float32))),
        "image is float32",
    ),
    "images of 16 bits": (
        table(image=tensors(np.ones((3, 30, 40, 3), np.uint16))),
        "image is uint16",
    ),
    "images of 64 bits": (
        table(image=tensors(np.ones((3, 30, 40, 3), np.int64))),
        "image is int64",
    ),
    "images as base64": (
        table(image=[b64encode(JPG)] * 3),
        "not an image (first bytes b'/9j/4AAQ')",
    ),
    "images of raw bytes": (table(image=[bytes(3600)] * 3), "not an image"),
    "images as lists": (
        table(image=pa.array([[1, 2, 3]] * 3, pa.list_(pa.uint8()))),
        "column image has the shape (3,)",
    ),
}

FROM_LABELS: dict[str, tuple[Make, str]] = {
    "labels in fractions": (
        table(label=[0.0, 1.0, 1.5]),
        "column label holds 1.5; labels must be integers",
    ),
    "labels that are no numbers": (
        table(label=[0.0, 1.0, float("nan")]),
        "labels must be integers or text",
    ),
    "labels in bytes": (
        table(label=[b"a", b"b", b"a"]),
        "column label is binary; labels must be integers",
    ),
    "a label of nothing but blanks": (
        table(label=["a", "b", " "]),
        "labels must be integers or text",
    ),
    "labels as dates": (table(label=[date(2020, 1, 1)] * 3), "labels must be integers"),
    "labels as lists": (
        table(label=[[0], [1], [2]]),
        "column label is list<element: int64>; labels must be",
    ),
    "ids as labels": (
        table(label=[0, 1, 2**40]),
        "label holds 1099511627776; number the classes 0, 1, ",
    ),
    "one class in a table": (table(label=[0, 0, 0]), "holds one class only"),
    "a table of no classes": (
        table(image=pa.array([], pa.binary()), label=pa.array([], pa.int64())),
        "one class",
    ),
}
"""As REFUSED, where the number of classes is taken from the data."""

QUARANTINED: dict[str, tuple[Make, int, str]] = {
    "an empty photo": (one(b""), 1, "the image is empty (0 bytes)"),
    "a page of a web server": (
        one(b"<html>404 Not Found</html>"),
        1,
        "not an image (first bytes b'<html>40')",
    ),
    "a pointer of Git LFS": (
        one(b"version https://git-lfs"),
        1,
        "not an image (first bytes b'version ')",
    ),
    "a phone's photo with another name": (one(HEIC), 1, "not an image"),
    "a document": (one(b"%PDF-1.7"), 1, "not an image"),
    "a JPEG that is cut": (one(cut(JPG)), 1, "cannot be decoded: Premature end of JPEG file"),
    "a JPEG that is half zeros": (
        one(cut(JPG) + bytes(len(JPG) // 2)),
        1,
        "Premature end of JPEG file",
    ),
    "a JPEG with a hole": (one(JPG[:700] + bytes(200) + JPG[900:]), 1, "Corrupt JPEG data"),
    "a PNG that is cut": (one(cut(PNG)), 1, "the PNG is truncated"),
    "a PNG with a wrong byte": (
        one(flipped(PNG, 900)),
        1,
        "the checksum of the PNG's b'IDAT' part is wrong",
    ),
    "a PNG as large as a wall": (one(bomb()), 1, "more than data.max_pixels allows"),
    "a GIF that is cut": (one(encoded("GIF")[:600]), 1, "not an image"),
    "a WebP that is cut": (one(cut(encoded("WEBP"))), 1, "cannot be decoded"),
    "a BMP that is cut": (one(cut(encoded("BMP"))), 1, "image file is truncated"),
    "a TIFF that is cut": (one(cut(encoded("TIFF"))), 1, "image file is truncated"),
    "a TIFF with a wrong byte": (
        one(flipped(encoded("TIFF", compression="tiff_adobe_deflate"), 600)),
        1,
        "cannot be decoded: decoder error",
    ),
    "pixels of 0 to 1": (
        one(of((FLAT / 4).astype(np.float32))),
        1,
        "32 bits, floating-point",
    ),
    "pixels of 32 bits": (one(of(FLAT.astype(np.int32) << 20)), 1, "32 bits, signed"),
    "negative pixels": (one(of(-FLAT.astype(np.int32))), 1, "32 bits, signed"),
    "a fraction as a label": (table(label=[0.0, 1.0, 1.5]), 1, "label 1.5 is not an integer"),
    "a decimal as a label": (
        table(label=[Decimal(0), Decimal(1), Decimal("1.5")]),
        1,
        "label 1.5 is not an",
    ),
    "NaN as a label": (
        table(label=[0.0, 1.0, float("nan")]),
        1,
        "cannot convert float NaN to integer",
    ),
    "infinity as a label": (
        table(label=[0.0, 1.0, float("inf")]),
        1,
        "cannot convert float infinity",
    ),
    "a negative label": (table(label=[0, 1, -1]), 1, "label -1 is outside 0…9"),
    "a label too high": (table(label=[0, 1, 10]), 1, "label 10 is outside 0…9"),
    "an unsigned label": (table(label=np.array([0, 1, 2**64 - 1], np.uint64)), 1, "is outside 0…9"),
    "a class as a word": (shard(("2.jpg", JPG), ("2.cls", b"cat")), 1, ".cls: invalid literal"),
    "a class as a fraction": (shard(("2.jpg", JPG), ("2.cls", b"1.0")), 1, ".cls: invalid literal"),
    "a class with a separator": (
        shard(("2.jpg", JPG), ("2.cls", b"1_0")),
        1,
        ".cls: invalid literal",
    ),
    "a class as a fraction in JSON": (
        shard(("2.jpg", JPG), ("2.label.json", b"1.7")),
        1,
        "label 1.7 is not an integer",
    ),
    "broken JSON": (
        shard(("2.jpg", JPG), ("2.label.json", b"{")),
        1,
        ".json: Expecting property name",
    ),
    "a negative class": (shard(("2.jpg", JPG), ("2.cls", b"-1")), 1, "label -1 is outside 0…9"),
    "an image without a class": (shard(("2.jpg", JPG)), 1, "no column 'label' (columns: image)"),
    "a class without an image": (shard(("2.cls", b"1")), 1, "no column 'image' (columns: label)"),
    "a phone's photo in a shard": (
        shard(("2.heic", HEIC), ("2.cls", b"1")),
        1,
        "no column 'image'",
    ),
    "a record under two names": (shard(("./2.jpg", JPG), ("2.cls", b"1")), 2, "no column '"),
}
"""Writes the data; how many of its records are quarantined, and the reason for the first one."""

ODD = [
    "a b",
    "ü",
    "#1?",
    "100%25",
    "quo'te\"",
    "new\nline",
    "-rf",
    "日本",
    "a\\b",
    "x" * 200,
    "..x",
]
WHOLE: dict[str, tuple[Make, tuple[int, ...]]] = {
    "photos as Nikon and Canon name them": (
        images("train/cat/_DSC0001.JPG", "train/dog/_MG_1.jpg"),
        (6,),
    ),
    "a class that begins with an underscore": (images(classes="_none cat dog"), (6,)),
    "a class that is a link": (linked("train/eel", "cat"), (6,)),
    "what macOS and Windows add": (
        images(("train/cat/._0.jpg", b""), ("train/cat/Thumbs.db", b"")),
        (4,),
    ),
    "a browser's suffix": (images("train/cat/x.jfif"), (5,)),
    "suffixes in capitals": (images("train/cat/x.JPEG", ("train/dog/y.PNG", PNG)), (6,)),
    "odd names": (images(*(f"train/cat/{name}.jpg" for name in ODD[:-1])), (14,)),
    "pixels of 16 bits": (images(("train/cat/x.png", of(FLAT.astype(np.uint16), "PNG"))), (5,)),
    "images without channels": (table(image=tensors(np.ones((3, 30, 40), np.uint8))), (3,)),
    "a detour in the address": (and_then(images(), lambda root: f"{root}/train//../"), (4,)),
    "the archive beside its contents": (images("flowers.tar", "flowers.tar.gz"), (4,)),
    "a label in the folder's name": (table("train/label=0/a.parquet", label=None), (3,)),
    "numbers in place of a sign": (both(table("train.parquet"), table("train2.parquet")), (6,)),
    "validation and test": (images(splits="train val test"), (4, 4)),
    "validation and test as Hugging Face names them": (
        both(
            *(
                table(f"data/{split}-00000-of-00001.parquet")
                for split in ("train", "validation", "test")
            )
        ),
        (3, 3),
    ),
    "test for want of validation": (both(table(), table("test-0.parquet")), (3, 3)),
}
"""Writes the data; how many records each split has: none is missing, and none comes from elsewhere."""


def made(make: Make, root: Path, classes: int | None = 10) -> driver.Opened:
    root.mkdir()
    return opened(make(root) or root, num_classes=classes)


@pytest.mark.parametrize("case", [*REFUSED, *FROM_LABELS])
def test_data_is_refused_in_one_line_before_training(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected = REFUSED.get(case) or FROM_LABELS[case]
    with pytest.raises(UsageError) as refused:
        made(make, tmp_path / "data", 10 if case in REFUSED else None)
    assert bootstrap._refused(refused.value) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line


@pytest.mark.parametrize("case", UNUSABLE)
def test_records_of_which_none_can_be_used_are_quarantined_with_the_reason(
    case: str, tmp_path: Path
) -> None:
    make, reason = UNUSABLE[case]
    _, data = made(make, tmp_path / "data")
    for columns, report in preprocessed(data, "train"):
        assert not columns and len(report.bad) == report.records
        assert all(reason in bad.reason for bad in report.bad)


@pytest.mark.parametrize("case", [*QUARANTINED, *WHOLE])
def test_every_record_is_used_as_it_is_or_quarantined(case: str, tmp_path: Path) -> None:
    make, count, reason = QUARANTINED.get(case) or (WHOLE[case][0], 0, "")
    _, data = made(make, tmp_path / "data")
    rows, bad = {}, []
    for split in data.sources:
        rows[split] = 0
        for columns, report in preprocessed(data, split):
            rows[split] += report.rows
            bad += report.bad
            for name, values in columns.items():
                assert name.partition("__")[0] != "image" or values.dtype == np.uint8
        assert data.totals[split] == rows[split] + len(bad)
    assert len(bad) == count
    assert count == 0 or reason in bad[0].reason
    assert case not in WHOLE or tuple(rows.values()) == WHOLE[case][1]


def test_a_folder_that_may_not_be_listed_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        root = Path(folder)
        root.chmod(0o755)
        images()(root)
        list_files(folder)  # imports what it needs
        (root / "train/dog").chmod(0)
        root_user = os.geteuid() == 0
        try:
            if root_user:
                os.seteuid(65534)
            with pytest.raises(
                UsageError, match="train/dog: cannot be listed: Permission denied; check its"
            ):
                list_files(folder)
        finally:
            if root_user:
                os.seteuid(0)
            (root / "train/dog").chmod(0o755)
