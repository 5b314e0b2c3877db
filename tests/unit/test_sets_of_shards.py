"""Sets of files that name their size, such as `train-00002-of-00004`, are whole or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from damage import tar_of
from pyarrow import parquet

from stoker.data import read_parquet, read_webdataset
from stoker.errors import UsageError


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
    assert len(found[0].paths) == sum("train" in file for file in files)
