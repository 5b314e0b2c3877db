"""Sets of files that name their size, such as `train-00002-of-00004`, are whole or refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from damage import tar_of
from pyarrow import parquet

from stoker.data import read_parquet, read_webdataset
from stoker.errors import UsageError

WHOLE_SET = ("00000-of-00003", "00001-of-00003", "00002-of-00003")


@pytest.mark.parametrize("form", ["parquet", "tar"])
@pytest.mark.parametrize("place", ["data/train-{}", "train/part-{}", "train/a/x-{}-1f3e"])
@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (WHOLE_SET, True),
        (("00001-of-00003", "00002-of-00003", "00003-of-00003"), True),
        (("00000-of-00003", "00002-of-00003"), False),
        (("00001-of-00003", "00002-of-00003"), False),
        (("00002-of-00030",), False),
        ((*WHOLE_SET, "00000-of-00003 (1)"), False),
        ((*WHOLE_SET, "00000-of-00003-copy"), False),
        ((*WHOLE_SET, "00004-of-00003"), False),
        (("00001-of-3000000000",), False),
        ((*WHOLE_SET, "00000-of-00001"), False),
    ],
)
def test_a_set_that_names_its_size_is_whole_or_refused(
    parts: tuple[str, ...], whole: bool, place: str, form: str, tmp_path: Path
) -> None:
    read = read_parquet if form == "parquet" else read_webdataset
    for part in parts:
        path = tmp_path / f"{place.format(part)}.{form}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if form == "parquet":
            parquet.write_table(pa.table({"label": [0, 1]}), path)
        else:
            path.write_bytes(tar_of([("0.cls", b""), ("1.cls", b"")]))
    assert read(str(path), "train") is not None, "one file by its own path"
    if whole:
        assert len(read(str(tmp_path), "train").paths) == 3
    else:
        with pytest.raises(UsageError, match="which are not this set"):
            read(str(tmp_path), "train")


def parts(place: str, *numbers: int, count: int = 2) -> list[str]:
    return [f"{place.format(f'{number:05}-of-{count:05}')}.parquet" for number in numbers]


BOTH = *parts("train/part-{}", 0, 1, 2, count=4), *parts("val/part-{}", 3, count=4)
SETS: dict[str, tuple[tuple[str, ...], bool]] = {
    "a held-out shard": (BOTH, True),
    "folds": ((*parts("train/f-{}", 1, 2, count=3), *parts("val/f-{}", 3, count=3)), True),
    "a held-out shard for the test": ((*BOTH[:2], BOTH[3], BOTH[2].replace("train", "test")), True),
    "languages in one folder": (
        (*parts("train-{}.en", 0, 1), *parts("train-{}.de", 0, 1)),
        False,
    ),
    "numbered to the last": (tuple(parts("train-{}", 0, 1, 2, 3, count=3)), True),
    "hashes": (("train-0-of-2-1f3e9c2a.parquet", "train-1-of-2-9c2a-deadbeef.parquet"), True),
    "other ends": (("train-0-of-2-xyz.parquet", "train-1-of-2-uvw.parquet"), True),
    "whole sets of one name": ((*parts("train/p-{}", 0, 1), *parts("val/p-{}", 0, count=1)), True),
    "a shard in both splits": ((*BOTH, *parts("val/part-{}", 2, count=4)), False),
    "a shard in no split": ((*BOTH[:2], BOTH[3]), False),
    "a copy of the only one": (
        ("train-0-of-1.parquet", "train-0-of-1 (1).parquet"),
        False,
    ),
    "two versions": (
        ("train-0-of-1-1f3e9c2a.parquet", "train-0-of-1-0e3e9c2b.parquet"),
        False,
    ),
    "a shard beside the splits": ((*BOTH[:3], *parts("part-{}", 3, count=4)), False),
}


@pytest.mark.parametrize("case", SETS)
def test_a_set_may_lie_in_several_splits_and_end_in_a_name(case: str, tmp_path: Path) -> None:
    files, whole = SETS[case]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"label": [0, 1]}), tmp_path / file)
    if not whole:
        with pytest.raises(UsageError, match=r"which are not this set.*ignore"):
            read_parquet(str(tmp_path), "train")
    else:
        found = [read_parquet(str(tmp_path), split) for split in ("train", "val")]
        assert all(
            source is not None for source in found[: 1 + any("val/" in file for file in files)]
        )
        assert len(found[0].paths) == sum(file.startswith("train") for file in files)
