"""What may stand in a chain, and the transforms of Stoker's own.

A chain is a list. Each entry is one of
    a `RecordTransform`                       record and random generator → record
    a torchvision v2 transform (or Compose)   applied to `record["image"]`
    a fitted `ray.data` preprocessor          applied to a batch
    any other callable                        dict of arrays → dict of arrays, same records
    a pair ("name", entry)                    the same under a name of one's own
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from stoker.config import UsageError
from stoker.data.sources import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BATCH_ONLY = {"MixUp", "CutMix"}
_NEVER_RANDOM = {
    *("CenterCrop", "ConvertImageDtype", "Grayscale", "Identity", "Normalize", "PILToTensor", "Pad", "RGB"),
    *("Resize", "ToDtype", "ToImage", "ToPILImage", "ToPureTensor", "ToTensor"),
}
"""Transforms of torchvision that draw nothing; what is not listed counts as random."""


class RecordTransform(ABC):
    """CPU task: changes one record. `rng` is seeded by (seed, epoch, record key)."""

    random: bool = True
    """False: the same record gives the same result in every epoch, so that it may be cached."""

    @abstractmethod
    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        """CPU task: the record with its changes; an exception quarantines it."""


@dataclass(frozen=True)
class Stage:
    """Head and CPU task: one named step of a chain."""

    name: str
    per: Literal["record", "batch"]
    apply: Callable[..., Any]
    """record: (record, rng) → record; batch: (dict of arrays) → dict of arrays."""
    uses_torch: bool = False
    random: bool = True
    """False: draws nothing, so its result may be kept across epochs. Unknown callables count as random."""


def as_stages(chain: Sequence[Any]) -> list[Stage]:
    """Head: the entries of a chain as named stages; equal names get a number.

    Raises:
        UsageError: an entry that is none of the allowed kinds, or cannot work in a chain.
    """
    if not isinstance(chain, list | tuple):
        raise UsageError(f"preprocess() must return a list, not {type(chain).__name__}")
    stages: list[Stage] = []
    for position, entry in enumerate(chain):
        stage = _as_stage(entry, position)
        taken = sum(s.name.split("#")[0] == stage.name for s in stages)
        name = f"{stage.name}#{taken + 1}" if taken else stage.name
        stages.append(replace(stage, name=name))
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
        return Stage(name, "record", entry, random=entry.random)
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
        return Stage(name, "record", ImageModule(entry), uses_torch=True, random=_may_draw(entry))
    if callable(entry):
        return Stage(name, "batch", entry)
    raise UsageError(f"preprocess() entry {position + 1}: {entry!r} is neither a transform nor a callable")


def _may_draw(module: Any) -> bool:
    """Whether a torchvision transform may draw random numbers; a class derived by the user always may."""
    kind = type(module)
    if not kind.__module__.startswith("torchvision.transforms"):
        return True
    if kind.__name__ == "Compose":
        return any(_may_draw(part) for part in module.transforms)
    return kind.__name__ not in _NEVER_RANDOM


def is_hwc(shape: tuple[int, ...]) -> bool:
    """CPU task: whether an image array is height × width × channels, as decoders and OpenCV give it.

    With 1 to 4 channels first and more than 4 columns last it is channels × height × width.
    """
    return len(shape) == 3 and (shape[2] <= 4 or shape[0] > 4)


class ImageModule(RecordTransform):
    """CPU task: a torchvision transform on `record["image"]`, which becomes a CHW tensor."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        import numpy as np
        import torch

        image = record.get("image")
        if isinstance(image, bytes):
            raise TypeError("the image is still encoded; put DecodeImage() before this stage")
        if image is None:
            raise KeyError("the record has no column 'image'")
        if isinstance(image, np.ndarray):
            tensor = torch.from_numpy(image)
            image = tensor.permute(2, 0, 1) if is_hwc(image.shape) else tensor
        out = self.module(image)
        if not isinstance(out, torch.Tensor):
            out = np.asarray(out)
        return {**record, "image": out}


class DecodeImage(RecordTransform):
    """CPU task: encoded bytes in `image` → uint8 array, height × width × channels.

    JPEG goes through libjpeg-turbo; everything that refuses (CMYK, 16 bit, PNG, …) and images with
    an EXIF orientation go through Pillow. A truncated image raises.

    Args:
        mode: "RGB" or "L" (one channel).
    """

    random = False

    def __init__(self, mode: Literal["RGB", "L"] = "RGB") -> None:
        self.mode = mode

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        content = record.get("image")
        if content is None:
            raise KeyError("the record has no column 'image'")
        if not isinstance(content, bytes | bytearray | memoryview):
            return record
        return {**record, "image": decode_image(bytes(content), self.mode)}


def decode_image(content: bytes, mode: Literal["RGB", "L"] = "RGB") -> NDArray[Any]:
    """CPU task: an encoded image as a uint8 array, height × width × channels.

    Raises:
        ValueError: empty, truncated or no image.
    """
    if not content:
        raise ValueError("the image is empty (0 bytes)")
    if content[:2] == b"\xff\xd8" and b"Exif\0" not in content[:2048]:
        import simplejpeg

        try:
            array: NDArray[Any] = simplejpeg.decode_jpeg(
                content, colorspace="GRAY" if mode == "L" else "RGB", strict=True
            )
            return array
        except ValueError:
            pass  # Pillow judges what libjpeg-turbo refuses
    return _decode_with_pillow(content, mode)


def _decode_with_pillow(content: bytes, mode: str) -> NDArray[Any]:
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
    except UnidentifiedImageError:
        raise ValueError(f"not an image (first bytes {content[:8]!r})") from None
    except (OSError, SyntaxError) as error:
        raise ValueError(f"cannot be decoded: {error}") from None
    if image.mode.startswith("I"):
        # Pillow clips 16-bit values when it converts; scaling keeps the picture.
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    array = np.asarray(image.convert(mode))
    return array[..., None] if array.ndim == 2 else array


class CheckLabel(RecordTransform):
    """CPU task: quarantines a record whose `label` is not in 0 … classes-1."""

    random = False

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        label = record.get("label")
        if label is None:
            raise KeyError("the record has no label")
        if not 0 <= int(label) < self.classes:
            raise ValueError(f"label {label} is outside 0…{self.classes - 1}")
        return {**record, "label": int(label)}
