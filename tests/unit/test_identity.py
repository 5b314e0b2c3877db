"""Other records are never taken for those that a cache holds or a checkpoint was written with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import spoilt
import torch
from damage import blocks, checked, tar_of
from draws import Listed, Plain
from pyarrow import parquet
from rows import Numbers
from torch.utils.data import TensorDataset

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.chain.stages import cache_key
from stoker.config.schema import Config
from stoker.data import read_any, read_parquet, read_torch, read_webdataset
from stoker.errors import CacheError, UsageError
from stoker.protocol import DataCursor, Plan
from stoker.read.host_cache import CacheSpec, HostCache
from stoker.read.identity import agree, identity_of
from stoker.read.sources import Source
from stoker.serve.cursor import refuse_other_data
from stoker.serve.opening import Data, open_data, plan_of
from stoker.serve.passes import Passes, ServiceState
from stoker.serve.recipe_pass import RecipeAttempt

pytestmark = pytest.mark.long


def job(recipe: str, **sections: Any) -> Config:
    common = {"recipe": f"draws:{recipe}", "train": {"epochs": 2}, "seed": 3}
    return Config.model_validate(common | sections)


def resume(before: Source, now: Source, order: str = "exact") -> None:
    plans = [plan(identity_of(source), order) for source in (before, now)]
    saved = DataCursor(epoch=0, rows=5, plan=plans[0]).model_dump_json()
    refuse_other_data(DataCursor.model_validate_json(saved), plans[1])


def plan(text: str, order: str = "any") -> Plan:
    return Plan(seed=1, shuffle=True, order=order, block_records=4, fingerprint=text)


def test_two_subsets_of_equal_length_have_caches_of_their_own() -> None:
    data = open_data(job("Halves", data={"cache": "memory"}))
    keys = {
        cache_key(split, data.identity(split), chain.stages[: chain.prefix])
        for split, chain in data.chains.items()
        if chain.prefix
    }
    assert len(keys) == 2


class Told(TensorDataset):
    def fingerprint(self) -> str:
        return str(self.tensors[0].sum().item())


def test_datasets_are_compared_by_type_length_and_their_own_fingerprint() -> None:
    ones, twos = torch.ones(40), torch.ones(40) * 2
    resume(read_torch(TensorDataset(ones)), read_torch(TensorDataset(ones.clone())))
    resume(read_torch(Told(ones)), read_torch(Told(ones.clone())))
    resume(Numbers(500), Numbers(500, shard=100))  # the same records in other shards
    for before, now in (
        (read_torch(TensorDataset(ones)), read_torch(TensorDataset(ones[1:]))),
        (read_torch(TensorDataset(ones)), read_torch([1] * 40)),
        (read_torch(Told(ones)), read_torch(Told(twos))),
        (Numbers(500), Numbers(501)),
    ):
        with pytest.raises(UsageError, match="the training data has changed"):
            resume(before, now)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_dataset_is_cached_only_if_it_is_declared_cacheable(kind: str) -> None:
    with pytest.raises(UsageError, match=r"data.cache: .*may draw random numbers .*cacheable=True"):
        open_data(job("Cached", data={"cache": kind}))
    open_data(job("Cached"))
    assert open_data(job("Halves", data={"cache": kind})).chains["train"].prefix


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is looked at must not depend on the machine."""
    monkeypatch.setattr("stoker.read.identity.BUDGET_S", 600.0)


def numbers(source: Source, cache: HostCache, epoch: int, share: float = 1.0) -> list[int]:
    chain = Chain(as_stages([Plain()]), seed=1, prefix=1, share=share)
    made = blocks(source, chain, source.shards(10, None), cache, epoch=epoch)
    return [number for columns, _ in made for number in columns["number"].tolist()]


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
    names = [(label, number) for label in ("cat", "dog") for number in range(20)]
    files = [(f"train/{label}/{i}.jpg", f"{label} {i:3}".encode() * 50) for label, i in names]
    spoilt.images(*files, classes="")(folder)
    return opened(folder)


def rows(folder: Path) -> Source:
    folder.mkdir()
    numbers = pa.table({"x": pa.array(range(1000), pa.int64()), "y": pa.array([0.5] * 1000)})
    parquet.write_table(numbers, folder / "train.parquet", compression=None, use_dictionary=False)
    return opened(folder)


def shards(folder: Path) -> Source:
    folder.mkdir()
    members = [(f"{i:03}.txt", b"text%02d" % i) for i in range(50)]
    (folder / "train-0.tar").write_bytes(tar_of(members))
    return opened(folder)


def opened(folder: Path, split: str = "train") -> Source:
    return checked(read_any(str(folder), split))


@pytest.mark.parametrize("make", [images, rows, shards])
def test_a_file_that_is_changed_in_place_is_noticed_at_equal_size(
    make: Callable[[Path], Source], tmp_path: Path
) -> None:
    before = make(tmp_path / "data")
    text = identity_of(before)
    copied = tmp_path / "copy"
    shutil.copytree(tmp_path / "data", copied)
    assert identity_of(opened(copied)) == text, "the data may move"
    file = sorted(f for f in copied.rglob("*") if f.is_file())[-1]
    content = bytearray(file.read_bytes())
    at = content.find(b"text49") + 5 if make is shards else len(content) // 3
    content[at] ^= 1
    file.write_bytes(content)
    says = "names, sizes and counts agree, but not what the records hold"
    with pytest.raises(UsageError, match=says):
        changed = opened(copied)
        assert not agree(text, identity_of(changed))
        refuse_other_data(DataCursor(epoch=0, plan=plan(text)), plan(identity_of(changed)))


def test_validation_images_in_other_classes_are_refused_on_resume_and_may_move(
    tmp_path: Path,
) -> None:
    def planned(folder: Path) -> tuple[Passes, Plan]:
        sources = {split: opened(folder, split) for split in ("train", "val")}
        data = Data(sources, {"train": Chain([], 0)}, {})
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


def test_contents_that_two_files_have_exchanged_are_noticed(tmp_path: Path) -> None:
    text = identity_of(images(tmp_path / "data"))
    one, other = (tmp_path / "data/train/cat" / name for name in ("3.jpg", "4.jpg"))
    one.rename(tmp_path / "x"), other.rename(one), (tmp_path / "x").rename(other)
    assert not agree(text, identity_of(opened(tmp_path / "data")))


def test_other_columns_of_the_same_files_are_other_records(tmp_path: Path) -> None:
    rows(tmp_path / "data")
    texts = []
    for columns in (["x"], ["y"], None):
        source = checked(read_parquet(str(tmp_path / "data"), "train", columns))
        texts.append(identity_of(source))
    assert len(set(texts)) == 3
    shards(tmp_path / "tar")
    labels = [
        identity_of(checked(read_webdataset(tmp_path / "tar", "train", label=label)))
        for label in (None, "text", "folder")
    ]
    assert len(set(labels)) == 3, "the same files with another label"


def test_two_samples_agree_as_far_as_both_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One machine is slower than the other, so it looks at less within the same time.
    before = images(tmp_path / "data")
    whole = identity_of(before)
    monkeypatch.setattr("stoker.read.identity.BUDGET_S", 0.0)
    little = identity_of(before)
    assert len(little) < len(whole)
    assert agree(little, whole) and agree(whole, little)
    assert not agree(little, "0" + whole[1:])
