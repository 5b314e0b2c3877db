"""Draws the masks and boxes of records over their images, one colour for each class."""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

Corners = tuple[float, float, float, float]
"""Of a box, in pixels: left, top, right, bottom."""
IGNORED = 255


class Painter:
    """Draws masks and boxes, and collects the legend of what it has drawn."""

    def __init__(self, names: Sequence[str], side: int) -> None:
        self.names, self.side = names, side
        self.drawn: set[int] = set()
        self.background = not names or names[0].strip("_").lower() in ("background", "bg")
        """Whether class 0 of a mask is what lies between the others, and left as it is."""

    def draw(self, picture: Image.Image, mask: Any = None, boxes: Sequence[Corners] = ()) -> Image.Image:
        """A picture, `side` pixels long, with a mask or boxes over it; few colours, so that it is small."""
        from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

        picture = picture.convert("RGB")
        factor = self.side / max(picture.size)
        size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
        picture = picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)
        if mask is not None or boxes:
            pixels = self._with_mask(pil_to_tensor(picture), mask)
            picture = to_pil_image(_with_boxes(pixels, boxes, factor))
        return picture.quantize(256)

    def legend(self) -> list[dict[str, str]]:
        """Names and colours of the classes that were drawn."""
        return [
            {
                "name": str(self.names[kind]) if 0 <= kind < len(self.names) else f"class {kind}",
                "color": "#{:02x}{:02x}{:02x}".format(*color(kind)),
            }
            for kind in sorted(self.drawn)
        ]

    def _with_mask(self, pixels: Any, mask: Any) -> Any:
        import torch
        from torchvision.transforms.v2.functional import rgb_to_grayscale
        from torchvision.utils import draw_segmentation_masks

        there = [] if mask is None else np.unique(mask).tolist()
        kinds = [kind for kind in there if 0 < kind < IGNORED or (kind == 0 and not self.background)]
        if not kinds:
            return pixels
        self.drawn.update(kinds)
        found = torch.from_numpy(mask.astype(np.int32))[None, None].float()
        shown = torch.nn.functional.interpolate(found, pixels.shape[1:])[0]
        layers = shown == torch.tensor(kinds)[:, None, None]
        # The brightness alone shines through, so that a class has its colour on images of any.
        below = torch.where(layers.any(0), rgb_to_grayscale(pixels, 3), pixels)
        return draw_segmentation_masks(below, layers, 0.5, [color(kind) for kind in kinds])


def _with_boxes(pixels: Any, boxes: Sequence[Corners], factor: float) -> Any:
    import torch
    from torchvision.utils import draw_bounding_boxes

    boxes = [box for box in boxes if box[0] < box[2] and box[1] < box[3]]
    if not boxes:
        return pixels
    # The last two corners are within the box; one smaller than a pixel is drawn, too.
    corners = torch.tensor(boxes).clamp(-1e6, 1e6) * factor
    corners[:, 2:] = torch.maximum(corners[:, 2:] - 1, corners[:, :2])
    return draw_bounding_boxes(pixels, corners, colors=[color(0)] * len(boxes), width=2)


def color(kind: int) -> tuple[int, int, int]:
    """A bright colour for a class, far from those of the classes beside it."""
    red, green, blue = colorsys.hsv_to_rgb((0.09 + kind * 0.381966) % 1, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def encoded(picture: Image.Image) -> str:
    """Base64 of a PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
