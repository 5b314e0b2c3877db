"""one pass of the real data pipeline, consumed in this process, for measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.config.schema import Config
from stoker.read.sources import Source
from stoker.serve.blocks.client import open_transport
from stoker.serve.opening import Data, start_coordinator
from stoker.train.feed import Feed

JOIN_S = 10.0


def one_pass(
    config: Config, source: Source, chain: list[Any], device: Any
) -> AbstractContextManager[Feed]:
    """Laptop, connected to a cluster: a pass over `source` with coordinator, chain tasks and feed.

    Args:
        config: provides `data`, `train.batch_size` and the seed.
        source: the records.
        chain: as returned by a recipe's `preprocess`.
        device: target device of the batches.
    """
    data = Data(
        sources={"train": source},
        chains={"train": Chain(as_stages(chain), config.seed)},
        totals={"train": source.count()},
    )
    return pass_over(config, data, device)


@contextmanager
def pass_over(config: Config, data: Data, device: Any) -> Iterator[Feed]:
    """Laptop, connected to a cluster: one pass over the training split of opened data."""
    import ray

    config = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 1})})
    coordinator = start_coordinator(config, data, workers=1)
    try:
        # Requested by start_coordinator already; wait until it is done.
        ray.get(coordinator.begin.remote(coordinator, 0, 1, 0), timeout=600)
        yield Feed(
            coordinator=coordinator,
            attempt=0,
            device=device,
            transport=open_transport(coordinator, config.data, device),
            data=config.data,
            join_s=JOIN_S,
        )
    finally:
        ray.kill(coordinator)
