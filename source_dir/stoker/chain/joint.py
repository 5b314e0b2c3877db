"""Chain worker: torchvision transforms that apply to an image together with its masks and boxes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stoker.chain.picture import is_hwc
from stoker.chain.stages import RecordTransform, may_draw, value_of
from stoker.messages import Record

if TYPE_CHECKING:
    import numpy as np


_LOSSY = ("JPEG", "MPO", "JPEG2000")


class DecodeMask(RecordTransform):
    """Chain worker: an encoded mask, or a Pillow image → its class numbers, uint8, height × width.

    Palette colours are ignored: the numbers in the file are the classes. Colour images, lossy formats and
    more than 8 bits are refused, since they hold no class numbers.

    Args:
        columns: columns that hold masks.
    """

    random = False
    uses_random = False

    def __init__(self, *columns: str) -> None:
        self.columns = columns or ("mask",)

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        import numpy as np
        from PIL import Image, UnidentifiedImageError

        found = {}
        for name in self.columns:
            mask: Any = value_of(record, name)
            if isinstance(mask, bytes | bytearray | memoryview):
                try:
                    mask = Image.open(io.BytesIO(mask))
                except UnidentifiedImageError:
                    raise ValueError(f"{name}: not an image (first bytes {bytes(mask[:8])!r})") from None
            elif not isinstance(mask, Image.Image):
                kind = type(mask).__name__
                raise TypeError(
                    f"{name} is a {kind}, neither an encoded mask nor a PIL image; leave it out here"
                )
            codec, _, _, args = mask.tile[0] if getattr(mask, "tile", None) else ("", 0, 0, "")
            raw, *rest = args if isinstance(args, tuple) else (args,)
            grey = str(raw).partition(";")[2] if mask.mode != "P" else ""
            changed = "I" in grey or (codec.startswith("ppm") and rest != [255])
            if mask.mode not in ("L", "P", "1") or mask.format in _LOSSY or changed:
                how = "inverted or scaled numbers" if changed else f"mode {mask.mode}"
                raise ValueError(f"{name}: a {mask.format} of {how} holds no class numbers")
            # Pillow stretches 2 or 4 bits to 0 … 255.
            found[name] = np.array(mask, dtype=np.uint8) // {"2": 85, "4": 17}.get(grey[:1], 1)
        return {**record, **found}


class Joint(RecordTransform):
    """Chain worker: one transform of torchvision.transforms.v2 for an image with its masks and boxes.

    Random numbers are drawn once for all of them, seeded by the record. Masks are resized without mixing
    classes. The transform gets the whole record, so `v2.SanitizeBoundingBoxes` finds `labels`.

    Args:
        transform: a v2 transform or a `v2.Compose`.
        masks: columns of class numbers, height × width, the size of the image. Default: `mask`, which records
            may lack if `boxes` are given.
        boxes: columns of boxes, number × 4, in pixels.
        format: of the boxes: XYXY, XYWH or CXCYWH.
    """

    uses_torch = True

    def __init__(
        self,
        transform: Any,
        masks: Sequence[str] | None = None,
        boxes: Sequence[str] = (),
        format: str = "XYXY",
    ) -> None:
        self.transform, self.boxes, self.format = transform, tuple(boxes), format
        self.masks = ("mask",) if masks is None else tuple(masks)
        self.needs_masks = masks is not None or not boxes
        self.random = _draws(transform)

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        import numpy as np
        import torch
        from torchvision import tv_tensors

        image = value_of(record, "image")
        if not hasattr(image, "shape"):
            raise TypeError("the image is still encoded; put DecodeImage() before this stage")
        image = _tensor(image)
        image = image.permute(2, 0, 1) if is_hwc(tuple(image.shape)) else image
        size = tuple(image.shape[-2:])
        parts: dict[str, Any] = {"image": tv_tensors.Image(image)}
        for name in self.masks:
            if name not in record and not self.needs_masks:
                continue
            mask = value_of(record, name)
            if not hasattr(mask, "shape"):
                raise TypeError(f"the column {name!r} is still encoded; put DecodeMask() before this stage")
            parts[name] = tv_tensors.Mask(_tensor(mask))
            if tuple(parts[name].shape[-2:]) != size:
                raise ValueError(f"{name} has size {tuple(parts[name].shape[-2:])}, its image {size}")
        for name in self.boxes:
            values = _tensor(value_of(record, name))
            if values.ndim != 2 or values.shape[1] != 4:
                raise ValueError(f"{name} has the shape {tuple(values.shape)}; boxes are number × 4")
            parts[name] = tv_tensors.BoundingBoxes(values, format=self.format, canvas_size=size)
        # v2 expects tensors under `labels`, and leaves plain tensors alone if there is an image.
        others = {n: _tensor(v) if isinstance(v, np.ndarray) else v for n, v in record.items()}
        out = self.transform({**others, **parts})
        return {n: v.as_subclass(torch.Tensor) if n in parts else v for n, v in out.items()}


def _tensor(values: Any) -> Any:
    """An array as a writable tensor, without a copy if the array is writable."""
    import numpy as np
    import torch

    return (
        torch.from_numpy(np.require(values, requirements="W")) if isinstance(values, np.ndarray) else values
    )


def _draws(transform: Any) -> bool:
    return may_draw(transform) or any(map(may_draw, getattr(transform, "transforms", ())))
