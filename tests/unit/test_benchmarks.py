"""What the benchmarks compute from what they see: absent, double, altered or less work is found."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from damage import read_all
from PIL import Image
from whole_way import Way

from benchmarks import (
    end_to_end,
    far_objects,
    field,
    harness,
    s3,
    shapes,
    slow_samples,
    small_objects,
)
from benchmarks.limits import NETWORK, RECEIVER, SWEEP, Row, measures
from benchmarks.loaders.work import (
    files_of,
    pillow,
    slope,
    write_folder,
)
from benchmarks.sleeping import Found
from stoker.data import read_images, read_webdataset
from stoker.read.far_files import READS
from stoker.read.sources import ID_MODULUS, record_id
from stoker.serve.opening import pads_of


def jpeg(level: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (64, 48), (level, level, level)).save(content, "JPEG")
    return content.getvalue()


def test_all_loaders_read_each_image_of_the_folder_once(tmp_path: Path) -> None:
    write_folder(tmp_path, [jpeg(50), jpeg(150)], total=10, classes=2)
    files = files_of(tmp_path)
    assert len(files) == len({path for path, _ in files}) == 10
    assert [label for _, label in files] == [0, 1] * 5
    image = pillow()(Path(files[0][0]).read_bytes())
    assert image.shape == (3, 224, 224)
    assert image.dtype == torch.uint8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 8_000}, "8000 of 8960 images"),
        ({"mean": 140.0}, "mean pixel 140.00"),
        ({"sorted_labels": '{"0": 12800}'}, "other labels"),
    ],
)
def test_speed_from_doing_less_is_found(change: dict[str, Any], reason: str) -> None:
    seen = {"rows": end_to_end.TOTAL, "mean": 126.0, "sorted_labels": '{"0": 6400, "1": 6400}'}
    found = {"Stoker": [seen], end_to_end.BASE: [seen]}
    end_to_end.check(found)
    with pytest.raises(RuntimeError, match=reason):
        end_to_end.check(found | {"peer": [seen | change]})


def test_the_rate_of_batches_that_come_in_waves_is_that_of_the_waves() -> None:
    """100 records each second, all at its end: whichever waves the window cuts, 100 records per second."""
    waves = [(float(second), 100.0 * second) for second in range(1, 101) for _ in range(4)]
    for first in (0.2, 0.21, 0.29):
        assert slope(waves, 10_000, (first, 0.9)) == pytest.approx(100)


@pytest.mark.parametrize("change", ["absent", "twice", "another one"])
def test_uneven_records_that_do_not_come_once_are_found(change: str) -> None:
    indices = list(range(slow_samples.TOTAL))
    slow_samples.taken(torch.tensor(indices).split(100))
    wrong = {"absent": indices[:-1], "twice": [*indices, 7], "another one": [*indices[:-1], 7]}[
        change
    ]
    with pytest.raises(RuntimeError, match="of 2400"):
        slow_samples.taken(torch.tensor(wrong).split(100))


@pytest.mark.long
def test_shards_behind_the_link_are_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "SHARD_RECORDS", 50)
    monkeypatch.setattr(s3, "SHARDS", 3)
    monkeypatch.setattr(s3, "TOTAL", 150)
    crcs = s3.write(tmp_path / "shard.tar")
    with s3.served("far_s3", str(tmp_path / "shard.tar"), "3"):
        records = read_all(read_webdataset(f"s3://{s3.BUCKET}", "train"), 50)
    assert "AWS_ENDPOINT_URL" not in os.environ
    sums = [int(crc) for crc in s3.Decode()({"bin": [r["bin"] for r in records]})["crc"]]
    ids = sum(record_id(record["key"]) for record in records) % ID_MODULUS
    s3.check(SimpleNamespace(rows=len(records), id_sum=ids), sums, crcs)
    with pytest.raises(RuntimeError, match="some are missing or repeated"):
        s3.check(SimpleNamespace(rows=len(records), id_sum=ids + 1), sums, crcs)
    with pytest.raises(RuntimeError, match="wrong contents"):
        s3.check(SimpleNamespace(rows=len(records), id_sum=ids), [*sums[:-1], 0], crcs)


def test_small_objects_are_listed_and_requested_once_and_the_server_counts_that() -> None:
    with s3.served("far_objects", "3") as ports:
        source = read_images(f"s3://{far_objects.BUCKET}", "train")
        assert source is not None and source.count() == 3 * far_objects.EACH
        shards = source.shards(100, None)
        images = [record["image"] for shard in shards[:2] for record in source.read(shard, None)]
        found = small_objects.counts(ports["link"])
    assert images == [far_objects.CONTENT] * 200
    assert (
        found["GET"] == found["keys"] == 200 and found["most of a key"] == 1 and "HEAD" not in found
    )
    assert found["most open"] <= READS + 10, "those of pyarrow, which listed"
    [share, asked, *_] = small_objects.rows(15.0, 1.0, {**found, "HEAD": 200})
    assert (share.ratio, share.met, asked.ours, asked.met) == (0.5, False, 2.0, False)


def test_measures_that_share_a_name_are_refused() -> None:
    with pytest.raises(ValueError, match="share a name: a"):
        harness.merged([], [{"measure": "a"}, {"measure": "a"}])


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("text", 1e-9),
        ("audio", 1e-6),
        ("segmentation", 0.3),  # of few records, cropped at random
        ("video", 0.1),
    ],
)
@pytest.mark.long
def test_the_peer_gives_the_same_columns_with_the_same_in_them(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tolerance: float
) -> None:
    monkeypatch.setitem(shapes.KINDS, kind, (shapes.KINDS[kind][0], 20, 2, tolerance))
    monkeypatch.setattr(shapes, "BATCH", 4)
    shapes.write(kind, tmp_path)
    folder = str(tmp_path / "data")
    recipe = shapes.recipe_of(kind)(data=folder)
    steps, bad = way.batches(
        recipe.read("train"),
        recipe.preprocess("train"),
        block_records=8,
        batch_size=4,
        workers=1,
        direct=False,
        pad=pads_of(recipe),
    )
    assert not bad
    ours = [{name: v for name, v in batch.items() if name != "__id"} for (batch,) in steps]
    shapes.check(kind, shapes.consume(ours, 40), shapes.peer(kind, folder))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 11}, "DataLoader gave 11 of 200000 records"),
        ({"kinds": {"ids": ["torch.int32", 2]}}, "the DataLoader {'ids': \\['torch.int32', 2\\]}"),
        ({"means": {"ids": 21.0}}, "ids sums to 20.0 a record"),
    ],
)
def test_a_data_loader_that_does_other_work_is_no_peer(change: dict[str, Any], reason: str) -> None:
    seen = {
        "rows": shapes.total_of("text"),
        "means": {"ids": 20.0},
        "kinds": {"ids": ["torch.int64", 2]},
    }
    shapes.check("text", seen, seen)
    with pytest.raises(RuntimeError, match=reason):
        shapes.check("text", seen, seen | change)


SHAPES = [*SWEEP, *RECEIVER, *NETWORK]


def as_predicted() -> list[Row]:
    rows = [Row(case, 1.0, "gpu") for case in SHAPES]
    return [
        replace(r, samples_per_s=r.predicted.samples_per_s, binds=r.predicted.binds) for r in rows
    ]


def test_a_row_is_met_within_a_tenth_and_for_the_models_reason_only() -> None:
    rows = as_predicted()
    assert all(measure.met for measure in measures(rows))
    slower = replace(rows[0], samples_per_s=0.89 * rows[0].samples_per_s)
    faster = replace(rows[1], samples_per_s=1.11 * rows[1].samples_per_s)
    other = replace(rows[2], binds="network")
    met = [measure.met for measure in measures([slower, faster, other, *rows[3:]])]
    assert met[:4] == [False, False, False, True]


@pytest.mark.parametrize("name", field.CASES)
def test_a_published_case_starves_as_published_and_is_linked(name: str) -> None:
    """Without CPU hosts, the model gives the published use of the GPU; the docs name the source."""
    case, docs = field.CASES[name], Path(__file__).parents[2] / "docs/gpu-waiting.md"
    assert f"(https://{case.thread})" in docs.read_text()
    if case.busy is not None:
        alone = field.case_of(name, 0)
        rate = Found(alone, 0.0, {}, 0.0).predicted.samples_per_s
        assert rate / alone.gpu_samples_per_s == pytest.approx(case.busy, abs=0.05)


def test_a_published_case_is_met_if_the_gpu_is_busy_and_the_model_right() -> None:
    hosts = field.needed("nnunet")
    found = [
        Found(case, ratio * Found(case, 0.0, {}, 0.0).predicted.samples_per_s, {}, 0.0)
        for case, ratio in [
            (field.case_of("nnunet", 0), 1.06),
            (field.case_of("nnunet", hosts), 0.96),
        ]
    ]
    alone, fed, busy, cost = field.rows_of("nnunet", found)
    assert [row.met for row in (alone, fed, busy, cost)] == [False, True, False, None]
    assert alone.ours == pytest.approx(1.06 * 7 / 1.0229)
    assert busy.ours == pytest.approx(0.96)
    assert cost.ours == pytest.approx((1.408 + hosts * 0.408) / (0.96 * 2 / 0.1307) / 3600 * 1e6)
