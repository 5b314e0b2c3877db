"""Script: `stoker.offload`: iterators that are no DataLoader, made on every CPU of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from stoker.loader.dataloader import DataLoader
from stoker.read.sources import restore_generators, states

Item = TypeVar("Item", covariant=True)


class Offload(Iterator[Item]):
    """An iterator whose items come from workers on the cluster, one of each worker in turn.

    The first `next()` starts the workers. After StopIteration the next call, or `iter()`, begins another pass.
    """

    def __init__(self, loader: DataLoader[Item]) -> None:
        self.loader = loader
        self._pass: Any = None

    def __next__(self) -> Item:
        self._start()
        try:
            item: Item = next(self._pass)
        except StopIteration:
            self.close()
            raise
        return item

    def _start(self) -> None:
        if self._pass is None:
            self._pass = iter(self.loader)

    def close(self) -> None:
        """End the workers' streams, endless ones too; the end of the process does the same."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None


def offload(
    make_iterator: Callable[[int], Iterable[Item]],
    workers: int = 1,
    endless: bool = False,
    **options: Any,
) -> Offload[Item]:
    """Make the items of an iterator on the cluster's CPUs: an endless generator, an augmenter, a `next()` loop.

        batches = stoker.offload(lambda worker: crops(folder), workers=32, endless=True)

    Each worker calls `make_iterator` with its number, 0 to `workers - 1`, and is one stream on a CPU of the
    cluster. Items arrive as they are (arrays stay arrays), those of each worker in order and the workers
    taking turns, as from torch's DataLoader with that many workers. An item is copied before the worker makes
    the next one, so it may be a buffer that is used again. An error is raised where its item would come.

    `random`, NumPy and torch are seeded in each worker as by torch's DataLoader, so `torch.manual_seed` makes a
    run reproducible. A worker whose host is lost starts again elsewhere. It makes its items again up to those
    that the script has, and must give the same ones, or the pass fails; an endless one begins anew, seeded
    differently.

    Args:
        make_iterator: is sent to the workers; open files and connections in it, not before.
        workers: streams, of which each needs one CPU.
        endless: whether the iterators draw items at random for ever, so that none of them is to be repeated.
        **options: `address` and `stall_timeout_s` of `stoker.DataLoader`; its `pin_memory`, too.
    """
    if workers < 1:
        raise ValueError(f"workers is a number from 1, not {workers!r}")
    return Offload(_loader(_Streams(make_iterator), workers, endless, **options))


class MultiThreadedAugmenter(Offload[Any]):
    """Takes the place of batchgenerators' MultiThreadedAugmenter and NonDetMultiThreadedAugmenter.

        import nnunetv2.training.nnUNetTrainer.nnUNetTrainer as nnunet
        nnunet.NonDetMultiThreadedAugmenter = stoker.MultiThreadedAugmenter

    Worker i calls `data_loader.set_thread_id(i)` and then `next(data_loader)`, as theirs does; batches of the
    workers take turns. If `data_loader.infinite` is set, as nnU-Net's is, a worker whose host is lost begins
    anew with other draws; otherwise it makes its batches again. Data on local paths must have the same paths on
    the CPU hosts.

    Args:
        data_loader: theirs, or any iterator with `set_thread_id`.
        transform: is called with the items of each batch as keyword arguments.
        num_processes: workers, which are streams on the cluster's CPUs.
        num_cached, wait_time, num_cached_per_queue, timeout: without effect; batches are read ahead as from
            `stoker.DataLoader`.
        seeds: of NumPy's generator in each worker, as theirs; None draws them from torch's. Python's and torch's
            generators, which are alike in all their processes, differ here.
        pin_memory: as in torch's DataLoader.
    """

    def __init__(
        self,
        data_loader: Any,
        transform: Callable[..., Any] | None,
        num_processes: int,
        num_cached: int = 2,
        seeds: Sequence[int] | None = None,
        pin_memory: bool = False,
        wait_time: float = 0.02,
        *,
        num_cached_per_queue: int = 2,
        timeout: float = 10,
    ) -> None:
        if seeds is not None and len(seeds) != num_processes:
            raise ValueError(f"seeds has {len(seeds)} for {num_processes} processes; give one each")
        self._new = partial(
            _loader,
            _Augmented(data_loader, transform, seeds),
            num_processes,
            endless=getattr(data_loader, "infinite", False),
            pin_memory=pin_memory,
            persistent_workers=True,
        )
        super().__init__(self._new())

    def next(self) -> Any:
        return next(self)

    def restart(self) -> None:
        self._finish()
        self._start()

    def _finish(self, timeout: float = 10) -> None:
        """End the workers; the next ones begin anew, with a copy of `data_loader` as it is here."""
        self.close()
        self.loader = self._new()


def _loader(
    streams: IterableDataset[Any], workers: int, endless: bool, **options: Any
) -> DataLoader[Any]:
    loader = DataLoader(
        streams, batch_size=None, num_workers=workers, collate_fn=_as_it_is, **options
    )
    loader.endless = endless
    return loader


def _as_it_is(item: Any) -> Any:
    return item


class _Streams(IterableDataset[Any]):
    def __init__(self, make_iterator: Callable[[int], Iterable[Any]]) -> None:
        self.make_iterator = make_iterator

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make_iterator(get_worker_info().id))  # type: ignore[union-attr]


class _Augmented(IterableDataset[Any]):
    def __init__(
        self, data_loader: Any, transform: Callable[..., Any] | None, seeds: Sequence[int] | None
    ) -> None:
        self.data_loader, self.transform, self.seeds = data_loader, transform, seeds
        self.left: dict[str, Any] | None = None
        """The global generators where the pass before ended: theirs go on in the same process."""
        self.first = 0
        """Number of the first batch of a stream that begins anew; its draws are seeded already."""

    def __iter__(self) -> Iterator[Any]:
        if self.left is not None:
            restore_generators(self.left)
        else:
            worker = get_worker_info().id  # type: ignore[union-attr]
            if self.seeds is not None and not self.first:
                np.random.seed(self.seeds[worker])
            self.data_loader.set_thread_id(worker)
        while True:
            try:
                item = next(self.data_loader)
            except StopIteration:
                self.left = states()
                return
            yield item if self.transform is None else self.transform(**item)
