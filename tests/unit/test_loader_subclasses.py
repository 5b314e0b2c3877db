"""Subclasses of torch's loader after `stoker.replace_torch_loader()`; batches are made in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import stoker


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_LOADER", "process")
    for name in ("__iter__", "_get_iterator"):
        monkeypatch.setattr(DataLoader, name, getattr(DataLoader, name))
    stoker.replace_torch_loader()


class Repeated:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class ForAllEpochs(DataLoader[Any]):
    """As timm's and Ultralytics': one iterator, its batch sampler replaced after construction."""

    iterator: Any = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        if self.iterator is None:
            self.iterator = self.begin()
        for _ in range(len(self)):
            yield next(self.iterator)

    def begin(self) -> Any:
        return super().__iter__()


class WithoutIter(ForAllEpochs):
    def begin(self) -> Any:
        return self._get_iterator()


@pytest.mark.parametrize("kind", [ForAllEpochs, WithoutIter])
def test_one_iterator_for_all_epochs_is_stokers(kind: type[ForAllEpochs]) -> None:
    loader = kind(list(range(7)), batch_size=2)
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6]]
    assert isinstance(loader, kind)
    assert isinstance(loader, stoker.DataLoader)


def orders(workers: int, ahead: int) -> list[list[list[int]]]:
    """Of four epochs in which the loop draws from torch's generator, too."""
    torch.manual_seed(0)
    loader = ForAllEpochs(
        list(range(11)),
        batch_size=2,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=ahead if workers else None,
    )
    epochs = []
    for _ in range(4):
        epochs.append([[*batch.tolist(), int(torch.randint(9, ()))] for batch in loader])
        torch.rand(3)
    return epochs


@pytest.mark.parametrize(("workers", "ahead"), [(0, 0), (1, 1), (2, 2), (3, 7)])
def test_a_sampler_that_repeats_draws_between_epochs_as_with_torch(
    workers: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = orders(workers, ahead)
    monkeypatch.undo()
    assert orders(workers, ahead) == ours
    assert all(sorted(i for b in epoch for i in b[:-1]) == list(range(11)) for epoch in ours)


class Doubled(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return (2 * batch for batch in super()._get_iterator())


def test_iterators_of_its_own_are_left_alone() -> None:
    loader = Doubled(list(range(4)), batch_size=2)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    assert not isinstance(loader, stoker.DataLoader)
