"""What goes wrong around a `stoker.DataLoader` is told, and costs others nothing."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alike import equal
from PIL import Image, ImageFile
from test_loader_order import Records
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler, IterableDataset

from stoker import DataLoader
from stoker.errors import UsageError
from stoker.loader import connection
from stoker.loader.work import PAGES, LoaderSource, LoadRequest
from stoker.protocol import (
    Shard,
)
from stoker.serve.blocks.packing import unpack

pytestmark = pytest.mark.usefixtures("loader_in_this_process")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(20))


class Leaves(Records):
    def __getitem__(self, index: int) -> Any:
        return sys.exit(0) if index == 9 else torch.tensor(index)


def test_a_record_that_leaves_python_is_an_error_of_its_batch_alone() -> None:
    iterator = iter(DataLoader(Leaves(), batch_size=4))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(RuntimeError, match=r"SystemExit at index 9 \(batch 2\)"):
        next(iterator)
    assert next(iterator).tolist() == [12, 13, 14, 15]
    with pytest.raises(RuntimeError, match="SystemExit"):
        list(DataLoader(Leaves(), batch_size=4, on_error="quarantine", bad_record_budget=1.0))


def fails(worker: int) -> None:
    raise LookupError(f"not for {worker}")


def test_what_worker_init_fn_raises_comes_as_from_torch() -> None:
    with pytest.raises(LookupError, match=r"(?s)worker_init_fn\(0\).*not for 0"):
        next(iter(DataLoader(Records(), worker_init_fn=fails, num_workers=1)))


class FailsOnTheWay(IterableDataset[Any]):
    def __iter__(self) -> Any:
        self.at = iter(range(5))
        return self

    def __next__(self) -> int:
        if (number := next(self.at)) == 2:
            raise ValueError("the third")
        return number


@pytest.mark.parametrize("kind", [TorchLoader, DataLoader])
def test_an_iterable_dataset_that_goes_on_after_an_error_loses_nothing(kind: type[Any]) -> None:
    iterator = iter(kind(FailsOnTheWay(), batch_size=None))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(iterator)
    assert list(iterator) == [3, 4]


def breaks_off() -> Iterator[int]:
    yield from range(5)
    raise OSError("no more indices")


def test_what_a_sampler_raises_comes_behind_the_batches_before_it() -> None:
    found: list[int] = []
    with pytest.raises(OSError, match="no more indices"):
        found.extend(
            batch[1] for batch in DataLoader(Records(), batch_size=None, sampler=breaks_off())
        )
    assert found == [0, 1, 2, 3, 4]


class Countless(list[int]):
    def __len__(self) -> int:
        raise NotImplementedError


def test_a_state_of_more_batches_than_there_are_is_refused() -> None:
    loader = DataLoader(Records(), batch_size=4, sampler=Countless(range(43)))
    iterator = iter(loader)
    for _ in range(9):
        next(iterator)
    again = DataLoader(Records(), batch_size=4, sampler=Countless(range(20)))
    again.load_state_dict(loader.state_dict())
    for _ in range(2):  # the state is not used up by the pass that could not be opened
        with pytest.raises(ValueError, match="after 9 batches, but the sampler now has 5"):
            iter(again)


class Permuted(Countless):
    """Draws from a generator that no state includes."""

    drawn = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.drawn.permutation(43).tolist())


@pytest.mark.parametrize("kind", ["permuted", "distributed"])
def test_a_state_of_batches_that_the_sampler_no_longer_gives_is_refused(kind: str) -> None:
    """Records would be lost and repeated. States of versions that knew no digest are taken."""

    def sampler() -> Any:
        return Permuted() if kind == "permuted" else DistributedSampler(Records(), 1, 0)

    loader = DataLoader(Records(), batch_size=4, sampler=sampler())
    if kind == "distributed":
        loader.sampler.set_epoch(3)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    again = DataLoader(Records(), batch_size=4, sampler=sampler())
    again.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"after 2 batches, and the sampler now gives other .*set_epoch"
    ):
        iter(again)
    del state["place"]["indices"]
    again.load_state_dict(state)
    assert sum(1 for _ in again) == 9


@pytest.mark.parametrize(
    ("dataset", "arguments", "named"),
    [
        (Records(), {"batch_size": 8}, "batch_size 4 (here 8), batches 11 (here 6)"),
        (Records(20), {"batch_size": 4}, "records 43 (here 20)"),
        (
            Records(),
            {"batch_size": 4, "sampler": DistributedSampler(Records(86), 2, 0)},
            "world_size 1 (here 2)",
        ),
    ],
)
def test_a_state_within_a_pass_of_another_shape_is_refused(
    dataset: Any, arguments: dict[str, Any], named: str
) -> None:
    loader = DataLoader(Records(), batch_size=4)
    next(iter(loader))
    again = DataLoader(dataset, **arguments)
    with pytest.raises(ValueError, match=re.escape(named)):
        again.load_state_dict(loader.state_dict())
        iter(again)
    list(loader)
    again.load_state_dict(loader.state_dict())  # between two passes there is no position to lose
    assert len(list(again)) == len(again)


def test_a_loader_may_be_copied_in_the_midst_of_a_pass() -> None:
    loader = DataLoader(Records(), batch_size=4)
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))  # noqa: S301
    assert [batch[1].tolist() for batch in copy] == [batch[1].tolist() for batch in loader]


@pytest.mark.long
def test_accelerate_may_be_imported_after_a_loader_was_made() -> None:
    pytest.importorskip("accelerate")
    script = (
        "import sys; from stoker import DataLoader; loader = DataLoader(range(8), batch_size=4);"
        "assert 'accelerate' not in sys.modules; from accelerate import Accelerator;"
        "print(type(Accelerator(cpu=True).prepare(loader).base_dataloader).__module__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "stoker.loader.dataloader"


class NoLength(Records):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.long
def test_a_dataset_needs_no_length_where_a_sampler_is_given() -> None:
    loader = DataLoader(NoLength(), sampler=range(6), batch_size=3, on_error="quarantine")
    assert [batch[1].tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "option", [{"stall_timeout_s": 0}, {"stall_timeout_s": float("nan")}, {"bad_record_budget": 5}]
)
def test_an_option_out_of_its_range_is_refused(option: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match=rf"{next(iter(option))} is a .*, not {next(iter(option.values()))}"
    ):
        DataLoader(Records(), **option)


FORKS = """
import gc, os
from stoker import DataLoader

batches = iter(DataLoader([1, 2, 3, 4]))
next(batches), next(batches)
child = os.fork()
if child:
    os.wait()
del batches
gc.collect()
print("parent" if child else "child", os.path.exists(os.environ["STOKER_EVENTS"]), flush=True)
os._exit(0)
"""


def test_a_fork_that_lets_go_of_a_pass_does_not_end_it_for_its_parent(tmp_path: Path) -> None:
    """The report of a pass that has ended shows whose finalizers ran."""
    events = {"STOKER_EVENTS": str(tmp_path / "events.jsonl")}
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(
        command, env=os.environ | events, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["child", "False", "parent", "True"]


def test_an_address_where_nobody_answers_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: .*refused"):
        connection.connect("127.0.0.1:1")


def test_a_file_of_ranks_that_were_killed_is_not_taken_for_that_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(connection, "RANKS_WAIT_S", 0.1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    folder = tmp_path / f"stoker-ranks-{os.getuid()}"
    folder.mkdir(mode=0o700)
    file = folder / f"{os.getppid()}-.json"
    file.write_text("of a process that had this number")
    os.utime(file, (1e9, 1e9))
    with pytest.raises(UsageError, match="local rank 0 started no Ray cluster"):
        connection._with_other_ranks()


def test_what_killed_ranks_have_left_the_next_ones_remove(tmp_path: Path) -> None:
    own, other = f"{os.getppid()}-mine", f"{os.getpid()}-of-a-running-job"
    for name in (
        f"{own}.json",
        f"{own}.123",
        f"{other}.json",
        "4194305-killed.json",
        "4194305-killed.7",
    ):
        (tmp_path / name).touch()
    connection._forget_killed(tmp_path / f"{own}.json")
    assert [path.name for path in tmp_path.iterdir()] == [f"{other}.json"]


@pytest.mark.parametrize("failed", [False, True])
def test_the_rank_that_started_the_cluster_leaves_after_the_others_or_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    file = tmp_path / "1-none-localhost.json"
    file.touch()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        mark = file.with_suffix(f".{other.pid}")
        mark.touch()
        if failed:
            monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
        leaves = threading.Thread(target=connection._leave, args=(file, os.getpid()))
        leaves.start()
        leaves.join(60.0 if failed else 0.3)
        assert leaves.is_alive() != failed
    leaves.join(60.0)
    assert not leaves.is_alive() and not list(tmp_path.iterdir())


class Halves(Records):
    def __getitem__(self, index: int) -> Any:
        return (
            torch.ones(1) / 2,
            torch.tensor(0.1),
            ImageFile.LOAD_TRUNCATED_IMAGES,
            Image.MAX_IMAGE_PIXELS,
        )


def test_what_a_script_has_set_for_its_process_holds_for_its_batches_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
    with monkeypatch.context() as script:
        script.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        script.setattr(Image, "MAX_IMAGE_PIXELS", 7)
        torch.set_default_dtype(torch.float64)
        try:
            expected = next(iter(TorchLoader(Halves(), batch_size=4)))
            where, _, work = DataLoader(Halves(), batch_size=4)._packed()
        finally:
            torch.set_default_dtype(torch.float32)
    shard = Shard("batch 0", items=(LoadRequest(7, batches=((0, [0, 1, 2, 3]),)),))
    (record,) = LoaderSource((where, work)).read(shard, None)
    batch = unpack(record[PAGES].copy())[1].batch
    assert equal(batch, expected) and batch[1].dtype == torch.float64
    assert usual == (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)
    assert torch.get_default_dtype() == torch.float32
