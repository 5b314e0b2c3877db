"""Head: turns the entries of a recipe's chain into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stoker.chain.native import native, tensors_for_others
from stoker.chain.stages import ImageModule, RecordTransform, Stage, may_draw
from stoker.errors import UsageError

_BATCH_ONLY = {"MixUp", "CutMix"}


def as_stages(chain: Sequence[Any]) -> list[Stage]:
    """Head: the entries of a chain as named stages; repeated names get a number.

    Plain torchvision transforms are replaced by Stoker's if those are faster (see `native`).

    Raises:
        UsageError: an entry is not of an allowed kind, or cannot work in a chain.
    """
    if not isinstance(chain, list | tuple):
        raise UsageError(f"preprocess() must return a list, not {type(chain).__name__}")
    stages: list[Stage] = []
    for position, entry in enumerate(chain):
        stage = _as_stage(entry, position)
        taken = sum(s.name.split("#")[0] == stage.name for s in stages)
        name = f"{stage.name}#{taken + 1}" if taken else stage.name
        stages.append(replace(stage, name=name))
    tensors_for_others(stages)
    return stages


def _as_stage(entry: Any, position: int) -> Stage:
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
        stage = _as_stage(entry[1], position)
        return replace(stage, name=entry[0])
    if isinstance(entry, Stage):
        return entry
    name = getattr(entry, "__name__", None) or type(entry).__name__
    if isinstance(entry, type):
        raise UsageError(f"preprocess() entry {position + 1}: {name} is a class; write {name}()")
    if isinstance(entry, RecordTransform):
        return _of_transform(name, entry)
    ancestors = [f"{c.__module__}.{c.__name__}" for c in type(entry).__mro__]
    if any(a.startswith("ray.data.preprocessor") and a.endswith(".Preprocessor") for a in ancestors):
        if "NOT_FITTED" in str(entry.fit_status()):
            raise UsageError(f"preprocess() entry {position + 1}: {name} is not fitted; call fit() first")
        return Stage(name, "batch", entry.transform_batch, random=False)
    if any(a.startswith("torchvision.transforms") for a in ancestors):
        if name in _BATCH_ONLY:
            raise UsageError(
                f"preprocess() entry {position + 1}: {name} mixes the records of a batch; return it"
                " from on_device()"
            )
        own = native(entry)
        if own is not None:
            return replace(_of_transform(name, own), of_torchvision=True)
        return Stage(name, "record", ImageModule(entry), uses_torch=True, random=may_draw(entry))
    if callable(entry):
        return Stage(name, "batch", entry)
    raise UsageError(f"preprocess() entry {position + 1}: {entry!r} is neither a transform nor a callable")


def _of_transform(name: str, entry: RecordTransform) -> Stage:
    uses_torch = getattr(entry, "uses_torch", False)
    return Stage(name, "record", entry, uses_torch, entry.random, entry.uses_random)
