"""What hosts keep across epochs: the same records as without it, within a bound, until the run ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
import torch
from damage import checked, tar_of
from PIL import Image
from spoilt import encoded, images, of
from torchvision.transforms import v2

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.chain.stages import cache_key, prefix_length, refuse_nothing_to_keep
from stoker.config.schema import Config
from stoker.data import Boxes, CheckLabel, DecodeImage, DecodeMask, read_any, read_range
from stoker.errors import CacheError, UsageError
from stoker.protocol import BlockReport, DataCursor, Shard, Work
from stoker.read.far_files import FarFiles
from stoker.read.host_cache import PREFIX, CacheSpec, HostCache, KeptRecord, decode, encode, room
from stoker.read.identity import agree
from stoker.read.images import ImageFolderSource
from stoker.read.sources import Source
from stoker.serve.passes import Passes
from stoker.serve.pool import LOOK_AHEAD, CacheAffinity
from stoker.storage.checkpoint_store import LEFT_AFTER_S, OWNER, sweep
from tests.waiting import until

pytestmark = pytest.mark.long

SPEC = CacheSpec("memory", "test", 10**9)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # What others on this machine leave free is not the question.
    monkeypatch.setattr("stoker.read.host_cache.memory", lambda: (16 << 30, 12 << 30))
    return tmp_path / "stoker-cache-test"


def chain(prefix: bool = True, share: float = 1.0) -> Chain:
    entries = [DecodeImage(), CheckLabel(10), v2.RandomResizedCrop(24, antialias=True)]
    stages = as_stages([*entries, v2.RandomHorizontalFlip()])
    whole = Chain(stages, seed=5, with_keys=True, prefix=prefix_length(stages) if prefix else 0)
    whole.share = share
    return whole


def run_pass(
    source: Source, epoch: int, cache: HostCache | None, share: float = 1.0, **work: Any
) -> list[tuple[dict[str, Any], BlockReport]]:
    shards = source.shards(120, np.random.default_rng(epoch))
    return list(groups(source, chain(cache is not None, share), shards, cache, epoch=epoch, **work))


groups = partial(damage.blocks, seed=3, shuffle=True, block_records=50)
Made = list[tuple[dict[str, Any], BlockReport]]


def same(one: Made, two: Made) -> bool:
    return len(one) == len(two) and all(
        list(a) == list(b)
        and all(np.array_equal(a[name], b[name]) for name in a)
        and (x.records, x.id_sum, x.bad, x.bad_id_sum) == (y.records, y.id_sum, y.bad, y.bad_id_sum)
        for (a, x), (b, y) in zip(one, two, strict=True)
    )


def opened(folder: Path) -> Source:
    return checked(read_any(str(folder), "train"))


@pytest.fixture
def few(digits: Path, root: Path) -> Callable[[str], Path]:
    """Makes a folder of the form whose training split are the 360 images of the digits' validation."""

    def copied(form: str) -> Path:
        shutil.copytree(digits / form / "val", root.parent / "data" / form / "train")
        return root.parent / "data" / form

    return copied


@pytest.mark.parametrize(
    ("form", "kind"),
    [("images", "memory"), ("parquet", "memory"), ("webdataset", "memory"), ("images", "disk")],
)
def test_a_pass_is_the_same_with_and_without_it(form: str, kind: Any, few: Any, root: Path) -> None:
    source = opened(folder := few(form))
    expected = [run_pass(source, epoch, None) for epoch in range(3)]
    cache = HostCache(root, "k", CacheSpec(kind, "test", 10**9))
    first = run_pass(source, 0, cache)
    assert same(first, expected[0])
    assert sum(report.kept for _, report in first) == 360
    assert not any(report.found for _, report in first)
    # From now on nothing is read any more: the files may as well be gone.
    shutil.rmtree(folder)
    for epoch in (1, 2):
        later = run_pass(source, epoch, cache)
        assert same(later, expected[epoch])
        assert all(report.found == report.records for _, report in later)
        assert not sum(report.costs["DecodeImage"].cpu_s for _, report in later)
    # A run that goes on in the middle of shards drops the same groups.
    assert same(run_pass(source, 1, cache, skip=1), [g for g in expected[1] if g[1].nth >= 1])


def test_of_images_far_away_those_that_are_not_kept_are_fetched_ahead(
    few: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(few("images"))
    expected = [run_pass(source, epoch, None) for epoch in range(2)]
    asked: list[int] = []
    expect = FarFiles.expect

    def noted(files: FarFiles, paths: list[str]) -> None:
        asked.append(len(paths))
        expect(files, paths)

    monkeypatch.setattr(FarFiles, "expect", noted)
    source.far = True
    cache = HostCache(root, "k", CacheSpec("memory", "test", 120 * 4096))
    assert same(run_pass(source, 0, cache), expected[0])
    assert sum(count for count in asked if count > 1) == source.count()
    asked.clear()
    assert same(run_pass(source, 1, cache), expected[1])
    kept = sum(report.kept + report.found for _, report in run_pass(source, 1, cache))
    assert asked.count(1) == 2 * (360 - kept), "one by one, as they were fetched ahead"


def photos(folder: Path, form: str) -> Source:
    """60 photos so large that decoding them for a small crop gives other pixels than cropping a whole one;
    one is damaged."""
    rng, members, files = np.random.default_rng(0), [], []
    for number in range(60):
        rough = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
        content = encoded("JPEG", rough.resize((400, 300)))[: 500 if number == 7 else None]
        members += [(f"{number}.jpg", content), (f"{number}.cls", b"%d" % (number % 2))]
        files += [(f"train/c{number % 2}/{number}.jpg", content)]
    if form == "images":
        images(*files, classes="")(folder)
    else:
        (folder / "train").mkdir(parents=True)
        (folder / "train" / "a.tar").write_bytes(tar_of(members))
    return opened(folder)


def counts(report: BlockReport) -> tuple[int, ...]:
    return report.records, report.id_sum, report.bad_id_sum, report.rows


def rows_of(made: Made) -> dict[str, bytes]:
    return {
        key: columns["image__hwc"][row].tobytes()
        for columns, _ in made
        for row, key in enumerate(columns["__key"].tolist())
    }


@pytest.mark.parametrize("form", ["images", "webdataset"])
def test_only_a_share_is_cached_and_the_others_are_as_without_a_cache(
    form: str, root: Path
) -> None:
    folder = root.parent / "data"
    source = photos(folder, form)
    cache, full = HostCache(root, "k", SPEC), HostCache(root, "full", SPEC)
    plain = [run_pass(source, epoch, None) for epoch in range(3)]
    whole = [run_pass(source, epoch, full) for epoch in range(3)]
    inside = {key for key in rows_of(plain[0]) if chain(share=0.4).caches(key)}
    assert 10 < len(inside) < 40
    for epoch in range(3):
        made = run_pass(source, epoch, cache, share=0.4)
        direct, cropped, rows = rows_of(plain[epoch]), rows_of(whole[epoch]), rows_of(made)
        assert all(direct[key] != cropped[key] for key in direct), (
            "otherwise this test shows nothing"
        )
        assert rows == {key: (cropped if key in inside else direct)[key] for key in direct}
        assert list(rows) == list(direct), "in their order"
        for (_, report), (_, other) in zip(made, plain[epoch], strict=True):
            assert counts(report) == counts(other), "also in a shard of which a part is cached"
            assert [bad.key for bad in report.bad] == [bad.key for bad in other.bad]
        assert sum(len(report.bad) for _, report in made) == 1
        assert sum(report.found for _, report in made) == (len(inside) if epoch else 0)
        assert sum(report.kept for _, report in made) == (0 if epoch else len(inside))
        for key in inside if form == "images" else ():
            (folder / "train" / key).unlink(missing_ok=True)  # what is cached is read no more
    assert sum(path.is_file() for path in (root / "k").rglob("*")) == len(inside), "and no listing"


@pytest.mark.parametrize("form", ["images", "webdataset"])
def test_what_does_not_fit_is_preprocessed_again_and_the_bound_holds_for_all_processes(
    form: str, few: Any, root: Path
) -> None:
    source = opened(few(form))
    bound = 120 * 4096  # a digit of 32 × 32 pixels takes a page, and there are 360
    caches = [HostCache(root, "k", CacheSpec("memory", "test", bound)) for _ in range(2)]
    kept = sum(report.kept for _, report in run_pass(source, 0, caches[0]))
    assert 110 <= kept <= 120
    used, allowed = caches[1].usage
    assert used <= allowed == bound
    on_disk = sum(
        f.stat().st_blocks * 512 for f in root.rglob("*") if f.is_file() and f.name != "books"
    )
    assert on_disk <= bound
    second = run_pass(source, 1, caches[1])
    assert sum(report.found for _, report in second) == kept, "nothing is thrown out"
    assert same(second, run_pass(source, 1, None))


def test_bad_records_are_quarantined_in_every_epoch_and_never_kept(few: Any, root: Path) -> None:
    folder = few("images")
    torn, odd = sorted(folder.rglob("*.jpg"))[3:5]
    torn.write_bytes(torn.read_bytes()[:100])
    source = opened(folder)
    odd.unlink()
    odd.mkdir()  # a file that cannot be read at all
    cache = HostCache(root, "k", SPEC)
    for epoch in range(3):
        made = run_pass(source, epoch, cache)
        assert same(made, run_pass(source, epoch, None))
        bad = sorted(b.key for _, report in made for b in report.bad)
        assert bad == sorted(str(p.relative_to(folder / "train")) for p in (torn, odd))
        assert sum(report.found for _, report in made) == (358 if epoch else 0)


def test_a_folder_that_vanishes_in_mid_run_costs_time_and_no_record(few: Any, root: Path) -> None:
    for form in ("images", "webdataset"):
        source = opened(few(form))
        cache = HostCache(root, form, SPEC)
        run_pass(source, 0, cache)
        shards = source.shards(240, None)[:1]
        rest = groups(source, chain(), shards, cache, epoch=1)
        made = [next(rest)]
        shutil.rmtree(root)
        made += list(rest)
        assert same(made, list(groups(source, chain(False), shards, epoch=1)))
        assert made[0][1].found == 50
        assert sum(report.found for _, report in made) < 60


@pytest.mark.parametrize("form", ["webdataset", "parquet"])
def test_a_cached_record_that_is_removed_is_read_again_and_no_other_is_lost(
    form: str, few: Any, root: Path
) -> None:
    source = opened(few(form))
    cache = HostCache(root, form, SPEC)
    run_pass(source, 0, cache)
    files = [path for path in sorted((root / form).rglob("*")) if path.is_file()]
    for path in [path for path in files if "key" in decode(path.read_bytes())][:3]:
        path.unlink()
    for epoch in (1, 2, 3):
        made = run_pass(source, epoch, cache)
        assert same(made, run_pass(source, epoch, None))
        assert sum(report.found for _, report in made) == 360 - (3 if epoch == 1 else 0)


def test_a_host_that_shall_not_keep_a_shard_still_uses_what_it_has(few: Any, root: Path) -> None:
    source = opened(few("images"))
    cache = HostCache(root, "k", SPEC)
    assert not any(report.kept for _, report in run_pass(source, 0, cache, store=False))
    run_pass(source, 0, cache)
    again = run_pass(source, 1, cache, store=False)
    assert all(report.found == report.records for _, report in again)


def test_kept_values_come_back_as_they_were_and_may_be_written_to(root: Path) -> None:
    small = np.arange(300_000, dtype=np.uint8).reshape(100, 1000, 3)
    large = np.tile(small, (5, 1, 1))  # so large that it is mapped
    tensor = torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)
    record = {"key": "a", "image": large, "small": small, "t": tensor}
    record |= {"text": "x", "n": 3, "none": None, "b": b"12"}
    for kind in ("memory", "disk"):
        cache = HostCache(root / kind, "k", CacheSpec(kind, "test", 10**9))  # type: ignore[arg-type]
        assert cache.keep(record) > large.nbytes
        for _ in range(2):
            found = cache.load("a")
            assert found is not None
            assert np.array_equal(found["image"], large)
            assert np.array_equal(found["small"], small)
            assert torch.equal(found["t"], tensor)
            assert all(found[name] == record[name] for name in ("text", "n", "none", "b"))
            found["image"][:] = found["small"][:] = 0  # a transform's own copy, not what is kept
            found["t"].add_(1)
        assert cache.keep(record) == 0, "kept already"
        assert cache.load("b") is None
    empty = {"key": "e", "x": np.zeros((0, 3)), "o": np.array(["a", None], dtype=object)}
    again = decode(b"".join(bytes(part) for part in encode(empty)))
    assert again["x"].shape == (0, 3)
    assert again["o"].tolist() == ["a", None]


def test_a_cached_record_keeps_its_declarations() -> None:
    entries = [DecodeImage(), DecodeMask(), Boxes(), v2.RandomHorizontalFlip(1.0)]
    chain = Chain(as_stages(entries), seed=0, prefix=3)
    image = np.random.default_rng(0).integers(0, 9, (20, 30, 3), np.uint8)
    parts = {"image": of(image, "PNG"), "mask": of(image[..., 0], "PNG"), "boxes": [[2, 4, 8, 9]]}
    record = {"key": "0", **parts}
    kept: list[Any] = []

    def keep(record: Any) -> int:
        kept.append(KeptRecord(decode(b"".join(encode(record)))))
        return 1

    fresh, _ = chain.run([record], 0, keep)
    cached, report = chain.run(kept, 0, keep)
    assert report.found == 1 and not report.bad
    assert fresh.keys() == cached.keys()
    assert all(np.array_equal(fresh[name], cached[name]) for name in ("image", "mask"))
    assert cached["boxes"].tolist() == [[[22, 4, 28, 9]]]


def test_other_data_or_another_chain_finds_nothing(digits: Path) -> None:
    train, val = opened(digits / "images"), ImageFolderSource(str(digits / "images" / "val"))
    stages = as_stages([DecodeImage(), CheckLabel(10)])
    again = as_stages([DecodeImage(), CheckLabel(10)])
    again_opened = opened(digits / "images").fingerprint()
    assert agree(train.fingerprint(), again_opened), "as far as there was time"
    prints = {source: source.fingerprint() for source in (train, val)}

    def key(source: Source, stages: Any, split: str = "train") -> str:
        return cache_key(split, prints[source], stages)

    assert key(train, stages) == key(train, again)
    grey, nine = [DecodeImage("L"), CheckLabel(10)], [DecodeImage(), CheckLabel(9)]
    others = [as_stages(grey), as_stages(nine)]
    keys = {key(train, stages), key(val, stages), *(key(train, other) for other in others)}
    assert len(keys | {key(train, stages, "val")}) == 5


def test_what_is_kept_ends_before_the_first_stage_that_draws_or_takes_batches() -> None:
    decode, crop = DecodeImage(), v2.RandomCrop(8)
    still = [decode, v2.Resize(32, antialias=True)]
    assert prefix_length(as_stages([*still, crop, v2.CenterCrop(8)])) == 2
    assert prefix_length(as_stages([decode, lambda batch: batch, v2.CenterCrop(8)])) == 1
    assert prefix_length(as_stages([decode, v2.CenterCrop(8)])) == 2
    says = "first stage RandomCrop is random, so nothing can be cached; put deterministic stages"
    with pytest.raises(UsageError, match=says):
        refuse_nothing_to_keep(as_stages([crop]))
    with pytest.raises(UsageError, match="chain is empty"):
        refuse_nothing_to_keep([])


def test_a_host_without_room_says_so_and_what_helps(root: Path) -> None:
    root.mkdir()
    with pytest.raises(CacheError, match=r"nothing can be cached in .* use data.cache disk or "):
        room(root, SPEC, reserved_bytes=2**50)
    free = shutil.disk_usage(root)
    assert room(root, CacheSpec("disk", "r"), 0) < free.free / 2
    assert room(root, CacheSpec("disk", "r", 10**6), 0) == 10**6
    assert room(root, CacheSpec("disk", "r", 10**15), 0) < free.free
    (root / "file").touch()
    with pytest.raises(CacheError, match="cannot be written"):
        HostCache(root / "file" / "x", "k", SPEC)


HOLDS_A_FOLDER = """
import sys, time
from pathlib import Path
from stoker.read.host_cache import PREFIX, open_root
from stoker.storage.checkpoint_store import Cleaner
open_root(Path(sys.argv[1]))
cleaner = Cleaner(Path(sys.argv[1]), PREFIX)
(Path(sys.argv[1]) / "kept").write_bytes(b"x")
print("ready", flush=True)
time.sleep(60)
"""


def test_nothing_is_left_when_the_run_is_killed(root: Path) -> None:
    command = [sys.executable, "-c", HOLDS_A_FOLDER, str(root)]
    options: Any = {"stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(command, **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        past = time.time() - 2 * LEFT_AFTER_S
        os.utime(root, (past, past))
        sweep(root.parent, PREFIX)
        assert (root / "kept").exists(), "another run's cleaner leaves it alone while its own lives"
        os.killpg(process.pid, signal.SIGKILL)
    until(lambda: not root.exists())


def test_what_a_dead_host_has_left_the_next_run_removes(root: Path) -> None:
    for name, age in (("old", 2 * LEFT_AFTER_S), ("new", 0.0), ("unlocked", 0.0)):
        folder = root.with_name(f"stoker-cache-{name}")
        (folder / "k").mkdir(parents=True)
        if name == "unlocked":  # its owner and what waited for the owner's end were killed
            (folder / OWNER).touch()
        os.utime(folder, (time.time() - age, time.time() - age))
    sweep(root.parent, PREFIX)
    assert [folder.name for folder in root.parent.glob("stoker-cache-*")] == ["stoker-cache-new"]


def test_an_epoch_that_goes_on_is_cut_as_it_began_whatever_the_cache_is_now() -> None:
    sources = {"train": read_range(9000)}
    settings = {"recipe": "r", "data": {"block_records": 100}, "seed": 4}
    plain = Passes(Config.model_validate(settings), sources, {})
    keeps = Passes(Config.model_validate(settings), sources, {}, SPEC, {"train": "k"})
    began = DataCursor(epoch=1, plan=keeps.identity("f"))
    assert (plain.identity("f").homes, began.plan.homes) == (0, 4)
    whole = [*keeps.shards(keeps.plan("train", 1, began))]
    assert whole == [*plain.shards(plain.plan("train", 1, began))]
    assert whole != [*plain.shards(plain.plan("train", 1, None))]


def work(*homes: str) -> deque[Work]:
    return deque(Work(number, Shard("", home=home)) for number, home in enumerate(homes))


def test_a_host_is_given_what_it_keeps_then_what_nobody_does_then_what_another_has() -> None:
    keeping = CacheAffinity("memory")

    def taken(left: Any, node: str, most: int = 1, look: int = LOOK_AHEAD) -> Any:
        works = keeping.take_work("train", left, node, most, look)
        return [(work.shard.home, work.store) for work in works]

    first = work("x", "y", "x", "z")
    assert taken(first, "a") == [("x", True)]
    assert taken(first, "b") == [("y", True)], "the next x is a's"
    assert taken(first, "a") == [("x", True)]
    second = work("y", "z", "x", "y")
    own = taken(second, "a", most=4)
    assert own == [("x", True), ("z", True)], "a task is not filled with another's"
    assert taken(second, "a", most=4) == [("y", False)]
    assert keeping.holder("val", Shard("", home="x")) == "", "each split has its own"
    assert taken(work("y", "x"), "a", most=2, look=1) == [("y", False), ("x", True)]
    keeping.hosts_are({"b"})
    assert taken(work("x"), "b", look=1) == [("x", True)], "what a lost host kept, another keeps"
    met = taken(work("", ""), "c", most=2)
    assert met == [("", True)] * 2, "without homes each keeps what it meets"
