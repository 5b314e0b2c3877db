"""What becomes of each way of getting the data wrong, and of damaged files: refused, or quarantined and counted.

Never does a run go on with other records than the user meant. `STOKER_FUZZ=20000` raises the number of
damages per format, `STOKER_FUZZ_SEED` changes them.
"""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import tarfile
import tempfile
import wave
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damage import (
    DAMAGES,
    SEED,
    Damage,
    Opened,
    chained,
    checked,
    damages,
    keys,
    opened,
    preprocessed,
    records,
    tar_of,
)
from PIL import Image
from pyarrow import parquet
from spoilt import (
    FLAT,
    HEIC,
    JPG,
    PNG,
    Make,
    and_then,
    at,
    bomb,
    both,
    column_twice,
    cut,
    encoded,
    flipped,
    images,
    latin,
    linked,
    of,
    one,
    shard,
    table,
    tensors,
    written,
)

from recipes.audio import RATE, Spectrogram
from stoker.data import BadRecord, DecodeImage, read_images
from stoker.errors import ChainError, UsageError
from stoker.storage.filesystems import list_files

UP = both(linked("train/cat/up", ".."), linked("train/dog/up", ".."))
ANOTHER_FORM = images("val/cafe\u0301/0.jpg", classes="caf\u00e9 dog")
NO_ROWS = table(image=pa.array([], pa.binary()), label=pa.array([], pa.int64()))
QUOTED = and_then(images(splits="a b/train"), lambda root: f"file://{root}/a%20b")
REFUSED: dict[str, tuple[Make, str]] = {
    "a link that leads nowhere": (linked("train/cat/x.jpg", "/no"), "x.jpg: is a link to /no"),
    "a link to itself": (linked("train/cat/x.jpg", "x.jpg"), "to x.jpg, which is not there"),
    "a class that leads nowhere": (linked("train/eel", "/no"), "train/eel: is a link to /no"),
    "a split that leads nowhere": (linked("val", "/no"), "val: is a link to /no"),
    "a link to a folder above": (linked("train/cat/up", ".."), "is a link to a folder above it"),
    "two links to folders above": (UP, "up: is a link to a folder above it; remove it"),
    "a file name in Latin-1": (latin(b"train/cat/\xe4.jpg"), r"the name b'\xe4.jpg' is not UTF-8"),
    "a class in Latin-1": (latin(b"train/\xe4/"), r"the name b'\xe4' is not UTF-8; rename it"),
    "a class of a phone's photos": (images("train/eel/x.heic"), "of the kind .jpg or .png (first"),
    "two training folders": (images(splits="train training"), "both name the train split"),
    "two validation folders": (images(splits="train val valid"), "val and valid both name the val"),
    "training in capitals": (images(splits="Training Testing"), "has no folder train/ (found: T"),
    "empty validation": (both(images(), written("val/")), "val: the folder holds no"),
    "validation of another format": (images("val/x.csv"), "neither images nor .parquet nor .tar"),
    "a class of validation only": (images("val/eel/0.jpg"), "training split has no class folder e"),
    "a class in capitals": (images("val/Cat/0.jpg"), "no class folder Cat (it has cat, dog)"),
    "a class in another Unicode form": (ANOTHER_FORM, "split has no class folder cafe"),
    "one class": (images(classes="cat"), "holds one class only (cat)"),
    "a photo outside the classes": (images("train/x.jpg"), "x.jpg lies outside any class folder"),
    "no split": (images(splits="."), "(found: cat, dog); split it into train/ and val/"),
    "a folder too high": (images(splits="flowers/train"), "has no folder train/ (found: flowers)"),
    "a folder too deep": (at("train", images()), "(found: cat, dog)"),
    "a class named train": (images(splits=".", classes="train bus"), "outside any class folder"),
    "shards among images": (images("train/a.tar"), "split mixes formats (a.tar and 0.jpg)"),
    "shards among tables": (both(table(), shard(name="train-1.tar")), "formats (train-1.tar and"),
    "a zip file": (at("x.zip", written("x.zip", b"PK")), "neither images nor"),
    "a table in CSV": (written("train.csv", b"image,label\n"), "neither images nor .parquet nor"),
    "one photo": (at("x.jpg", written("x.jpg", JPG)), "x.jpg: has no folder train/"),
    "an absent folder": (at("there", images()), "there: no such file or folder"),
    "an empty folder": (lambda root: None, "the folder holds no file"),
    "an address with %20": (QUOTED, "a%20b: no such file or folder"),
    "an address on the web": (lambda root: "https://host/a", "cannot read https:// addresses"),
    "an address with one slash": (lambda root: "s3:/bucket/a", "s3:/bucket/a: no such file"),
    "a truncated table": (table(change=cut), "train-0.parquet: not a whole Parquet file"),
    "a table that is CSV": (written("train-0.parquet", b"a,b\n"), "not a whole Parquet file"),
    "an empty table": (written("train-0.parquet"), "train-0.parquet: not a whole Parquet file"),
    "a table without rows": (NO_ROWS, "hold no row"),
    "validation without labels": (
        both(table(), table("val-0.parquet", label=None)),
        "has no column label; it has image",
    ),
    "a column twice": (column_twice, "has the column label twice; rename or remove one"),
    "a NULL label": (table(label=[0, None, 2]), "column label holds 1 NULL in 3 rows"),
    "images elsewhere": (table(image=[{"bytes": None, "path": "a"}] * 3), "image holds 3 NULLs"),
    "two prefixes": (both(table(), table("training-0.parquet")), "both name the train"),
    "no prefix": (table("part-0.parquet"), "no train split: expected a folder train/ or files"),
    "a truncated shard": (shard(change=cut), "train-0.tar: not a whole tar shard"),
    "an empty shard": (written("train-0.tar"), "train-0.tar: the tar shard is empty (0 bytes)"),
    "a shard without records": (written("train-0.tar", tar_of([])), "tar shards hold no records"),
    "a compressed shard": (shard(change=gzip.compress), "train-0.tar: not a whole tar shard"),
}

FROM_LABELS: dict[str, tuple[Make, str]] = {
    "fractions": (table(label=[0.0, 1.0, 1.5]), "label holds 1.5; labels must be integers"),
    "not a number": (table(label=[0.0, 1.0, float("nan")]), "labels must be integers or text"),
    "bytes": (table(label=[b"a", b"b", b"a"]), "column label is binary; labels must be integers"),
    "nothing but blanks": (table(label=["a", "b", " "]), "labels must be integers or text"),
    "dates": (table(label=[date(2020, 1, 1)] * 3), "labels must be integers"),
    "lists": (table(label=[[0], [1], [2]]), "column label is list<element: int64>; labels must be"),
    "ids": (table(label=[0, 1, 2**40]), "label holds 1099511627776; number the classes 0, 1, "),
    "one class": (table(label=[0, 0, 0]), "holds one class only"),
    "no classes": (NO_ROWS, "one class"),
}
"""As REFUSED, where the number of classes is taken from the data."""

UNUSABLE: dict[str, tuple[Make, str]] = {
    "a date as a label": (table(label=[date(2020, 1, 1)] * 3), "not 'datetime.date'"),
    "labels one-hot": (table(label=[[0, 1], [1, 0], [0, 1]]), "only 0-dimensional arrays"),
    "paths for images": (table(image=["a.jpg"] * 3), "image is text, neither an encoded image nor"),
    "base64 in text": (table(image=[b64encode(JPG).decode()] * 3), "column image is text"),
    "base64": (table(image=[b64encode(JPG)] * 3), "not an image (first bytes b'/9j/4AAQ')"),
    "raw bytes": (table(image=[bytes(3600)] * 3), "not an image"),
    "lists": (table(image=pa.array([[1, 2, 3]] * 3, pa.list_(pa.uint8()))), "the shape (3,)"),
    **{
        f"images of {kind}": (table(image=tensors(np.ones((3, 30, 40, 3), kind))), f"is {kind}")
        for kind in ("float32", "uint16", "int64")
    },
}

NOT_ONE = [0.0, 1.0, 1.5]
NAN, INF = float("nan"), float("inf")
CHECKSUM = "the checksum of the PNG's b'IDAT' part is wrong"
TIFF = encoded("TIFF", compression="tiff_adobe_deflate")


def member(suffix: str, content: bytes) -> Make:
    """A third record whose label is this."""
    return shard(("2.jpg", JPG), (f"2.{suffix}", content))


QUARANTINED: dict[str, tuple[Make, str] | tuple[Make, str, str]] = {
    "an empty photo": (one(b""), "the image is empty (0 bytes)"),
    "a page of a web server": (one(b"<html>404"), "not an image (first bytes b'<html>40')"),
    "a phone's photo with another name": (one(HEIC), "not an image"),
    "a document": (one(b"%PDF-1.7"), "not an image"),
    "a JPEG that is cut": (one(cut(JPG)), "cannot be decoded: Premature end of JPEG file"),
    "a JPEG without its size": (one(JPG[: JPG.index(b"\xff\xc0") + 8]), "cannot be decoded"),
    "a JPEG that is half zeros": (one(cut(JPG) + bytes(len(JPG) // 2)), "Premature end of JPEG"),
    "a JPEG with a hole": (one(JPG[:700] + bytes(200) + JPG[900:]), "Corrupt JPEG data"),
    # Pillow would give an image: the decoder takes some of these bytes for its last bits.
    "a JPEG with more": (one(JPG[:-2] + bytes(40) + JPG[-2:]), "Corrupt JPEG data: "),
    "a PNG that is cut": (one(cut(PNG)), "the PNG is truncated"),
    "a PNG with a wrong byte": (one(flipped(PNG, 900)), CHECKSUM),
    "a PNG as large as a wall": (one(bomb()), "more than data.max_pixels allows"),
    "a GIF that is cut": (one(encoded("GIF")[:600]), "not an image"),
    "a WebP that is cut": (one(cut(encoded("WEBP"))), "cannot be decoded"),
    "a BMP that is cut": (one(cut(encoded("BMP"))), "image file is truncated"),
    "a TIFF that is cut": (one(cut(encoded("TIFF"))), "image file is truncated"),
    "a TIFF with a wrong byte": (one(flipped(TIFF, 600)), "cannot be decoded: decoder error"),
    "pixels of 0 to 1": (one(of((FLAT / 4).astype(np.float32))), "1 × 32 bits in another form"),
    "pixels of 32 bits": (one(of(FLAT.astype(np.int32) << 20)), "1 × 32 bits in another form"),
    "negative pixels": (one(of(-FLAT.astype(np.int32))), "1 × 32 bits in another form"),
    "a fraction": (table(label=NOT_ONE), "label 1.5 is not an integer"),
    "a decimal": (table(label=[Decimal(str(x)) for x in NOT_ONE]), "label 1.5 is not an integer"),
    "NaN as a label": (table(label=[0.0, 1.0, NAN]), "cannot convert float NaN to integer"),
    "infinity as a label": (table(label=[0.0, 1.0, INF]), "cannot convert float infinity"),
    "a negative label": (table(label=[0, 1, -1]), "label -1 is outside 0…9"),
    "a label too high": (table(label=[0, 1, 10]), "label 10 is outside 0…9"),
    "an unsigned label": (table(label=np.array([0, 1, 2**64 - 1], np.uint64)), "is outside 0…9"),
    "a class as a word": (member("cls", b"cat"), ".cls: invalid literal"),
    "a class as a fraction": (member("cls", b"1.0"), ".cls: invalid literal"),
    "a class with a separator": (member("cls", b"1_0"), ".cls: invalid literal"),
    "a fraction in JSON": (member("label.json", b"1.7"), "label 1.7 is not an integer"),
    "broken JSON": (member("label.json", b"{"), ".json: Expecting property name"),
    "a negative class": (member("cls", b"-1"), "label -1 is outside 0…9"),
    "no class": (shard(("2.jpg", JPG)), "no column 'label' (columns: image)"),
    "no image": (shard(("2.cls", b"1")), "no column 'image' (columns: label)"),
    "a phone's photo": (shard(("2.heic", HEIC), ("2.cls", b"1")), "no column 'image'"),
    "a record under two names": (
        shard(("./2.jpg", JPG), ("2.cls", b"1")),
        "no column 'label'",
        "no column 'image'",
    ),
}
"""Writes the data; the reason of each record that is quarantined."""

ODD = ["a b", "ü", "#1?", "100%25", "quo'te\"", "new\nline", "-rf", "日本", "a\\b", "x" * 200]
DEEP = of(FLAT.astype(np.uint16), "PNG")
AS_HUB = [table(f"data/{s}-00000-of-00001.parquet") for s in ("train", "validation", "test")]
WHOLE: dict[str, tuple[Make, tuple[int, ...]]] = {
    "photos as Nikon and Canon name them": (images("train/cat/_D1.JPG", "train/dog/_MG.jpg"), (6,)),
    "a class that begins with an underscore": (images(classes="_none cat dog"), (6,)),
    "a class that is a link": (linked("train/eel", "cat"), (6,)),
    "what macOS and Windows add": (images("train/cat/._0.jpg", "train/cat/Thumbs.db"), (4,)),
    "a browser's suffix": (images("train/cat/x.jfif"), (5,)),
    "suffixes in capitals": (images("train/cat/x.JPEG", ("train/dog/y.PNG", PNG)), (6,)),
    "odd names": (images(*(f"train/cat/{name}.jpg" for name in ODD)), (14,)),
    "pixels of 16 bits": (images(("train/cat/x.png", DEEP)), (5,)),
    "images without channels": (table(image=tensors(np.ones((3, 30, 40), np.uint8))), (3,)),
    "a detour in the address": (at("train//../", images()), (4,)),
    "the archive beside its contents": (images("flowers.tar", "flowers.tar.gz"), (4,)),
    "a label in the folder's name": (table("train/label=0/a.parquet", label=None), (3,)),
    "numbers in place of a sign": (both(table("train.parquet"), table("train2.parquet")), (6,)),
    "validation and test": (images(splits="train val test"), (4, 4)),
    "validation and test as Hugging Face names them": (both(*AS_HUB), (3, 3)),
    "test for want of validation": (both(table(), table("test-0.parquet")), (3, 3)),
}
"""Writes the data; how many records each split has: none is missing, and none comes from elsewhere."""


def made(make: Make, root: Path, classes: int | None = 10) -> Opened:
    root.mkdir()
    return opened(make(root) or root, num_classes=classes)


@pytest.mark.parametrize("case", [*REFUSED, *(f"labels: {case}" for case in FROM_LABELS)])
def test_data_is_refused_in_one_line_before_training(case: str, tmp_path: Path) -> None:
    make, expected = REFUSED.get(case) or FROM_LABELS[case.removeprefix("labels: ")]
    with pytest.raises(UsageError) as refused:
        made(make, tmp_path / "data", 10 if case in REFUSED else None)
    [line] = refused.value.problems
    assert expected in line and "\n" not in line


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
    make, *reasons = QUARANTINED.get(case) or WHOLE[case][:1]
    _, data = made(make, tmp_path / "data")
    rows, bad = dict.fromkeys(data.sources, 0), []
    for split in data.sources:
        for columns, report in preprocessed(data, split):
            rows[split] += report.rows
            bad += report.bad
            pixels = [v for name, v in columns.items() if name.partition("__")[0] == "image"]
            assert all(values.dtype == np.uint8 for values in pixels)
        assert data.totals[split] == rows[split] + len(bad)
    assert case in QUARANTINED or tuple(rows.values()) == WHOLE[case][1]
    for record, reason in zip(bad, reasons, strict=True):
        assert reason in record.reason


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
            with pytest.raises(UsageError, match="dog: cannot be listed: Permission denied; check"):
                list_files(folder)
        finally:
            if root_user:
                os.seteuid(0)
            (root / "train/dog").chmod(0o755)


RECORDS = 24
MOST_ABORTED = 0.002
"""Share of the damages at which Arrow ends the process."""


@cache
def photo(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((64, 48))
    return encoded("JPEG", image, quality=90, progressive=seed % 2 == 1)


def whole_shard() -> bytes:
    forms = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    return tar_of(
        [
            (f"{i:04d}.{s}", c)
            for i in range(RECORDS)
            for s, c in (("jpg", photo(i % 4)), ("cls", b"%d" % i))
        ],
        forms[SEED % 3],
    )


def whole_table() -> bytes:
    content = io.BytesIO()
    columns = {
        "image": [photo(i % 4)[:200] for i in range(RECORDS)],
        "label": list(range(RECORDS)),
        "weight": [i / 7 for i in range(RECORDS)],
        "name": [f"name {i % 5}" for i in range(RECORDS)],
    }
    parquet.write_table(pa.table(columns), content, row_group_size=10, write_page_checksum=True)
    return content.getvalue()


class Ahead:
    """Another process, which reads first: Arrow ends a process at some footers, with its reason on stderr.

    pyarrow declares `RowGroupMetaData.column` and `ColumnChunkMetaData.statistics` as if they threw nothing.
    """

    def __init__(self, read: Callable[[Path], list[Any]]) -> None:
        self.read, self.pool = read, self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def survives(self, root: Path) -> bool:
        try:
            self.pool.submit(self.read, root).result()
        except BrokenProcessPool:
            self.pool = self._new()
            return False
        except Exception:  # compared with what this process gets
            return True
        return True


class Folder:
    def __init__(self, root: Path, name: str, content: bytes, others: dict[str, bytes]) -> None:
        self.root, self.path, self.content = root, root / "train" / name, content
        for other, its in {name: content, **others}.items():
            (root / "train" / other).parent.mkdir(parents=True, exist_ok=True)
            (root / "train" / other).write_bytes(its)

    def outcomes(
        self, read: Callable[[Path], list[Any]], what: str
    ) -> Iterator[tuple[str, Damage]]:
        whole, ahead = read(self.root), Ahead(read)
        for number, damage in enumerate(damages(len(self.content), what)):
            self.path.write_bytes(damage(self.content))
            if self.path.suffix == ".parquet" and not ahead.survives(self.root):
                yield "aborted", damage
                continue
            try:
                found = read(self.root)
            except (UsageError, ChainError, OSError, ValueError) as error:
                assert str(error), f"damage {number} of seed {SEED}: refused without a word"
                yield "refused", damage
                continue
            assert keys(found) == keys(whole), (
                f"seed {SEED}, {what} {number}: {damage} changes the records"
            )
            good = [
                (a, b) for a, b in zip(found, whole, strict=True) if not isinstance(a, BadRecord)
            ]
            if any(repr(a) != repr(b) for a, b in good):
                yield "wrong", damage
            else:
                yield "right" if len(good) == len(whole) else "quarantined", damage


def decoded(root: Path) -> list[Any]:
    source = checked(read_images(str(root), "train"))
    [shard] = source.shards(1000, None)
    records = source.for_workers().read(shard, None)
    columns, report = chained(records, DecodeImage(), with_keys=True)
    good = dict(zip(columns["__key"], columns["image__hwc"], strict=True))
    bad = {record.key: record for record in report.bad}
    return [bad.get(key) or {"key": key, "image": good[key].tobytes()} for key, *_ in source.files]  # type: ignore[attr-defined]


def folder(form: str, root: Path) -> tuple[Folder, Callable[[Path], list[Any]]]:
    if form == "tar":
        return Folder(root, "1.tar", whole_shard(), {"0.tar": tar_of([("x.cls", b"1")])}), records
    if form == "parquet":
        return Folder(root, "1.parquet", whole_table(), {"0.parquet": whole_table()}), records
    return Folder(
        root, f"a/{form}.jpg", photo(form == "progressive"), {"b/0.jpg": photo(2)}
    ), decoded


FORMS = pytest.mark.parametrize("form", ["tar", "parquet", "jpeg", "progressive"])


@pytest.mark.long
@FORMS
def test_what_the_format_protects_arrives_right(form: str, tmp_path: Path) -> None:
    data, read = folder(form, tmp_path)
    found: Counter[str] = Counter()
    for outcome, damage in data.outcomes(read, form):
        found[outcome] += 1
        if damage.byte is None:
            # Of a tar, zeros at its end may be missing.
            assert outcome in ("refused", "quarantined") or form == "tar", (
                f"seed {SEED}: {damage} {outcome}"
            )
        if protected(form, data.content, damage.at):
            assert outcome != "wrong", f"seed {SEED}: {damage} is {outcome}"
    assert found.total() == DAMAGES
    assert found["aborted"] <= MOST_ABORTED * DAMAGES, f"seed {SEED}: {found}"
    # Contents of JPEG and tar carry no checksum: of JPEG the decoder finds what does not fit together.
    limits = {"tar": 0.75, "parquet": 0.05, "jpeg": 0.6, "progressive": 0.5}
    assert found["wrong"] < limits[form] * DAMAGES, f"seed {SEED}: {found}"


def protected(form: str, content: bytes, at: int) -> bool:
    """Whether the format itself keeps a checksum of this byte."""
    if form == "tar":
        return any(header <= at < header + 512 for header in headers(content))
    if form == "parquet":
        return at < len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    return False


@cache
def headers(content: bytes) -> list[int]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return [member.offset for member in tar]


@pytest.mark.long
def test_a_truncated_sound_is_refused_and_a_stream_of_unknown_length_is_not() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, RATE, 0, "NONE", ""))
        sound.writeframes(bytes(4000))
    whole, stage, rng = file.getvalue(), Spectrogram(64), np.random.default_rng(0)

    def frames(content: bytes) -> int:
        return len(stage({"key": "a", "wav": content, "label": 0}, rng)["frames"])

    streamed = whole[:40] + b"\xff" * 4 + whole[44:]
    assert frames(streamed) == frames(whole) > 0
    with pytest.raises(ValueError, match="truncated: 1500 of 2000 samples"):
        frames(whole[:-1000])
    with pytest.raises(ValueError, match="truncated: 1999 of 2000 samples"):
        frames(whole[:-1])
    assert frames(streamed[:-1]) == frames(whole)
    with pytest.raises(ValueError, match="too short: 0 samples by its header, a window has 128"):
        frames(whole[:40] + bytes(4) + whole[44:])
