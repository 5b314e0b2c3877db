"""What a chain may contain, and the named stages that it becomes.

A chain is a list. Each entry is one of
    a `RecordTransform`                       record and random generator → record
    a torchvision transform (or Compose)      applied to `record["image"]`
    a fitted `ray.data` preprocessor          applied to a batch
    any other callable                        dict of arrays → dict of arrays, same records
    a pair ("name", entry)                    any of these under a name of your choice
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from stoker.errors import UsageError, nearest
from stoker.protocol import Record
from stoker.read.sources import digest

if TYPE_CHECKING:
    import numpy as np

_NEVER_RANDOM = {
    *("CenterCrop", "ConvertImageDtype", "Grayscale", "Identity", "Normalize", "PILToTensor"),
    *("Pad", "RGB", "Resize", "ToDtype", "ToImage", "ToPILImage", "ToPureTensor", "ToTensor"),
}
"""Torchvision transforms that draw nothing; any other counts as random."""


class RecordTransform(ABC):
    """Changes one record. `rng` is seeded by (seed, epoch, record key)."""

    random: bool = True
    """False: the same record gives the same result in every epoch, so that it may be cached."""
    uses_random: bool = True
    """False: draws only from `rng`, so the global generators (`random`, `numpy.random`, torch) need not be
    seeded for each record."""

    @abstractmethod
    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        """The changed record; an exception quarantines it."""


@dataclass(frozen=True)
class Stage:
    name: str
    per: Literal["record", "batch"]
    apply: Callable[..., Any]
    """record: (record, rng) → record; batch: (dict of arrays) → dict of arrays."""
    uses_torch: bool = False
    random: bool = True
    """False: draws nothing, so its result may be cached across epochs. Unknown callables count as random."""
    uses_random: bool = True
    of_torchvision: bool = False
    """Replaces a torchvision transform, which returns a tensor to the next stage."""


def is_plain(module: Any) -> bool:
    """Whether an object is an instance of torchvision's own class, not of a user's subclass."""
    return type(module).__module__.startswith("torchvision.transforms")


def may_draw(module: Any) -> bool:
    if not is_plain(module):
        return True
    if type(module).__name__ == "Compose":
        return any(may_draw(part) for part in module.transforms)
    return type(module).__name__ not in _NEVER_RANDOM


def column_value(record: Record, column: str) -> Any:
    value = record.get(column)
    if value is None:
        there = [name for name in record if name != "key"]
        if column in there:
            raise LookupError(f"column {column!r} is NULL")
        raise LookupError(
            f"no column {column!r}{nearest(column, there)} (columns: {', '.join(there)})"
        )
    return value


def record_image(record: Record) -> Any:
    image = column_value(record, "image")
    if isinstance(image, bytes | bytearray | memoryview):
        raise TypeError("the image is still encoded; put DecodeImage() before this stage")
    return image


def prefix_length(stages: list[Stage]) -> int:
    """Number of leading stages that give a record the same result in every epoch."""
    return sum(
        1 for _ in takewhile(lambda stage: stage.per == "record" and not stage.random, stages)
    )


def refuse_nothing_to_keep(stages: list[Stage]) -> None:
    if prefix_length(stages):
        return
    if not stages:
        raise UsageError(
            "data.cache: the training chain is empty, so nothing can be cached; use none"
        )
    first = stages[0]
    why = "is random" if first.random else "works on batches"
    raise UsageError(
        f"data.cache: the first stage {first.name} {why}, so nothing can be cached; put deterministic stages"
        " (random = False) first, or use none"
    )


def cache_key(split: str, fingerprint: str, stages: list[Stage]) -> str:
    from ray import cloudpickle

    return digest(split, fingerprint, [stage.name for stage in stages], cloudpickle.dumps(stages))
