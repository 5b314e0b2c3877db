"""Other records are never taken for those that a cache holds or a checkpoint was written with."""

from __future__ import annotations

import io
import pickle
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import torch
from damage import checked
from draws import Augmenting, Lazy, Listed, Plain, Unsteady
from pyarrow import parquet
from rows import Numbers
from torch.utils.data import Subset, TensorDataset

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.chain.stages import cache_key
from stoker.config.schema import Config
from stoker.data import read_any, read_images, read_parquet, read_torch
from stoker.errors import CacheError, UsageError
from stoker.protocol import DataCursor, PassPlan, Plan, Work
from stoker.read.host_cache import CacheSpec, HostCache
from stoker.read.identity import agree, identity_of
from stoker.read.sources import Source
from stoker.serve.cursor import refuse_other_data
from stoker.serve.opening import Data, exact_note, open_data, plan_of
from stoker.serve.passes import Passes, ServiceState
from stoker.serve.recipe_pass import RecipeAttempt
from stoker.serve.shards import LoadedSplit, blocks_of

pytestmark = pytest.mark.long


def job(recipe: str, **sections: Any) -> Config:
    train = {"epochs": 2}
    return Config.model_validate(
        {"recipe": f"draws:{recipe}", "train": train, "seed": 3, **sections}
    )


def resume(before: Source, now: Source, order: str = "exact") -> None:
    plans = []
    for source in (before, now):
        identity = identity_of(source)
        plans.append(
            Plan(
                seed=1,
                shuffle=True,
                order=order,
                block_records=4,
                fingerprint=identity.text,
                unstable=identity.unstable,
            )
        )
    saved = DataCursor(epoch=0, rows=5, plan=plans[0]).model_dump_json()
    refuse_other_data(DataCursor.model_validate_json(saved), plans[1])


def test_two_subsets_of_equal_length_have_caches_of_their_own() -> None:
    data = open_data(job("Halves", data={"cache": "memory"}))
    keys = {
        cache_key(split, data.identity(split).text, chain.stages[: chain.prefix])
        for split, chain in data.chains.items()
        if chain.prefix
    }
    assert len(keys) == 2
    # Not only for their names: what they hold tells them apart.
    assert not agree(data.identity("train").text, data.identity("val").text)


def test_a_dataset_of_equal_type_and_length_with_other_records_is_refused() -> None:
    before = open_data(job("Halves")).sources["train"]
    same = open_data(job("Halves")).sources["train"]
    resume(before, same)
    other = open_data(job("Halves", params={"shift": 1})).sources["train"]
    with pytest.raises(UsageError, match="the training data has changed"):
        resume(before, other)


def test_the_state_of_a_dataset_counts_where_the_sample_would_not_show_it() -> None:
    pixels, labels = torch.zeros(5000, 3), torch.arange(5000)
    before = read_torch(TensorDataset(pixels, labels))
    resume(before, read_torch(TensorDataset(pixels.clone(), labels.clone())))
    changed = labels.clone()
    changed[4321] = 7
    with pytest.raises(UsageError, match="the training data has changed"):
        resume(before, read_torch(TensorDataset(pixels, changed)))
    indices = list(range(4000))
    part = read_torch(Subset(TensorDataset(pixels, labels), indices))
    moved = read_torch(Subset(TensorDataset(pixels, labels), [*indices[:-1], 4999]))
    with pytest.raises(UsageError, match="the training data has changed"):
        resume(part, moved)


class Shifted(Numbers):
    shift = 0

    def read(self, shard: Any, order: Any) -> Any:
        for record in super().read(shard, order):
            yield {**record, "y": record["y"] + self.shift}


def test_a_source_of_the_users_own_is_told_by_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Shifted(500)
    resume(before, Shifted(500))
    text = identity_of(before).text
    monkeypatch.setattr(Shifted, "shift", 1)
    assert not agree(text, identity_of(before).text)
    with pytest.raises(UsageError, match="the training data has changed"):
        resume(Numbers(500), Numbers(500, shard=100))  # the same records in other shards


def test_a_dataset_that_draws_from_global_generators_can_be_resumed_but_not_cached() -> None:
    resume(read_torch(Augmenting(40)), read_torch(Augmenting(40)))
    with pytest.raises(
        UsageError, match=r"Augmenting draws random numbers .*repeat the first epoch's"
    ):
        open_data(job("Cached", data={"cache": "memory"}))
    open_data(job("Cached"))


def test_a_dataset_that_nobody_can_seed_is_neither_cached_nor_resumed_exactly() -> None:
    with pytest.raises(UsageError, match=r"data.cache: .*Unsteady draws random numbers"):
        open_data(job("FromUnsteady", data={"cache": "disk"}))
    with pytest.raises(
        UsageError, match=r"resume: Unsteady returns a different record at.*exactly"
    ):
        resume(read_torch(Unsteady()), read_torch(Unsteady()))
    # Where the order is free, type, length and state are what there is to compare.
    resume(read_torch(Unsteady()), read_torch(Unsteady()), "any")
    with pytest.raises(UsageError, match="the training data has changed"):
        resume(read_torch(Unsteady()), read_torch(Unsteady(41)), "any")


def saved(data: Data, order: str) -> Plan:
    found = Config.model_validate({"data": {"order": order}})
    return plan_of(Passes(found, data.sources, {}), data)


@pytest.mark.parametrize("where", ["dataset", "source", "transform", "batch"])
def test_seeded_draws_can_be_made_again(where: str) -> None:
    data = open_data(job("Chained", params={"where": where}))
    exact = DataCursor(epoch=0, rows=5, plan=saved(data, "exact"))
    assert data.notes() == [] and exact_note(job("Chained", data={"order": "exact"}), data) == ""
    refuse_other_data(exact, exact.plan)


def test_of_a_dataset_that_nobody_can_seed_no_stage_is_blamed() -> None:
    data = open_data(job("FromUnsteady"))
    assert data.notes() == [] and "Unsteady returns" in exact_note(
        job("", data={"order": "exact"}), data
    )


def test_looking_at_a_dataset_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"abcde")
    dataset = Lazy(str(tmp_path / "bytes"))
    state = np.random.get_state()[1].tolist()
    here = identity_of(read_torch(dataset))
    assert dataset.file is None, "an open file could not be sent to other processes"
    pickle.dumps(dataset)
    assert np.random.get_state()[1].tolist() == state
    # Where the data lies is no part of what it is.
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "bytes", tmp_path / "elsewhere" / "bytes")
    assert (
        identity_of(read_torch(Lazy(str(moved)))).text.partition("~")[2]
        == here.text.partition("~")[2]
    )


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is looked at must not depend on the machine."""
    monkeypatch.setattr("stoker.read.identity.BUDGET_S", 600.0)


def numbers(source: Source, cache: HostCache, epoch: int, share: float = 1.0) -> list[int]:
    loaded = LoadedSplit(source, Chain(as_stages([Plain()]), seed=1, prefix=1, share=share), cache)
    plan = PassPlan(seed=1, epoch=epoch, split="train", shuffle=False, block_records=10)
    found: list[int] = []
    for number, shard in enumerate(source.shards(10, None)):
        for columns, _ in blocks_of(loaded, plan, Work(number, shard)):
            found += columns["number"].tolist()
    return found


def test_a_cache_gives_every_shard_its_own_records(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "cache", "k", CacheSpec("disk", "test", 10**8))
    for epoch in range(2):
        assert numbers(Listed(40), cache, epoch) == list(range(40))


@pytest.mark.parametrize("share", [1.0, 1e-9])
def test_records_that_give_themselves_the_numbers_of_others_are_refused_by_a_cache(
    tmp_path: Path, share: float
) -> None:
    items = [{"key": str(9 - i), "number": i} for i in range(10)]
    cache = HostCache(tmp_path / "cache", "k", CacheSpec("disk", "test", 10**8))
    with pytest.raises(CacheError, match=r"data.cache: record 0 gives itself the key '9'"):
        numbers(read_torch(items), cache, 0, share)
    plain = [{"number": i} for i in range(10)]
    for epoch in range(2):
        assert numbers(read_torch(plain), cache, epoch, share) == list(range(10))


@pytest.mark.parametrize("share", [1.0, 1e-9])
def test_two_records_of_one_key_are_refused_by_a_cache(tmp_path: Path, share: float) -> None:
    cache = HostCache(tmp_path / "cache", "k", CacheSpec("disk", "test", 10**8))
    with pytest.raises(CacheError, match="two records have the key k0"):
        numbers(Listed(40, keys=5), cache, 0, share)


def images(folder: Path) -> Source:
    for label in ("cat", "dog"):
        (folder / "train" / label).mkdir(parents=True)
        for i in range(20):
            (folder / "train" / label / f"{i}.jpg").write_bytes(f"{label} {i:3}".encode() * 50)
    source = read_images(str(folder), "train")
    assert source is not None
    return source


def rows(folder: Path) -> Source:
    folder.mkdir()
    numbers = pa.table({"x": pa.array(range(1000), pa.int64()), "y": pa.array([0.5] * 1000)})
    parquet.write_table(numbers, folder / "train.parquet", compression=None, use_dictionary=False)
    return opened(folder)


def shards(folder: Path) -> Source:
    folder.mkdir()
    with tarfile.open(folder / "train-0.tar", "w") as tar:
        for i in range(50):
            member = tarfile.TarInfo(f"{i:03}.txt")
            member.size = 6
            tar.addfile(member, io.BytesIO(b"text%02d" % i))
    return opened(folder)


def opened(folder: Path, split: str = "train") -> Source:
    return checked(read_any(str(folder), split))


@pytest.mark.parametrize("make", [images, rows, shards])
def test_a_file_that_is_changed_in_place_is_noticed_at_equal_size(
    make: Callable[[Path], Source], tmp_path: Path
) -> None:
    before = make(tmp_path / "data")
    text = identity_of(before).text
    copied = tmp_path / "copy"
    shutil.copytree(tmp_path / "data", copied)
    assert identity_of(opened(copied)).text == text, "the data may move"
    file = sorted(f for f in copied.rglob("*") if f.is_file())[-1]
    content = bytearray(file.read_bytes())
    at = content.find(b"text49") + 5 if make is shards else len(content) // 3
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        UsageError, match="names, sizes and counts agree, but not what the records hold"
    ):
        changed = opened(copied)
        assert not agree(text, identity_of(changed).text)
        refuse_other_data(DataCursor(epoch=0, plan=plan(text)), plan(identity_of(changed).text))


def test_validation_images_in_other_classes_are_refused_on_resume_and_may_move(
    tmp_path: Path,
) -> None:
    def planned(folder: Path) -> tuple[Passes, Plan]:
        data = Data(
            {split: opened(folder, split) for split in ("train", "val")},
            {"train": Chain([], 0)},
            {},
        )
        passes = Passes(Config.model_validate({"train": {"epochs": 2}}), data.sources, {})
        return passes, plan_of(passes, data)

    images(tmp_path / "data")
    shutil.copytree(tmp_path / "data/train", tmp_path / "data/val")
    passes, plan = planned(tmp_path / "data")
    shared = ServiceState(lambda _: None, 0, {})
    attempt = RecipeAttempt(
        0, 1, passes, {"train": 40, "val": 40}, DataCursor(epoch=0, plan=plan), shared
    )
    saved = [attempt.open["train", epoch].position(0, 0) for epoch in range(2)]
    _, moved = planned(Path(shutil.copytree(tmp_path / "data", tmp_path / "moved")))
    (tmp_path / "data/val/cat/3.jpg").rename(tmp_path / "data/val/dog/30.jpg")
    _, changed = planned(tmp_path / "data")
    for position in saved:
        refuse_other_data(position, moved)
        with pytest.raises(UsageError, match="the validation data has changed"):
            refuse_other_data(position, changed)


def plan(text: str) -> Plan:
    return Plan(seed=1, shuffle=True, order="any", block_records=4, fingerprint=text)


def test_contents_that_two_files_have_exchanged_are_noticed(tmp_path: Path) -> None:
    text = identity_of(images(tmp_path / "data")).text
    one, other = (tmp_path / "data/train/cat" / name for name in ("3.jpg", "4.jpg"))
    one.rename(tmp_path / "x"), other.rename(one), (tmp_path / "x").rename(other)
    assert not agree(text, identity_of(opened(tmp_path / "data")).text)


def test_other_columns_of_the_same_files_are_other_records(tmp_path: Path) -> None:
    rows(tmp_path / "data")
    texts = []
    for columns in (["x"], ["y"], None):
        texts.append(
            identity_of(checked(read_parquet(str(tmp_path / "data"), "train", columns))).text
        )
    assert len(set(texts)) == 3


def test_two_samples_agree_as_far_as_both_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One machine is slower than the other, so it looks at less within the same time.
    before = images(tmp_path / "data")
    whole = identity_of(before).text
    monkeypatch.setattr("stoker.read.identity.BUDGET_S", 0.0)
    little = identity_of(before).text
    assert len(little) < len(whole)
    assert agree(little, whole) and agree(whole, little)
    assert not agree(little, "0" + whole[1:])


class Slow(Augmenting):
    reads: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.1)
        self.reads.append(index)
        return super().__getitem__(index)


def test_of_a_slow_dataset_no_more_is_read_than_a_second_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker.read.identity.BUDGET_S", 0.25)
    identity_of(read_torch(Slow(1000)))
    assert len(Slow.reads) == 3 * 2, "two records, each of them thrice"


def test_many_numbers_in_many_shards_take_little_time() -> None:
    labels = torch.zeros(1_000_000, dtype=torch.int64)
    started = time.process_time()
    identity_of(read_torch(TensorDataset(labels, labels)))
    assert time.process_time() - started < 5
