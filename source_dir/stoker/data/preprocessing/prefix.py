"""Head: what of a chain gives the same result in every epoch, so that hosts may keep it."""

from __future__ import annotations

from stoker.data.preprocessing.stages import Stage
from stoker.data.sources.base import digest
from stoker.errors import UsageError


def prefix_length(stages: list[Stage]) -> int:
    """Head: how many stages at a chain's beginning give a record the same result in every epoch."""
    for position, stage in enumerate(stages):
        if stage.random or stage.per != "record":
            return position
    return len(stages)


def refuse_nothing_to_keep(stages: list[Stage]) -> None:
    """Head: a training chain whose first stage is random leaves nothing to keep.

    Raises:
        UsageError: naming that stage.
    """
    if prefix_length(stages):
        return
    if not stages:
        raise UsageError("data.cache: the training chain is empty, there is nothing to keep; set it to none")
    first = stages[0]
    why = "is random" if first.random else "works on batches"
    raise UsageError(
        f"data.cache: nothing can be kept, for the training chain's first stage {first.name} {why}; set it"
        " to none, or begin the chain with stages that draw nothing (random = False)"
    )


def key_of(split: str, fingerprint: str, stages: list[Stage]) -> str:
    """Head: names the results of these stages on the data of this split."""
    from ray import cloudpickle

    return digest(split, fingerprint, [stage.name for stage in stages], cloudpickle.dumps(stages))
