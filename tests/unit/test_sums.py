"""A SHA256SUMS beside the data: every file that is read is compared with it, in every format."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest
from damage import keys, records, tar_of, write_sums
from pyarrow import parquet

from stoker.data import read_any
from stoker.errors import UsageError
from stoker.messages import BadRecord


def make(root: Path, form: str) -> Path:
    """Two files (of images: classes) of the form for each split; which file of train comes last."""
    for split, names in (("train", "ab"), ("val", "ab" if form == "images" else "cd")):
        folder = root / split
        folder.mkdir(parents=True)
        for name in names:
            if form == "webdataset":
                members = [(f"{name}{i}.{s}", b"7") for i in range(20) for s in ("jpg", "cls")]
                (folder / f"{name}.tar").write_bytes(tar_of(members))
            elif form == "parquet":
                # Without page checksums: nothing else would find a changed value.
                table = pa.table({"image": [f"{name}{i}".encode() for i in range(20)], "label": [7] * 20})
                parquet.write_table(table, folder / f"{name}.parquet", use_dictionary=False)
            else:
                (folder / name).mkdir()
                for i in range(20):
                    (folder / name / f"{i}.jpg").write_bytes(f"{name}{i}".encode())
    return max(path for path in (root / "train").rglob("*.*"))


FORMS = pytest.mark.parametrize("form", ["webdataset", "parquet", "images"])


def change(path: Path) -> None:
    """One byte of the contents, where no format keeps a checksum."""
    content = bytearray(path.read_bytes())
    at = content.index(b"7", 512) if path.suffix == ".tar" else content.index(b"b") + 1
    content[at] ^= 1
    path.write_bytes(content)


@FORMS
@pytest.mark.parametrize("where", [".", "train"])
def test_whole_files_are_read_and_a_changed_byte_is_not(form: str, where: str, tmp_path: Path) -> None:
    last = make(tmp_path / "whole", form)
    write_sums(tmp_path / "whole" / where)
    shutil.copytree(tmp_path / "whole", tmp_path / "changed")
    before = records(tmp_path / "whole")
    assert len(before) == len(records(tmp_path / "whole", "val")) == 40
    change(tmp_path / "changed" / last.relative_to(tmp_path / "whole"))
    if form == "images":
        found = records(tmp_path / "changed")
        assert keys(found) == keys(before)
        [bad] = [record for record in found if isinstance(record, BadRecord)]
        assert bad.key == f"{last.parent.name}/{last.name}"
        assert "SHA-256 is not that of SHA256SUMS" in bad.reason
    else:
        with pytest.raises(UsageError, match=rf"{last.name}: damaged or changed: its SHA-256 is"):
            records(tmp_path / "changed")


def test_a_damaged_shard_fails_before_its_last_record_is_given(tmp_path: Path) -> None:
    last = make(tmp_path, "webdataset")
    write_sums(tmp_path)
    change(last)
    source = read_any(str(tmp_path), "train")
    assert source is not None
    source.check()
    given = 0
    with pytest.raises(UsageError, match="damaged or changed"):
        for _ in source.read(source.shards(100, None)[1], None):
            given += 1
    assert given < 20


@FORMS
def test_files_that_are_not_listed_or_absent_are_refused(form: str, tmp_path: Path) -> None:
    last = make(tmp_path, form)
    write_sums(tmp_path)
    moved = last.with_name("zz" + last.name)
    shutil.copy(last, moved)
    with pytest.raises(UsageError, match=rf"{moved.name}: is not in .*SHA256SUMS \(1 of "):
        records(tmp_path)
    moved.unlink()
    last.unlink()
    with pytest.raises(UsageError, match=rf"SHA256SUMS: lists .*{last.name}, which is absent"):
        records(tmp_path)


@FORMS
def test_the_command_of_the_docs_writes_what_is_obeyed(form: str, tmp_path: Path) -> None:
    root = tmp_path / "with spaces"
    make(root, form)
    docs = Path(__file__).resolve().parents[2] / "docs" / "write-a-recipe.md"
    [line] = [line for line in docs.read_text().splitlines() if "sha256sum > SHA256SUMS" in line]
    subprocess.run(["bash", "-c", line.partition("&& ")[2]], cwd=root, check=True)
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=root).returncode == 0
    assert len(records(root)) == 40


def test_names_are_unescaped_as_sha256sum_escapes_them(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "b").mkdir()
    (tmp_path / "train" / "a" / "back\\slash\nline.jpg").write_bytes(b"x")
    (tmp_path / "train" / "b" / "y.jpg").write_bytes(b"y")
    files = [str(p.relative_to(tmp_path)) for p in (tmp_path / "train").rglob("*.jpg")]
    done = subprocess.run(["sha256sum", *files], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "SHA256SUMS").write_bytes(done.stdout)
    assert not [r for r in records(tmp_path) if isinstance(r, BadRecord)]


def test_lines_that_sha256sum_does_not_write_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "webdataset")
    (tmp_path / "SHA256SUMS").write_text("SHA256 (train/a.tar) = " + "0" * 64)
    with pytest.raises(UsageError, match="line 1 is not in sha256sum format"):
        records(tmp_path)


@FORMS
def test_with_sums_the_fingerprint_is_that_of_the_content(form: str, tmp_path: Path) -> None:
    def fingerprint() -> str:
        write_sums(tmp_path)
        source = read_any(str(tmp_path), "train")
        assert source is not None
        source.check()
        return source.fingerprint()

    last = make(tmp_path, form)
    before = fingerprint()
    change(last)
    assert before != fingerprint()


def test_the_files_of_a_delta_table_are_compared_too(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    rows = pa.table({"name": [f"b{i}" for i in range(20)], "label": [7] * 20})
    deltalake.write_deltalake(str(tmp_path / "train"), rows)
    write_sums(tmp_path)
    assert len(records(tmp_path)) == 20
    [file] = (tmp_path / "train").glob("*.parquet")
    change(file)
    with pytest.raises(UsageError, match=rf"{file.name}: damaged or changed: its SHA-256 is"):
        records(tmp_path)
