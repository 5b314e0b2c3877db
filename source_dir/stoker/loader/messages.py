"""What a script and chain workers tell each other about the batches of a `stoker.DataLoader`."""

from __future__ import annotations

from typing import Any, NamedTuple


class Failed(NamedTuple):
    """Chain worker → script: why a batch could not be made."""

    kind: type[BaseException]
    where: str
    """Index or batch, and host."""
    words: str
    """The traceback."""
    chain: tuple[int, int] = (0, 0)
    """Of a stream: digests of its batches before this one, and with it; see digests.py."""


class Made(NamedTuple):
    """Chain worker → script: a batch."""

    batch: Any
    bad: tuple[tuple[Any, str], ...] = ()
    """Index and reason of each skipped record."""
    empty: bool = False
    """Whether all records were skipped."""
    ended: bool = False
    """Not a batch, but the end of a stream."""
    chain: tuple[int, int] = (0, 0)
    """See `Failed`."""


class Order(NamedTuple):
    """Script → chain worker: batches of a map-style dataset, or one worker's part of an iterable dataset."""

    base_seed: int
    worker: int = 0
    """Iterable dataset: `get_worker_info().id`."""
    batches: tuple[tuple[int, Any], ...] = ()
    """Number and indices of each batch."""
    passes: int = 0
    """Earlier passes with the same `base_seed`, which `persistent_workers` keeps, as torch does."""
    served: int = 0
    """Passes that the copies of an iterable dataset have served, with `persistent_workers`."""
    shared_seed: int = 0
    """Seeds the shuffling of DataPipes alike in all workers and ranks."""
    ranks: tuple[int, int] = (1, 0)
    """World size and rank, which `sharding_filter` divides by."""

    @property
    def seed(self) -> str:
        """What all draws of the pass depend on."""
        return f"{self.base_seed}.{self.passes}" if self.passes else f"{self.base_seed}"
