"""Seeded damage to files of every format: what arrives is right, or quarantined, or the run is refused.

`STOKER_FUZZ=20000` raises the number of damages per format, `STOKER_FUZZ_SEED` changes them.
"""

from __future__ import annotations

import io
import multiprocessing
import tarfile
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damage import DAMAGES, SEED, Damage, chained, checked, damages, keys, records, tar_of
from PIL import Image
from pyarrow import parquet
from spoilt import encoded

from recipes.audio import RATE, Spectrogram
from stoker.data import BadRecord, DecodeImage, read_images
from stoker.errors import ChainError, UsageError

pytestmark = pytest.mark.long

RECORDS = 24
MOST_ABORTED = 0.002
"""Share of the damages at which Arrow ends the process."""


@cache
def photo(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((64, 48))
    return encoded("JPEG", image, quality=90, progressive=seed % 2 == 1)


def shard() -> bytes:
    forms = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    return tar_of(
        [
            (f"{i:04d}.{s}", c)
            for i in range(RECORDS)
            for s, c in (("jpg", photo(i % 4)), ("cls", b"%d" % i))
        ],
        forms[SEED % 3],
    )


def table() -> bytes:
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
        return Folder(root, "1.tar", shard(), {"0.tar": tar_of([("x.cls", b"1")])}), records
    if form == "parquet":
        return Folder(root, "1.parquet", table(), {"0.parquet": table()}), records
    return Folder(
        root, f"a/{form}.jpg", photo(form == "progressive"), {"b/0.jpg": photo(2)}
    ), decoded


FORMS = pytest.mark.parametrize("form", ["tar", "parquet", "jpeg", "progressive"])


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
