"""Head: the deterministic prefix of a chain, whose results hosts may cache."""

from __future__ import annotations

from stoker.chain.stages import Stage
from stoker.errors import UsageError
from stoker.read.base import digest


def prefix_length(stages: list[Stage]) -> int:
    """Head: number of leading stages that give a record the same result in every epoch."""
    for position, stage in enumerate(stages):
        if stage.random or stage.per != "record":
            return position
    return len(stages)


def refuse_nothing_to_keep(stages: list[Stage]) -> None:
    """Head: refuse a training chain whose first stage is random, because nothing could be cached.

    Raises:
        UsageError: names that stage.
    """
    if prefix_length(stages):
        return
    if not stages:
        raise UsageError("data.cache: the training chain is empty, so nothing can be cached; use none")
    first = stages[0]
    why = "is random" if first.random else "works on batches"
    raise UsageError(
        f"cannot cache: the first stage {first.name} {why}; put deterministic stages (random = False) first"
        " or set data.cache=none"
    )


def key_of(split: str, fingerprint: str, stages: list[Stage]) -> str:
    """Head: cache key for the results of these stages on the data of this split."""
    from ray import cloudpickle

    return digest(split, fingerprint, [stage.name for stage in stages], cloudpickle.dumps(stages))
