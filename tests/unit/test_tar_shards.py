"""Tar shards: records, labels, and archives that are damaged or ambiguous."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from damage import checked, keys, opened, preprocessed, read_all, records, tar_of
from PIL import Image
from spoilt import encoded

from stoker.data import read_any, read_webdataset
from stoker.errors import UsageError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def pairs(first: int, count: int, folder: str = "") -> list[tuple[str, bytes]]:
    return [
        (f"{folder}{i:04d}.{suffix}", content)
        for i in range(first, first + count)
        for suffix, content in (("jpg", b"x" * 700), ("cls", str(i).encode()))
    ]


def read(folder: Path, content: bytes) -> list[Any]:
    (folder / "train-0.tar").write_bytes(content)
    return records(folder)


def stream(folder: Path, content: bytes) -> list[Any]:
    """As from S3, where nothing is walked before training: the chain task alone meets what is wrong."""
    (folder / "train-0.tar").write_bytes(content)
    source = read_webdataset(str(folder), "train")
    assert source is not None
    return [record for shard in source.shards(100, None) for record in source.read(shard, None)]


READERS = {"checked before training": read, "in the chain task": stream}
BOTH = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)


@BOTH
@pytest.mark.parametrize("form", FORMATS)
def test_whole_shards_give_every_record(reader: Any, form: str, tmp_path: Path) -> None:
    folder = (
        "d" * 90 + "/" + "e" * 60 + "/" if form == "ustar" else "é" * 70 + "/" + "f" * 130 + "/"
    )
    found = reader(tmp_path, tar_of(pairs(0, 5, folder), FORMATS[form]))
    assert keys(found) == [f"train-0.tar:{folder}{i:04d}" for i in range(5)]
    assert [record["label"] for record in found] == list(range(5))
    assert {record["image"] for record in found} == {b"x" * 700}


@BOTH
@pytest.mark.parametrize("form", ["ustar", "gnu", "posix", "oldgnu", "v7"])
def test_shards_that_tar_itself_wrote_give_every_record(
    reader: Any, form: str, tmp_path: Path
) -> None:
    folder = tmp_path / "files" / ("n" * 60)
    if form in ("gnu", "posix", "oldgnu"):
        folder /= "m" * 120
    folder.mkdir(parents=True)
    for name, content in pairs(0, 5):
        (folder / name).write_bytes(content)
    words = ["tar", f"--format={form}", "-cf", "shard.tar", "--sort=name", "files"]
    subprocess.run(words, cwd=tmp_path, check=True)
    data = tmp_path / "data"
    data.mkdir()
    found = reader(data, (tmp_path / "shard.tar").read_bytes())
    assert [record["label"] for record in found] == list(range(5))
    assert keys(found)[0] == f"train-0.tar:{folder.relative_to(tmp_path)}/0000"


def test_a_shard_is_no_command() -> None:
    with pytest.raises(UsageError, match="run commands and are refused"):
        read_webdataset("pipe:curl x", "train")


@BOTH
def test_one_flipped_bit_in_a_header_is_an_error_with_file_and_byte(
    reader: Any, tmp_path: Path
) -> None:
    content = bytearray(tar_of(pairs(0, 100)))
    header = 40 * (512 + 1024 + 512 + 512)
    content[header + 3] ^= 1
    says = f"train-0.tar: damaged tar shard, byte {header}: bad checksum"
    with pytest.raises(UsageError, match=says):
        reader(tmp_path, bytes(content))


@BOTH
def test_joined_archives_are_refused_not_half_read(reader: Any, tmp_path: Path) -> None:
    first, second = tar_of(pairs(0, 10)), tar_of(pairs(10, 10))
    says = rf"ends at byte 25600, but more follows at byte {len(first)}:.*cat"
    with pytest.raises(UsageError, match=says):
        reader(tmp_path, first + second)


ENDS: dict[str, Any] = {
    "cut in a header": lambda whole: whole[: 40 * 2560 + 100],
    "cut between members": lambda whole: whole[: 40 * 2560],
    "one zero block": lambda whole: whole[: 100 * 2560 + 512],
    "zeros for members": lambda whole: whole[: 40 * 2560].ljust(len(whole), b"\0"),
}


@BOTH
@pytest.mark.parametrize("end", ENDS)
def test_an_end_that_is_none_is_an_error(reader: Any, end: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train-0\.tar: .*(copy or write it again|cut short)"):
        reader(tmp_path, ENDS[end](tar_of(pairs(0, 100))))


@BOTH
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_other_kinds_are_refused_by_name(
    reader: Any, kind: bytes, tmp_path: Path
) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        member = tarfile.TarInfo("0001.jpg")
        member.type, member.linkname = kind, "0000.jpg"
        tar.addfile(member)
    with pytest.raises(UsageError, match=r"0001\.jpg \(byte 512\) is .*regular files only"):
        reader(tmp_path, content.getvalue())


@pytest.mark.skipif(not shutil.which("truncate"), reason="needs coreutils")
@BOTH
@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_members_are_refused(reader: Any, form: str, tmp_path: Path) -> None:
    subprocess.run(["truncate", "-s", "1M", "0001.jpg"], cwd=tmp_path, check=True)
    command = ["tar", f"--format={form}", "--sparse", "-cf", "shard.tar", "0001.jpg"]
    subprocess.run(command, cwd=tmp_path, check=True)
    with pytest.raises(UsageError, match="is a sparse file"):
        reader(tmp_path, (tmp_path / "shard.tar").read_bytes())


TWICE = {
    "0.jpg 0.png": r"0\.jpg and 0\.png both give the column image",
    "0.cls 0.index": r"0\.cls and 0\.index both give the column label",
    "0.txt 0.text": r"0\.txt and 0\.text both give the column text",
    "0.jpg 0.JPG": r"0\.jpg and 0\.JPG both",
    "0.jpg 0.image.png": r"0\.jpg and 0\.image\.png both",
    "0.jpg 0.jpg": r"0\.jpg and 0\.jpg both",
    "0.jpg 2.jpg 0.cls": r"0 are not adjacent .*at 0\.cls",
    "0.key": r"0\.key gives no column: name it 0\.<column>\.<suffix>",
    "0.jpg README": "README gives no column",
}


@BOTH
@pytest.mark.parametrize("names", TWICE)
def test_names_that_give_no_single_record_are_refused_with_the_way_out(
    reader: Any, names: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=TWICE[names]) as refused:
        reader(tmp_path, tar_of((name, b"1") for name in names.split()))
    if "both" in TWICE[names]:
        assert "0.mask.png gives the column mask" in str(refused.value)


def test_a_member_may_name_its_column(tmp_path: Path) -> None:
    members = {
        "a/1.jpg": b"photo",
        "a/1.mask.png": b"mask",
        "a/1.left.cls": b"4",
        "a/1.cls": b"3",
        "a/1.Caption.txt": "dé".encode("utf-8-sig"),
        "a/1.box.json": b"[1, 2]",
        "a/1.depth.npy": b"raw",
        "a/1.wav": b"sound",
        "a/._1.jpg": b"what macOS adds",
    }
    [record] = read(tmp_path, tar_of(members.items()))
    assert record == {
        "key": "train-0.tar:a/1",
        "image": b"photo",
        "mask": b"mask",
        "left": 4,
        "label": 3,
        "caption": "dé",
        "box": [1, 2],
        "depth": b"raw",
        "wav": b"sound",
    }


def test_a_column_that_no_record_has_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(tar_of([]))
    rare = [("9.jpg", b"x"), ("9.mask.png", b"y")]
    (tmp_path / "train-1.tar").write_bytes(tar_of([*pairs(0, 6), *rare]))
    for columns in (["key", "label"], ["image", "mask"]):
        checked(read_webdataset(str(tmp_path), "train", columns))
    says = r"columns: no record has 'lable'; they have: image, label, mask$"
    with pytest.raises(UsageError, match=says):
        checked(read_webdataset(str(tmp_path), "train", ["image", "lable"]))
    # A recipe may list columns that its chain makes.
    checked(read_any(str(tmp_path), "train", ["image", "made"]))


Members = list[tuple[str, bytes]]
CLASSES = ("cat", "dog", "eel")


def jpg(number: int) -> bytes:
    """Grey, of which the number can be told again."""
    return encoded("JPEG", Image.new("RGB", (16, 16), (10 * number + 20,) * 3), quality=95)


def write(folder: Path, *shards: Members, split: str = "train") -> None:
    for number, members in enumerate(shards):
        (folder / f"{split}-{number}.tar").write_bytes(tar_of(members))


def shard(suffix: str, value: Any) -> Members:
    members = [[(f"{i}.jpg", jpg(i)), (f"{i}.{suffix}", value(i))] for i in range(6)]
    return [*itertools.chain(*members)]


def trained(folder: Path, split: str = "train", **params: Any) -> list[tuple[int, int]]:
    _, data = opened(folder, **params)
    found: list[tuple[int, int]] = []
    for columns, report in preprocessed(data, split):
        assert not report.bad, report.bad
        numbers = (columns["image__hwc"].mean((1, 2, 3)) - 20) / 10
        found += zip(numbers.round().astype(int).tolist(), columns["label"].tolist(), strict=True)
    return sorted(found)


def number(i: int) -> bytes:
    return b"%d" % (i % 3)


def text(i: int) -> bytes:
    return CLASSES[i % 3].encode()


FORMS: dict[str, tuple[str, Any, str]] = {
    "cls": ("cls", number, "label"),
    "class": ("class", lambda i: b"%d\n" % (i % 3), "label"),
    "label": ("label", number, "label"),
    "index": ("index", number, "label"),
    "inx": ("inx", number, "label"),
    "a number in JSON": ("json", lambda i: b'{"id": 7, "nr": %d}' % (i % 3), "json.nr"),
    "a fraction of 0": ("json", lambda i: json.dumps({"x.y": float(i % 3)}).encode(), "json.x.y"),
    "a name in JSON": ("json", lambda i: json.dumps({"c": CLASSES[i % 3]}).encode(), "json.c"),
    "named JSON": ("label.json", number, "label"),
    "a name in named JSON": ("a.json", lambda i: json.dumps(CLASSES[i % 3]).encode(), "a"),
    "a number in text": ("txt", number, "text"),
    "a name in text": ("txt", lambda i: text(i) + b"\n", "text"),
    "a name in named text": ("breed.txt", text, "breed"),
    "a name in an id": ("id", text, "id"),
}


@pytest.mark.parametrize("given", [{}, {"num_classes": 3}])
@pytest.mark.parametrize("case", FORMS)
def test_a_label_is_read_from_the_member_that_is_named(
    case: str, given: Any, tmp_path: Path
) -> None:
    suffix, value, column = FORMS[case]
    members = shard(suffix, value)
    write(tmp_path, members[:6], members[6:])
    write(tmp_path, members, split="val")
    for split in ("train", "val"):
        labels = trained(tmp_path, split, label_column=column, **given)
        assert labels == [(i, i % 3) for i in range(6)]
    assert opened(tmp_path, label_column=column)[0].params["num_classes"] == 3
    source = checked(read_webdataset(str(tmp_path), "train", ["image", "label"], label=column))
    first = read_all(source)[0]
    assert [*first] == ["key", "image", "label"]
    types = {int: "int64", str: "string", float: "double"}
    assert str(source.column_types()["label"]) == types[type(first["label"])]


@pytest.mark.parametrize("root", ["", "./", "train/", "data/train/"])
def test_class_folders_give_the_labels_in_the_order_of_their_names(
    root: str, tmp_path: Path
) -> None:
    members = [(f"{root}{CLASSES[int(name[0]) % 3]}/{name}", c) for name, c in shard("txt", text)]
    write(tmp_path, members[:8], members[8:])
    write(tmp_path, members[2:4], split="val")
    folder = {"label_column": "folder"}
    assert trained(tmp_path, **folder) == [(i, i % 3) for i in range(6)]
    assert trained(tmp_path, "val", **folder) == [(1, 1)]
    (tmp_path / "train-1.tar").rename(tmp_path / "train-2024-01-01T10:00:00.tar")
    assert trained(tmp_path, **folder) == [(i, i % 3) for i in range(6)]


@BOTH
@pytest.mark.parametrize("label", ["json.label", "folder", "text"])
def test_a_record_without_the_declared_label_is_quarantined(
    reader: Any, label: str, tmp_path: Path
) -> None:
    whole = [("cat/0.json", b'{"label": "cat"}'), ("cat/0.txt", b"cat"), ("cat/0.cls", b"7")]
    bare = [("1.json", b'{"label": null}'), ("1.cls", b"7"), ("2.json", b"[]"), ("3.cls", b"7")]
    reader(tmp_path, tar_of([*whole, *bare]))
    source = read_webdataset(str(tmp_path), "train", label=label)
    [shard] = source.shards(10, None)
    first, *others = source.for_workers().read(shard, None)
    assert first["label"] == "cat"
    assert [record.reason for record in others] == [f"has no {label}"] * 3


def folders(*names: str) -> Members:
    return [(name.format(i), jpg(i)) for i in range(3) for name in names]


def json_of(value: Any) -> Members:
    return shard("json", lambda i: json.dumps(value(i)).encode())


NUMBERS, TRACK = shard("cls", lambda i: b"1"), "{} Track 2.0 (Clean)"
REFUSED: dict[str, tuple[Members, str, str]] = {
    "no label": (
        folders("cat/{}.jpg"),
        "label",
        "has no column label; it has image (binary): set params.label_column",
    ),
    "captions": (shard("txt", lambda i: b"photo"), "label", "has no column label; it has image"),
    "ids": (shard("id", lambda i: b"%d" % i), "label", "id ("),
    "cls2": (shard("cls2", lambda i: b"%d" % (i % 2)), "label", "cls2 ("),
    "no JSON": (NUMBERS, "json.label", "has no column json.label"),
    "no folders": (NUMBERS, "folder", "folder holds no label: no record"),
    "no such field": (
        json_of(lambda i: {"width": 3}),
        "json.label",
        "json.label holds no label: 0.json: has no json.label",
    ),
    "lists": (json_of(lambda i: {"a": ["cat"]}), "json.a", "no label: a record has ['cat']"),
    "names in cls": (shard("cls", text), "label", "label holds no label: 0.cls: invalid literal"),
    "one-hot": (shard("cls", lambda i: b"[0. 1.]"), "label", "holds no label: 0.cls: invalid"),
    "fractions": (shard("cls", lambda i: b"%d.0" % (i % 2)), "label", "label holds no label"),
    "text and numbers": (
        json_of(lambda i: {"a": 7 if i == 5 else "cat"}),
        "json.a",
        "json.a holds both text and numbers",
    ),
    "one class": (folders("cat/{}.jpg"), "folder", "holds one class only"),
    "a dot in every name": (
        folders(f"{TRACK}.jpg", f"{TRACK}.cls"),
        "label",
        "the dot in 0 Track 2.0 (clean) ends the name of record 0 Track 2; rename it without dots",
    ),
    "a dot before a word": (
        folders("{}.final.jpg", "{}.final.cls"),
        "label",
        "or rename them without dots, because the dot in 0.final ends the name of record 0",
    ),
    "a dot before a number": (
        folders("cat/v1.{}.jpg"),
        "folder",
        "it has 0 (binary), 1 (binary), 2 (binary), folder (string): set params.image_column",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shards_without_the_declared_label_are_refused_with_what_to_write(
    case: str, tmp_path: Path
) -> None:
    members, column, expected = REFUSED[case]
    write(tmp_path, members)
    with pytest.raises(UsageError) as refused:
        opened(tmp_path, label_column=column)
    assert expected in str(refused.value)


def test_labels_of_two_kinds_in_two_splits_are_refused(tmp_path: Path) -> None:
    write(tmp_path, shard("label.json", lambda i: json.dumps(CLASSES[i % 3]).encode()))
    write(tmp_path, shard("cls", number), split="val")
    with pytest.raises(UsageError, match="column label is text in train and int64 in val"):
        opened(tmp_path)


@pytest.mark.parametrize("given", [{}, {"num_classes": 3}])
def test_text_in_shards_that_are_not_read_before_training_needs_the_classes(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.read.webdataset.WALK_LIMIT_BYTES", 0)
    write(tmp_path, [(f"{CLASSES[i % 3]}/{i}.jpg", jpg(i)) for i in range(6)])
    params = {"label_column": "folder", **given}
    if given:
        _, data = opened(tmp_path, **params)
        [(_, report)] = preprocessed(data)
        assert len(report.bad) == 6 and "label 'cat' is not an integer" in report.bad[0].reason
    else:
        with pytest.raises(UsageError, match=r"params.num_classes: is required"):
            opened(tmp_path, **params)
    assert trained(tmp_path, class_names=list(CLASSES), **params) == [(i, i % 3) for i in range(6)]
    write(tmp_path, shard("cls", number))
    if given:
        assert trained(tmp_path, **given) == [(i, i % 3) for i in range(6)]


def test_columns_may_have_names_of_their_own(tmp_path: Path) -> None:
    names = [
        (f"s{i}.{rest}", i) for i in range(6) for rest in ("input.jpg", "target.cls", "meta.id")
    ]
    write(tmp_path, [(n, jpg(i) if n.endswith("jpg") else b"%d" % (i % 3)) for n, i in names])
    columns = {"image_column": "input", "label_column": "target"}
    assert trained(tmp_path, **columns) == [(i, i % 3) for i in range(6)]
    _, data = opened(tmp_path, **columns)
    assert data.notes() == [f"{tmp_path}/: members that are not read: meta"]


def test_the_same_names_in_two_shards_are_two_records(tmp_path: Path) -> None:
    write(tmp_path, *(shard("cls", number) for _ in range(2)))
    assert trained(tmp_path) == sorted(2 * [(i, i % 3) for i in range(6)])


@BOTH
@pytest.mark.parametrize("form", ["ustar", "gnu"])
def test_a_name_that_is_not_utf_8_is_refused_with_its_shard(
    reader: Any, form: str, tmp_path: Path
) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=FORMATS[form], encoding="latin-1") as tar:
        for name in ("café.jpg", "café.cls"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(
        UsageError, match=r"train-0.tar: the name b'caf\\xe9.jpg' is not UTF-8; write the"
    ):
        reader(tmp_path, content.getvalue())
