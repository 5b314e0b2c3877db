"""Head: finds stages that move the pixels of an image, but not its masks and boxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from stoker.chain.chain import Chain
from stoker.chain.joint import DecodeMask, Joint
from stoker.chain.picture import is_hwc
from stoker.chain.stages import ImageModule, RecordTransform, Stage
from stoker.chain.transforms import Compose, Drop, ImageTransform
from stoker.errors import UsageError
from stoker.messages import Record

if TYPE_CHECKING:
    import numpy as np

_STILL = {"CenterCrop", "FiveCrop", "Pad", "Resize", "TenCrop"}
_DRAWN = {
    *("ElasticTransform", "RandomAffine", "RandomCrop", "RandomHorizontalFlip", "RandomIoUCrop"),
    *("RandomPerspective", "RandomResize", "RandomResizedCrop", "RandomRotation", "RandomShortestSize"),
    *("RandomVerticalFlip", "RandomZoomOut", "ScaleJitter"),
}
_POLICIES = {"AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide"}
"""They rotate and shear among other things, and torchvision has none of them for masks."""


def refuse_image_alone(chains: Iterable[Chain]) -> None:
    """Head: refuse random transforms after which image and mask no longer show the same.

    Raises:
        UsageError: one line per transform.
    """
    if found := [text for chain in chains for text, random in moved_alone(chain.stages) if random]:
        raise UsageError(*dict.fromkeys(found))


def moved_alone(stages: list[Stage], seen: Iterable[str] = ()) -> list[tuple[str, bool]]:
    """Head: a line per transform of the image alone in a chain for masks or boxes, and whether it is random.

    A deterministic one may be meant: masks can be stored as the image is afterwards.

    Args:
        stages: of the chain, which names most masks and boxes.
        seen: further masks, found in records.
    """
    left = ", ".join(_beside_the_image(stages, seen))
    if not left:
        return []
    return [
        (
            f"chain: {name} moves the pixels of the image only, not those of {left};"
            f" {'leave it out' if name in _POLICIES else 'put it into Joint'}, or drop {left} with Drop",
            random,
        )
        for stage in stages
        for name, random in _moved_by(stage)
    ]


class MaskWatch(RecordTransform):
    """Head: looks for masks in records on their way to a transform of the image alone."""

    random = False

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        self.seen |= dict.fromkeys(_masks(record))
        return record

    def among(self, stages: list[Stage]) -> list[Stage]:
        """The stages of a chain and, before each that moves the image alone, this one."""
        own = Stage("masks", "record", self, random=False)
        return [each for stage in stages for each in ([own, stage] if _moved_by(stage) else [stage])]


def _masks(record: Record) -> list[str]:
    """Columns of whole numbers, one for each pixel of the image."""
    import numpy as np

    image = record.get("image")
    if image is None or isinstance(image, bytes):
        return []
    shape = tuple(getattr(image, "shape", None) or np.asarray(image).shape)
    size = shape if len(shape) == 2 else shape[:2] if is_hwc(shape) else shape[1:]
    return [
        name
        for name, value in record.items()
        if name != "image"
        and tuple(getattr(value, "shape", ())) in (size, (1, *size), (*size, 1))
        and "int" in str(getattr(value, "dtype", ""))
    ]


def _beside_the_image(stages: list[Stage], seen: Iterable[str]) -> list[str]:
    """Columns of masks and boxes that leave the chain."""
    found: dict[str, None] = dict.fromkeys(seen)
    dropped: set[str] = set()
    for stage in stages:
        if isinstance(stage.apply, DecodeMask):
            found |= dict.fromkeys(stage.apply.columns)
        elif isinstance(stage.apply, Joint):
            masks = stage.apply.masks if stage.apply.needs_masks else ()
            found |= dict.fromkeys((*masks, *stage.apply.boxes))
        elif isinstance(stage.apply, Drop):
            dropped |= stage.apply.columns
    return [name for name in found if name not in dropped]


def _moved_by(stage: Stage) -> list[tuple[str, bool]]:
    return list(_moves(getattr(stage.apply, "module", stage.apply), stage))


def _moves(transform: Any, stage: Stage, drawn: bool = False) -> Iterator[tuple[str, bool]]:
    """The geometric parts of a transform, and whether they or what contains them is random."""
    if isinstance(transform, ImageTransform):
        if isinstance(transform, Compose):
            for part in transform.parts:
                yield from _moves(part, stage)
        else:
            yield type(transform).__name__, transform.random
    elif isinstance(stage.apply, ImageModule):
        kinds = [c.__name__ for c in type(transform).__mro__ if c.__module__.startswith("torchvision.")]
        drawn = drawn or bool({"RandomApply", "RandomChoice", "RandomOrder"} & {*kinds})
        for part in getattr(transform, "transforms", ()):
            yield from _moves(part, stage, drawn)
        if kind := next((kind for kind in kinds if kind in _STILL | _DRAWN | _POLICIES), ""):
            yield type(transform).__name__, drawn or kind not in _STILL
