"""Tar shards are read to their end: damage, joined archives and ambiguous names are refused."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from damage import keys, records, tar_of

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


BOTH = pytest.mark.parametrize("reader", [read, stream], ids=["checked before training", "in the chain task"])


@BOTH
@pytest.mark.parametrize("form", FORMATS)
def test_whole_shards_give_every_record(reader: Any, form: str, tmp_path: Path) -> None:
    folder = "d" * 90 + "/" + "e" * 60 + "/" if form == "ustar" else "é" * 70 + "/" + "f" * 130 + "/"
    found = reader(tmp_path, tar_of(pairs(0, 5, folder), FORMATS[form]))
    assert keys(found) == [f"train-0.tar:{folder}{i:04d}" for i in range(5)]
    assert [record["label"] for record in found] == list(range(5))
    assert {record["image"] for record in found} == {b"x" * 700}


@BOTH
@pytest.mark.parametrize("form", ["ustar", "gnu", "posix", "oldgnu", "v7"])
def test_shards_that_tar_itself_wrote_give_every_record(reader: Any, form: str, tmp_path: Path) -> None:
    folder = tmp_path / "files" / ("n" * 60)
    if form in ("gnu", "posix", "oldgnu"):
        folder /= "m" * 120
    folder.mkdir(parents=True)
    for name, content in pairs(0, 5):
        (folder / name).write_bytes(content)
    files = sorted(str(path.relative_to(tmp_path)) for path in folder.iterdir())
    # In an incremental archive GNU tar keeps times where ustar has the beginning of a name.
    what = ["--incremental", *files] if form == "gnu" else ["--sort=name", "files"]
    subprocess.run(["tar", f"--format={form}", "-cf", "shard.tar", *what], cwd=tmp_path, check=True)
    data = tmp_path / "data"
    data.mkdir()
    found = reader(data, (tmp_path / "shard.tar").read_bytes())
    assert [record["label"] for record in found] == list(range(5))
    assert keys(found)[0] == f"train-0.tar:{folder.relative_to(tmp_path)}/0000"


@BOTH
def test_one_flipped_bit_in_a_header_is_an_error_with_file_and_byte(reader: Any, tmp_path: Path) -> None:
    content = bytearray(tar_of(pairs(0, 100)))
    header = 40 * (512 + 1024 + 512 + 512)
    content[header + 3] ^= 1
    with pytest.raises(UsageError, match=rf"train-0.tar: damaged tar shard, byte {header}: bad checksum"):
        reader(tmp_path, bytes(content))


@BOTH
def test_joined_archives_are_refused_not_half_read(reader: Any, tmp_path: Path) -> None:
    first, second = tar_of(pairs(0, 10)), tar_of(pairs(10, 10))
    with pytest.raises(UsageError, match=rf"ends at byte 25600, but more follows at byte {len(first)}:.*cat"):
        reader(tmp_path, first + second)


@BOTH
@pytest.mark.parametrize(
    "end", ["cut in a header", "cut between members", "one zero block", "zeros for members"]
)
def test_an_end_that_is_none_is_an_error(reader: Any, end: str, tmp_path: Path) -> None:
    whole = tar_of(pairs(0, 100))
    content = {
        "cut in a header": whole[: 40 * 2560 + 100],
        "cut between members": whole[: 40 * 2560],
        "one zero block": whole[: 100 * 2560 + 512],
        "zeros for members": whole[: 40 * 2560] + bytes(len(whole) - 40 * 2560),
    }[end]
    with pytest.raises(UsageError, match=r"train-0\.tar: .*(copy or write it again|cut short)"):
        reader(tmp_path, content)


@BOTH
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_other_kinds_are_refused_by_name(reader: Any, kind: bytes, tmp_path: Path) -> None:
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
    "two images": (["0001.jpg", "0001.png"], r"0001\.jpg and 0001\.png both give the column image"),
    "two labels": (["0001.cls", "0001.index"], r"0001\.cls and 0001\.index both give the column label"),
    "two texts": (["0001.txt", "0001.text"], r"0001\.txt and 0001\.text both give the column text"),
    "in capitals": (["0001.jpg", "0001.JPG"], r"0001\.jpg and 0001\.JPG both"),
    "by its name": (["0001.jpg", "0001.image.png"], r"0001\.jpg and 0001\.image\.png both"),
    "the same name": (["0001.jpg", "0001.jpg"], r"0001\.jpg and 0001\.jpg both"),
    "not adjacent": (["0001.jpg", "0002.jpg", "0001.cls"], r"0001 are not adjacent .*at 0001\.cls"),
    "the record's key": (["0001.key"], r"0001\.key gives no column: name it 0001\.<column>\.<suffix>"),
    "no suffix": (["0001.jpg", "README"], "README gives no column"),
}


@BOTH
@pytest.mark.parametrize("case", TWICE)
def test_names_that_give_no_single_record_are_refused_with_the_way_out(
    reader: Any, case: str, tmp_path: Path
) -> None:
    names, expected = TWICE[case]
    with pytest.raises(UsageError, match=expected) as refused:
        reader(tmp_path, tar_of((name, b"1") for name in names))
    if "both" in expected:
        assert "0001.mask.png gives the column mask" in str(refused.value)


def test_a_member_may_name_its_column(tmp_path: Path) -> None:
    members = {
        "a/1.jpg": b"photo",
        "a/1.mask.png": b"mask",
        "a/1.left.cls": b"4",
        "a/1.cls": b"3",
        "a/1.Caption.txt": "dé".encode(),
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
        found = read_webdataset(str(tmp_path), "train", columns)
        assert found is not None
        found.check()
    wrong = read_webdataset(str(tmp_path), "train", ["image", "lable"])
    assert wrong is not None
    with pytest.raises(UsageError, match=r"columns: no record has 'lable'; they have: image, label, mask$"):
        wrong.check()
    # A recipe may list columns that its chain makes.
    derived = read_any(str(tmp_path), "train", ["image", "made"])
    assert derived is not None
    derived.check()
