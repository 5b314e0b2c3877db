"""Renders records as tiles (images with masks and boxes, text, sound, lengths), and writes peek.html."""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stoker.chain.entries import declared_by
from stoker.chain.joint import Boxes
from stoker.errors import UsageError
from stoker.events.report import write_page
from stoker.protocol import Record
from stoker.recipe import Recipe, class_names_of
from stoker.serve.opening import Data
from stoker_launcher.advise.peek.looking import as_array, times
from stoker_launcher.advise.peek.problems import LABELS

SIDE, SMALL_SIDE = 192, 96
MOST_TEXT, MOST_NUMBERS = 400, 12
PAGE = "peek.html"


@dataclass
class Tile:
    key: str
    reason: str = ""
    label: str = ""
    images: list[tuple[str, str]] = field(default_factory=list)
    """(column, base64 of a PNG)."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    before: str = ""
    """The image as read: base64 of a PNG."""
    loss: str = ""


BACKGROUND, IGNORED = 0, 255
"""Classes of a mask that are not drawn."""


def png(pixels: Any, side: int = SIDE, masks: Iterable[Any] = (), boxes: Iterable[Any] = ()) -> str:
    """Base64 of a picture, `side` pixels long, with masks and boxes (left, top, right, bottom) over it."""
    picture = Image.fromarray(pixels).convert("RGB")
    factor = side / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    how = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    picture = picture.resize(size, how)
    if masks or boxes:
        picture = _drawn_over(picture, masks, [part * factor for part in boxes])
    file = io.BytesIO()
    picture.quantize(256).save(file, "PNG")  # few colours, so that the page is small
    return base64.b64encode(file.getvalue()).decode()


def _drawn_over(picture: Image.Image, masks: Iterable[Any], boxes: Iterable[Any]) -> Image.Image:
    import torch
    from torchvision.transforms.functional import pil_to_tensor, to_pil_image
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    image = pil_to_tensor(picture)
    for mask in masks:
        kinds = [kind for kind in np.unique(mask).tolist() if BACKGROUND < kind < IGNORED]
        numbers = Image.fromarray(mask.astype(np.int32))
        shown = np.asarray(numbers.resize(picture.size, Image.Resampling.NEAREST))
        if kinds:
            planes = torch.from_numpy(np.stack([shown == kind for kind in kinds]))
            image = draw_segmentation_masks(image, planes, 0.5, [*map(color, kinds)])
    for part in boxes:
        part = part.clamp(-1e6, 1e6)
        part = part[(part[:, 2:] > part[:, :2]).all(1)]
        if len(part):
            image = draw_bounding_boxes(image, part, colors=color(0), width=2)
    drawn: Image.Image = to_pil_image(image)
    return drawn


def color(kind: int) -> tuple[int, int, int]:
    """A bright colour for a class, far from those of the classes beside it."""
    red, green, blue = colorsys.hsv_to_rgb((0.09 + kind * 0.381966) % 1, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


class Sheet:
    """Draws the tiles of a page."""

    def __init__(self, data: Data, split: str, recipe: Recipe) -> None:
        declared = [declared_by(stage.apply) for stage in data.chains[split].stages]
        self.boxes = {
            n: d.format for own in declared for n, d in own.items() if isinstance(d, Boxes)
        }
        """The columns that a chain declares as boxes, with their formats."""
        self.label_classes = class_names_of(recipe, data.sources["train"].classes())

    def tile(self, key: str, record: Record, reason: str = "", read: Record | None = None) -> Tile:
        values = {name: value for name, value in record.items() if name != "key"}
        tile = Tile(key, reason, self._label(values))
        pictures = {name: shown_pixels(value) for name, value in values.items()}
        others = {name: values[name] for name, pixels in pictures.items() if pixels is None}
        for name, pixels in pictures.items():
            for shown in self._image(tile, name, pixels, others) if pixels is not None else ():
                others.pop(shown, None)
        for name, value in others.items():
            _other(tile, name, value)
        before = next(
            (p for v in (read or {}).values() if (p := shown_pixels(v)) is not None), None
        )
        tile.before = png(before, SMALL_SIDE) if before is not None else ""
        return tile

    def _label(self, values: dict[str, Any]) -> str:
        for name in LABELS:
            array = as_array(values[name]) if name in values else None
            if array is not None and array.ndim == 0 and array.dtype.kind in "iuf":
                del values[name]
                number = array.item()
                known = number in range(len(self.label_classes))
                return f"{name} {number:g}" + (
                    f" ({self.label_classes[int(number)]})" if known else ""
                )
        return ""

    def _image(self, tile: Tile, name: str, pixels: Any, values: dict[str, Any]) -> list[str]:
        """Draw an image with the masks and boxes of its record; returns their columns."""
        arrays = {
            n: as_array(value) for n, value in values.items() if not isinstance(value, str | bytes)
        }
        known = {n: array for n, array in arrays.items() if array is not None}
        masks = {
            n: a for n, a in known.items() if a.shape == pixels.shape[:2] and a.dtype.kind in "iub"
        }
        boxes = {n: a for n, a in known.items() if n in self.boxes and a.shape[1:] == (4,)}
        drawn = [corners(array, self.boxes[n]) for n, array in boxes.items()]
        tile.images.append((name, png(pixels, SIDE, masks.values(), drawn)))
        tile.texts += [(n, f"{len(array)} boxes") for n, array in boxes.items()]
        return [*masks, *boxes]


def corners(boxes: Any, form: str) -> Any:
    """Left, top, right and bottom of each box."""
    import torch
    from torchvision.ops import box_convert

    return box_convert(torch.from_numpy(boxes).double().nan_to_num(), form.lower(), "xyxy")


def shown_pixels(value: Any) -> Any:
    """Encoded or raw pixels as uint8, height × width × 3; None if not an image."""
    if isinstance(value, bytes):
        return _decoded(value)
    array = as_array(value)
    if array is None or array.ndim != 3 or array.dtype.kind not in "uif" or 0 in array.shape:
        return None
    if array.shape[-1] not in (1, 3, 4):
        if array.shape[0] not in (1, 3, 4):
            return None
        array = np.moveaxis(array, 0, -1)
    if min(array.shape[:2]) < 4:
        return None
    pixels = _as_uint8(array[..., :3])
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


def _as_uint8(array: Any) -> Any:
    """Scale a float image to 0 … 255, because its normalisation is unknown."""
    if array.dtype == np.uint8:
        return array
    array = np.nan_to_num(array.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(array.min()), float(array.max())
    return np.round((array - low) / max(high - low, 1e-12) * 255).astype(np.uint8)


def _decoded(content: bytes) -> Any:
    try:
        image = Image.open(io.BytesIO(content))
        image.draft("RGB", (2 * SIDE, 2 * SIDE))
        image.thumbnail((2 * SIDE, 2 * SIDE))
        return np.asarray(image.convert("RGB"))
    except Exception:
        return None


def _other(tile: Tile, name: str, value: Any) -> None:
    array = as_array(value)
    kind, dims = (array.dtype.kind, array.ndim) if array is not None else ("", -1)
    if isinstance(value, str):
        tile.texts.append((f"{name}, {len(value)} characters", value[:MOST_TEXT]))
    elif array is None:
        tile.texts.append(
            (name, f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)[:MOST_TEXT])
        )
    elif dims == 2 and kind in "iuf" and min(array.shape) >= 8:
        # Time from left to right, as in a spectrogram.
        grey = np.repeat(_as_uint8(array.T[::-1, :, None]), 3, axis=2)
        tile.images.append((f"{name}, {times(array.shape)}", png(grey)))
    elif dims == 0:
        tile.texts.append((name, f"{array.item():g}" if kind in "iuf" else str(array.item())))
    else:
        numbers = ", ".join(f"{v:.4g}" for v in array.reshape(-1)[:MOST_NUMBERS].tolist())
        more = ", …" if array.size > MOST_NUMBERS else ""
        tile.texts.append((f"{name}, {times(array.shape)}", numbers + more))


def page_at(out: Path | None) -> Path:
    """The path of the page, checked before any work."""
    target = out or Path(PAGE)
    if target.is_dir():
        target = target / PAGE
    if not target.parent.is_dir():
        raise UsageError(f"--out {target}: {target.parent} does not exist")
    return target


def write_sheet(
    target: Path,
    tiles: list[Tile],
    title: str,
    heading: str,
    lines: list[str],
    problems: Sequence[Any] = (),
    stages: Sequence[Any] = (),
) -> None:
    write_page(
        target,
        "stoker_launcher.advise.peek",
        PAGE,
        title=title,
        lines=lines,
        problems=problems,
        heading=heading,
        tiles=tiles,
        stages=stages,
    )
