"""`stoker.offload` on a real Ray cluster: streams of any iterators, as their frameworks make them."""

from __future__ import annotations

import itertools
import operator
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, get_worker_info

import stoker
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Reused(Iterator[Any]):
    """As nnU-Net's data loader: endless, numbered by its framework, with buffers for all batches."""

    def __init__(self, infinite: bool = True) -> None:
        self.thread, self.made, self.left = 0, 0, -1 if infinite else 5
        self.buffer = np.zeros((2, 3), np.float32)
        self.target = [torch.zeros(2), torch.zeros(3)]

    def set_thread_id(self, thread: int) -> None:
        self.thread = thread

    def __next__(self) -> Any:
        if self.left == 0:
            self.left = 5
            raise StopIteration
        self.left -= 1
        self.made += 1
        self.buffer[:] = np.random.rand(2, 3)
        for target in self.target:
            target.fill_(self.made)
        return {"data": self.buffer, "target": self.target, "keys": [self.thread, self.made]}


def plain(item: Any) -> Any:
    return item["data"].tolist(), [each.tolist() for each in item["target"]], item["keys"]


def doubled(data: Any, **rest: Any) -> Any:
    return {"data": data * 2, **rest}


def theirs(seed: int, thread: int, count: int, infinite: bool = True) -> list[Any]:
    """What a process of batchgenerators makes, its passes one after the other."""
    np.random.seed(seed)
    loader = Reused(infinite)
    loader.set_thread_id(thread)
    made: list[Any] = []
    while len(made) < count:
        try:
            made.append(plain(doubled(**next(loader))))
        except StopIteration:
            continue
    return made


def test_an_augmenter_gives_the_batches_of_batchgenerators_processes_by_turns() -> None:
    augmenter = stoker.MultiThreadedAugmenter(Reused(), doubled, 3, seeds=[5, 6, 7])
    augmenter._start()
    found = [augmenter.next() for _ in range(12)]
    assert isinstance(found[0]["data"], np.ndarray) and found[0]["target"][1].shape == (3,)
    wanted = [theirs(seed, thread, 4) for thread, seed in enumerate([5, 6, 7])]
    assert [plain(item) for item in found] == [each[n] for n in range(4) for each in wanted]
    augmenter.restart()
    assert plain(next(augmenter)) == wanted[0][0]
    augmenter._finish()
    until(lambda: ray.available_resources().get("CPU", 0) >= 2)


def test_an_augmenter_that_ends_goes_on_with_its_next_pass() -> None:
    augmenter = stoker.MultiThreadedAugmenter(Reused(infinite=False), doubled, 2, seeds=[1, 2])
    passes = [[plain(item) for item in augmenter] for _ in range(2)]
    wanted = [theirs(seed, thread, 10, infinite=False) for thread, seed in enumerate([1, 2])]
    for nth, found in enumerate(passes):
        expected = [each[n] for n in range(5 * nth, 5 * nth + 5) for each in wanted]
        assert found == expected, f"pass {nth}"
    augmenter._finish()


def numbers(worker: int) -> Iterator[Any]:
    for n in range(3 + 4 * worker):
        yield {
            "at": np.array([worker, n]),
            "drawn": (random.random(), np.random.rand(), torch.rand(2)),
        }


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return numbers(get_worker_info().id)  # type: ignore[union-attr]


def listed(items: Any) -> list[Any]:
    return [(i["at"].tolist(), i["drawn"][:2], i["drawn"][2].tolist()) for i in items]


def test_streams_of_unequal_length_are_those_of_torchs_workers_in_each_pass() -> None:
    torch.manual_seed(3)
    loader = TorchLoader(Numbers(), batch_size=None, num_workers=2, collate_fn=lambda item: item)
    wanted = [listed(loader) for _ in range(2)]
    torch.manual_seed(3)
    offloaded = stoker.offload(numbers, workers=2)
    assert [listed(offloaded) for _ in range(2)] == wanted
    assert wanted[0] != wanted[1]


def breaks(worker: int) -> Iterator[Any]:
    yield from range(4)
    raise KeyError("no such case")


def test_an_error_is_raised_where_its_item_would_come() -> None:
    offloaded = stoker.offload(breaks)
    assert [next(offloaded) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="no such case"):
        next(offloaded)


def test_numbers_of_workers_and_seeds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="workers is a number from 1"):
        stoker.offload(breaks, workers=0)
    with pytest.raises(ValueError, match="seeds has 1 for 2 processes"):
        stoker.MultiThreadedAugmenter(Reused(), None, 2, seeds=[1])


def draws(worker: int) -> Iterator[Any]:
    """Of a process: itself, how many it has drawn before, and a draw of each generator."""
    for n in itertools.count():
        yield worker, os.getpid(), n, random.random(), np.random.rand(), float(torch.rand(()))


class Infinite(Iterator[Any]):
    """As nnU-Net's data loader, which declares that it is endless."""

    infinite = True

    def set_thread_id(self, thread: int) -> None:
        self.draws = draws(thread)

    def __next__(self) -> Any:
        return {"item": next(self.draws)}


@pytest.mark.parametrize(
    "start",
    [
        lambda: stoker.offload(draws, workers=2, endless=True),
        lambda: map(
            operator.itemgetter("item"),
            stoker.MultiThreadedAugmenter(Infinite(), None, 2, seeds=[1, 2]),
        ),
    ],
    ids=["offload", "augmenter"],
)
def test_an_endless_stream_whose_process_is_lost_begins_anew_with_other_draws(start: Any) -> None:
    items = start()
    found = [next(items) for _ in range(60)]
    lost = found[-1][1]
    os.kill(lost, signal.SIGKILL)
    while found[-1][1] == lost or found[-2][1] == lost:
        found.append(next(items))
        assert len(found) < 400
    assert [item[0] for item in found] == [0, 1] * (len(found) // 2), "workers take turns"
    later = [item for item in found if item[1] != lost and item[0] == found[59][0]]
    assert later[0][2] == 0, "it does not repeat what the script has"
    for draw in (3, 4, 5):
        assert len({item[draw] for item in found}) == len(found), "no draw twice"
