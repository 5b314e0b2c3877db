"""Folders of files: every file is read, refused or named; sets of files that name their size are whole."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from clouds import WORDS
from command_line import type_command
from damage import chained, checked, records, tar_of
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from spoilt import HEIC, JPG, PHOTO, PNG, both, encoded, images, shard, table

from stoker import figures
from stoker.config.loading import load
from stoker.data import DecodeImage, read_any, read_images, read_parquet, read_webdataset
from stoker.entry.main import read_configuration
from stoker.errors import UsageError
from stoker.storage.checkpoint_store import open_store
from stoker.train.resume import locate
from stoker_launcher.job import open_job
from stoker_launcher.places import local

FORMS = {
    "JPEG": ".jfif .jpe",
    "PPM": ".ppm .pgm .pbm",
    "JPEG2000": ".jp2 .j2k",
    "PNG": ".apng",
    **{form: f".{form.lower()}" for form in ("AVIF", "TGA", "PCX", "DIB", "QOI", "MPO", "TIFF")},
    **{form: f".{form.lower()}" for form in ("WEBP", "GIF", "BMP")},
}
MODES = {".pgm": "L", ".pbm": "1", ".gif": "P"}


def decoded(root: Path, split: str = "train") -> dict[str, tuple[int, ...]]:
    columns, report = chained(records(root, split), DecodeImage(), with_keys=True)
    assert not report.bad
    shapes = [image.shape for image in columns["image__hwc"]]
    return dict(zip(columns["__key"], shapes, strict=True))


def test_what_the_decoder_reads_is_read_by_its_suffix_in_any_case(tmp_path: Path) -> None:
    files = []
    for form, suffixes in FORMS.items():
        for suffix in suffixes.split():
            options: dict[str, Any] = {"no_jp2": True} if suffix == ".j2k" else {}
            image = PHOTO.crop((0, 0, 16, 16)).convert(MODES.get(suffix, "RGB"))
            content = encoded(form, image, **options)
            names = (f"cat/0{suffix}", f"dog/0{suffix}", f"cat/1{suffix.upper()}")
            files += [(f"train/{name}", content) for name in names]
    images(*files, splits="val")(tmp_path)
    assert decoded(tmp_path) == {name.removeprefix("train/"): (16, 16, 3) for name, _ in files}


OTHERS = {
    "train/cat/photo.jpg?w=640": JPG,
    "train/cat/latest": JPG,
    "train/cat/0.jpg.bak": JPG,
    "train/cat/x.HEIC": HEIC,
    "train/cat/a.npy": b"\x93NUMPY",
    "train/dog/clip.mp4": b"\0\0\0\x18ftypmp42",
    "train/dog/page.html": b"<html>404</html>",
    "train/more.zip": b"PK",
    "train/dog/0.txt": b"a dog",
    "train/_classes.csv": b"a,b",
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_kinds_are_refused_unless_they_are_named(name: str, tmp_path: Path) -> None:
    images((name, OTHERS[name]), ("val/cat/0.xml", b""), splits="train val")(tmp_path)
    with pytest.raises(UsageError, match=r"1 file not of the kind .*ignore: \[") as refused:
        read_any(str(tmp_path), "train")
    [pattern] = re.findall(r'ignore: \["(.*)"\]', str(refused.value))
    source = read_any(tmp_path, "train", ignore=[pattern, "*.xml"])
    assert source is not None and source.count() == 4
    [note] = source.notes
    assert "1 file not read" in note and name.removeprefix("train/") in note


@pytest.mark.parametrize("suffix", ["parquet", "tar"])
def test_files_beside_tables_and_shards_are_refused_unless_they_are_named(
    suffix: str, tmp_path: Path
) -> None:
    names = [f"{name}.{suffix}" for name in ("train-0", "val-0", "extra")]
    make = table if suffix == "parquet" else lambda name: shard(name=name)
    both(*map(make, names))(tmp_path)
    (tmp_path / f"train-1.{suffix}.gz").write_bytes(b"gz")
    with pytest.raises(UsageError, match=r"1 file not of the kind .*train-1"):
        read_any(str(tmp_path), "train")
    source = checked(read_any(str(tmp_path), "train", ignore=["*.gz"]))
    assert source.count() == (3 if suffix == "parquet" else 2)
    assert any(f"extra.{suffix} not read" in note for note in source.notes)
    assert any("not read: 1 .gz" in note for note in source.notes)


BESIDE = [
    "holdout/0.jpg",
    "flowers.zip",
    "README",
    "LICENSE.txt",
    "__MACOSX/train/0.jpg",
    "@eaDir/x",
]
HIDDEN = ["train/.DS_Store", "train/cat/Thumbs.db", "train/cat/._0.jpg", "val/README.md"]


@pytest.mark.long
def test_what_is_beside_the_splits_is_named_on_the_screen_and_in_peek(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    images(*((name, b"x") for name in (*BESIDE, *HIDDEN)), splits="train val")(root)
    (root / "train/eel").mkdir()
    source = read_any(str(root), "train")
    assert source is not None and source.count() == 4
    empty, beside = source.notes
    assert "eel/ holds no image" in empty
    assert "holdout/, flowers.zip not read" in beside
    job = tmp_path / "job.yaml"
    job.write_text(f"params: {{data: {root}, image_size: 32}}\ntrain: {{batch_size: 2}}\n")
    code, _, shown = type_command(["peek", str(job), "--out", str(tmp_path / "page.html")], capsys)
    text = " ".join(shown.split())
    assert code == 0 and "no problems found" not in text, shown
    for note in source.notes:
        assert " ".join(note.split()) in text


@pytest.mark.parametrize("name", ["val", "valid", "validation", "dev", "eval", "test", "testing"])
def test_any_usual_name_of_a_split_is_validated_on(name: str, tmp_path: Path) -> None:
    images(splits=f"train {name}")(tmp_path)
    assert len(records(tmp_path, "val")) == 4
    tables = tmp_path / "tables"
    tables.mkdir()
    both(table(), table(f"{name}-0.parquet"))(tables)
    assert len(records(tables, "val")) == 3


def with_links(root: Path) -> None:
    images(splits="data/train")(root)
    (root / "far/deep").mkdir(parents=True)
    for number in range(3):
        (root / f"far/deep/{number}.png").write_bytes(PNG)
    (root / "data/train/eel").symlink_to(root / "far")
    (root / "data/train/cat/x.jpg").symlink_to(root / "data/train/dog/0.jpg")


@pytest.mark.long
@pytest.mark.parametrize("place", WORDS)
def test_what_is_uploaded_is_what_is_read_here_links_included(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        (tmp_path / "job.yaml").write_text(f"name: flowers\nparams: {{data: {tmp_path}/data}}\n")
        words = [*WORDS[place], "--on", place, "--offline", "--dry-run"]
        code, errors, shown = type_command([str(tmp_path / "job.yaml"), *words], capsys)
        data = [line for line in shown.splitlines() if line.startswith("data  ")]
        return "\n".join(errors) if code else data[0]

    with_links(tmp_path)
    assert len(records(tmp_path / "data")) == 8
    line = said()
    size = figures.size(5 * len(JPG) + 3 * len(PNG))
    assert line.split()[:4] == ["data", "8", *size.split()], line
    (tmp_path / "far/deep/1.png").write_bytes(JPG + bytes(len(PNG) - len(JPG)))
    assert said().split()[:4] == line.split()[:4] and said() != line
    for name, target, expected in (
        ("gone", "/nowhere", "eel/gone: is a link to /nowhere, which is not there"),
        ("up", tmp_path / "data", ": is a link to a folder above it; remove it"),
    ):
        (tmp_path / "far" / name).symlink_to(target)
        with pytest.raises(UsageError, match=expected):
            records(tmp_path / "data")
        assert expected in said()
        (tmp_path / "far" / name).unlink()


@pytest.mark.long
def test_commands_that_would_leave_out_linked_folders_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_links(tmp_path)
    words = [*WORDS["vertex"], f"params.data={tmp_path}/data"]
    command = [*words, "--on", "vertex", "--offline", "--request", str(tmp_path / "job.yaml")]
    code, errors, _ = type_command(["example:digits", *command], capsys)
    assert code == 2 and "train/eel is a link to a folder, which gcloud" in errors[-1]


@pytest.mark.long
def test_links_in_the_source_are_followed_or_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hidden links that lead nowhere are an editor's locks."""
    source, far = tmp_path / "code", tmp_path / "far"
    (source / "deep").mkdir(parents=True)
    far.mkdir()
    (far / "parts.py").write_text("")
    recipe = "from stoker.image_classification import ImageClassification as Own\n"
    (source / "linked_rows.py").write_text(recipe)
    (source / "deep/linked").symlink_to(far)
    for lock in (source / ".#rows.py", source / "deep/.#rows.py"):
        lock.symlink_to("user@host.7")
    job = "name: x\nrecipe: linked_rows:Own\nparams: {data: s3://b/d}\noutput_dir: /mnt/x\n"
    (source / "job.yaml").write_text(job)
    command = [str(source / "job.yaml"), "--on", "ray", "--address", "http://h:8265", "--offline"]
    package = tmp_path / "job.zip"
    code, errors, _ = type_command([*command, "--request", str(package)], capsys)
    assert code == 0, errors
    with zipfile.ZipFile(package) as archive:
        assert {"linked_rows.py", "deep/linked/parts.py"} <= {*archive.namelist()}
    says = {"/nowhere": "is a link to /nowhere", str(source): "is a link to a folder above it"}
    for target, expected in says.items():
        (source / "deep/x").symlink_to(target)
        code, errors, _ = type_command([*command, "--dry-run"], capsys)
        assert code == 2 and len(errors) == 1 and expected in errors[0]
        (source / "deep/x").unlink()


PATHS = """
from pathlib import Path
from typing import Any
from stoker.recipe import Recipe

class Mine(Recipe):
    data: str = ""
    augment: str = ""
    vocabulary: Path | None = None
    parts: list[Path] = []
    options: Any = None
"""


@pytest.mark.parametrize("recipe", ["mine:Mine", "absent:Mine"])
def test_only_declared_parameters_are_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """What exists here decides nothing: there is a folder of each value's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PATHS)
    (tmp_path / "blob").write_bytes(b"a")
    for name in ("crop", "words", "a"):
        (tmp_path / name).mkdir()
    (tmp_path / "rows.parquet").symlink_to(tmp_path / "blob")
    params = ["data=rows.parquet", "augment=crop", "vocabulary=./words", "parts=[a]", "options=a"]
    job = open_job(load(None, [f"recipe={recipe}", *(f"params.{p}" for p in params)]), tmp_path)
    declared = {"data": str(tmp_path / "rows.parquet"), "vocabulary": str(tmp_path / "words")}
    assert job.data == (declared if recipe == "mine:Mine" else {"data": declared["data"]})
    job.stage(tmp_path / "staged", installs=False)
    assert load(tmp_path / "staged/job.yaml").config.params["augment"] == "crop"
    job = open_job(load(None, [f"recipe={recipe}", "params.data=no/such"]), tmp_path)
    assert job.data == {"data": str(tmp_path / "no/such")}, "also if nothing is there"


def test_a_relative_path_is_never_that_of_the_staged_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere, code = tmp_path / "project", tmp_path / "elsewhere", tmp_path / "run/code"
    for folder in (project / "small", project / "ckpt/step-00000004", elsewhere):
        folder.mkdir(parents=True)
    for file in ("rows.py", "small/a.parquet", "own.csv", "ckpt/base.pt"):
        (project / file).write_text("")
    (project / "job.yaml").write_text("name: job\nrecipe: rows:Counting\ncheckpoint: {dir: ckpt}\n")

    def staged(typed_in: Path) -> None:
        monkeypatch.chdir(typed_in)
        shutil.rmtree(code, ignore_errors=True)
        job = open_job(load(Path(os.path.relpath(project, typed_in), "job.yaml")))
        job.stage(code, installs=False)
        for name, value in local.environment(code.parent).items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(code)

    def found(path: str) -> str:
        return open_store(path).where

    staged(project)
    assert (code / "small/a.parquet").is_file() and (code / "ckpt/base.pt").is_file()
    assert not (code / "ckpt/step-00000004").exists(), "earlier checkpoints are not staged"
    assert found("small") == str(project / "small") and found("ckpt") == str(project / "ckpt")
    config = read_configuration(["--config", "job.yaml"], {}).config
    # The run's config.yaml is read from anywhere.
    assert config.checkpoint.dir == str(project / "ckpt")
    staged(elsewhere)
    assert found("own.csv") == str(elsewhere / "own.csv"), "the copy has one, too"
    (elsewhere / "step-00000004").mkdir()
    assert locate("step-00000004")[0].where == str(elsewhere)


STEMS = ("a", "B b", "_c", ".d", "é#")
SUFFIXES = ("", ".jpg", ".JPE", ".1", ".jpg?w=1", ".txt", ".npy", ".x.y")
PLACES = ("train/cat", "train/dog", "train", "val/cat", "val/.hid", "dev/cat", "other", "")
PLACES += ("train/cat/deep/er",)
name = st.builds("{}/{}{}".format, *map(st.sampled_from, (PLACES, STEMS, SUFFIXES)))


@pytest.mark.long
@given(st.sets(name, max_size=12), st.booleans())
def test_every_file_of_a_random_folder_is_read_or_refused_or_named(
    files: set[str], ignores: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        images(splits="train")(root)
        for path in files:
            (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            (root / path.lstrip("/")).write_bytes(JPG)
        others = ("*.txt", "*.npy", "*.1", "*=1", "*.y", "a", "B b", "_c", "é#") if ignores else ()
        try:
            both_splits = [read_images(folder, split, ignore=others) for split in ("train", "val")]
        except UsageError:
            return
        sources = [source for source in both_splits if source]
        read = {source.path_of(key) for source in sources for key, _ in listed(source)}
        notes = " ".join(note for source in sources for note in source.notes)
        named = sum(int(count) for count in re.findall(r"(\d+) files? not read", notes))
        lost = [path for path in files if f"{folder}/{path.lstrip('/')}" not in read]
        in_splits = [path for path in lost if path.startswith(("train/", "val/", "dev/"))]
        assert named == len([path for path in in_splits if "/." not in path])
        for path in {*lost} - {*in_splits}:
            top = path.lstrip("/").partition("/")[0]
            told = top in notes or " more not read: in no split" in notes
            assert told or top.startswith((".", "_"))


def listed(source: Any) -> list[Any]:
    return [each for shard in source.shards(100, None) for each in source.listing(shard)]


def parts(place: str, *numbers: int, count: int = 2) -> list[str]:
    return [f"{place.format(f'{number:05}-of-{count:05}')}.parquet" for number in numbers]


BOTH = *parts("train/part-{}", 0, 1, 2, count=4), *parts("val/part-{}", 3, count=4)
THREE = tuple(parts("train/a/x-{}-1f3e", 0, 1, 2, count=3))
SETS: dict[str, tuple[tuple[str, ...], bool]] = {
    "a whole set": (THREE, True),
    "from 1": (tuple(parts("data/train-{}", 1, 2, 3, count=3)), True),
    "one missing": (THREE[::2], False),
    "the first missing": (THREE[1:], False),
    "one of thirty": (tuple(parts("train/part-{}", 2, count=30)), False),
    "of three thousand million": (tuple(parts("train-{}", 1, count=3_000_000_000)), False),
    "a copy by a browser": ((*THREE, THREE[0].replace(".", " (1).")), False),
    "a copy by hand": ((*THREE, THREE[0].replace(".", "-copy.")), False),
    "one too many": ((*THREE, *parts("train/a/x-{}-1f3e", 4, count=3)), False),
    "of another size": ((*THREE, *parts("train/a/x-{}-1f3e", 0, count=1)), False),
    "a held-out shard": (BOTH, True),
    "folds": ((*parts("train/f-{}", 1, 2, count=3), *parts("val/f-{}", 3, count=3)), True),
    "a held-out shard for the test": ((*BOTH[:2], BOTH[3], BOTH[2].replace("train", "test")), True),
    "languages": ((*parts("train-{}.en", 0, 1), *parts("train-{}.de", 0, 1)), False),
    "numbered to the last": (tuple(parts("train-{}", 0, 1, 2, 3, count=3)), True),
    "hashes": (("train-0-of-2-1f3e9c2a.parquet", "train-1-of-2-9c2a-deadbeef.parquet"), True),
    "other ends": (("train-0-of-2-xyz.parquet", "train-1-of-2-uvw.parquet"), True),
    "whole sets of one name": ((*parts("train/p-{}", 0, 1), *parts("val/p-{}", 0, count=1)), True),
    "a shard in both splits": ((*BOTH, *parts("val/part-{}", 2, count=4)), False),
    "a shard in no split": ((*BOTH[:2], BOTH[3]), False),
    "a copy of the only one": (("train-0-of-1.parquet", "train-0-of-1 (1).parquet"), False),
    "two versions": (tuple(f"train-0-of-1-{n}e3e9c2a.parquet" for n in "01"), False),
    "a shard beside the splits": ((*BOTH[:3], *parts("part-{}", 3, count=4)), False),
}


@pytest.mark.parametrize("form", ["parquet", "tar"])
@pytest.mark.parametrize("case", SETS)
def test_a_set_that_names_its_size_is_whole_or_refused(
    case: str, form: str, tmp_path: Path
) -> None:
    """It may lie in several splits, and end in a name."""
    files, whole = SETS[case]
    read = read_parquet if form == "parquet" else read_webdataset
    for file in files:
        path = tmp_path / file.replace("parquet", form)
        path.parent.mkdir(parents=True, exist_ok=True)
        if form == "parquet":
            parquet.write_table(pa.table({"label": [0, 1]}), path)
        else:
            path.write_bytes(tar_of([("0.cls", b""), ("1.cls", b"")]))
    assert read(str(path), "train") is not None, "one file by its own path"
    if not whole:
        with pytest.raises(UsageError, match=r"which are not this set.*ignore"):
            read(str(tmp_path), "train")
        return
    found: list[Any] = [read(str(tmp_path), split) for split in ("train", "val")]
    assert (found[1] is not None) >= any("val/" in file for file in files)
    assert len(found[0].sizes) == sum("train" in file for file in files)
