"""Draws the masks and boxes of records over their images, one colour for each class."""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

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
        picture = picture.convert("RGB")
        factor = self.side / max(picture.size)
        size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
        picture = picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)
        picture = picture if mask is None else self._with_mask(picture, mask)
        pen = ImageDraw.Draw(picture)
        for box in boxes:
            left, top, right, bottom = np.clip(box, -1e6, 1e6) * factor
            if left < right and top < bottom:  # also one smaller than a pixel
                pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), None, color(0), 2)
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

    def _with_mask(self, picture: Image.Image, mask: Any) -> Image.Image:
        kinds = [
            kind
            for kind in np.unique(mask).tolist()
            if 0 < kind < IGNORED or (kind == 0 and not self.background)
        ]
        self.drawn.update(kinds)
        scaled = Image.fromarray(mask.astype(np.int32)).resize(picture.size, Image.Resampling.NEAREST)
        shown, pixels = np.asarray(scaled), np.array(picture)
        # The brightness alone shines through, so that a class has its colour on images of any.
        below = np.asarray(picture.convert("L"), np.float32)[..., None]
        for kind in kinds:
            there = shown == kind
            pixels[there] = (below[there] + color(kind)) / 2
        return Image.fromarray(pixels)


def color(kind: int) -> tuple[int, int, int]:
    """A bright colour for a class, far from those of the classes beside it."""
    red, green, blue = colorsys.hsv_to_rgb((0.09 + kind * 0.381966) % 1, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def encoded(picture: Image.Image) -> str:
    """Base64 of a PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
