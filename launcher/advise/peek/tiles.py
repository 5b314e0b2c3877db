"""Laptop: renders a record: images with masks and boxes, text, sound and lengths."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.advise.peek.columns import as_array, times
from launcher.advise.peek.problems import LABELS
from stoker.messages import Record
from stoker.train.sample_images import Box, Overlay, Painter

SIDE, SMALL_SIDE = 192, 96
MOST_TEXT, MOST_NUMBERS, MOST_POINTS = 400, 12, 160
LEAST_SOUND = 64


@dataclass
class Tile:
    """Laptop: one record on the contact sheet."""

    key: str
    reason: str = ""
    label: str = ""
    images: list[tuple[str, str]] = field(default_factory=list)
    """(column, base64 of a PNG)."""
    waves: list[tuple[str, str]] = field(default_factory=list)
    """(column and length, points of an SVG polyline within 160 × 40)."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    before: str = ""
    """The image as read: base64 of a PNG."""
    loss: str = ""


def tile_of(
    key: str,
    record: Record,
    boxes: Mapping[str, str],
    painter: Painter,
    reason: str = "",
    read: Record | None = None,
    names: Sequence[str] = (),
) -> Tile:
    """Laptop: render a record as a tile.

    Args:
        key: key of the record.
        record: output of the chain, or of the last stage that it passed.
        boxes: columns of boxes → their format.
        painter: draws the images.
        reason: why it failed.
        read: the record as read.
        names: of the classes that labels count.
    """
    import numpy as np

    tile = Tile(key, reason)
    values = {name: value for name, value in record.items() if name != "key"}
    label = next((name for name in LABELS if name in values and _is_number(values[name])), None)
    if label:
        number = as_array(values.pop(label)).item()
        known = number in range(len(names))
        tile.label = f"{label} {number:g}" + (f" ({names[int(number)]})" if known else "")
    images = {name: picture for name, value in values.items() if (picture := image_of(value)) is not None}
    for name, pixels in images.items():
        size = pixels.shape[:2]
        masks = {n: v for n, v in _arrays(values).items() if n not in images and _is_mask(v, size)}
        mine = {n: v for n, v in _arrays(values).items() if _is_boxes(n, v, boxes)}
        drawn = [
            Box(_corners(box, boxes.get(n, "XYXY")), None, None)
            for n, v in mine.items()
            for box in np.nan_to_num(v.astype(float))
        ]
        tile.images.append((name, png(pixels, painter, masks, drawn)))
        tile.texts += [(n, f"{len(v)} boxes") for n, v in mine.items()]
        for shown in (*masks, *mine):
            values.pop(shown, None)
    for name, value in values.items():
        if name not in images:
            _other(tile, name, value)
    before = next((p for v in (read or {}).values() if (p := image_of(v)) is not None), None)
    tile.before = png(before, Painter((), SMALL_SIDE)) if before is not None else ""
    return tile


def image_of(value: Any) -> Any:
    """Laptop: encoded or raw pixels as uint8, height × width × 3; None if not an image."""
    import numpy as np

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
    import numpy as np

    if array.dtype == np.uint8:
        return array
    array = np.nan_to_num(array.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(array.min()), float(array.max())
    return np.round((array - low) / max(high - low, 1e-12) * 255).astype(np.uint8)


def _decoded(content: bytes) -> Any:
    import numpy as np
    from PIL import Image

    if content[:4] == b"RIFF" and content[8:12] != b"WEBP":
        return None
    try:
        image = Image.open(io.BytesIO(content))
        image.draft("RGB", (2 * SIDE, 2 * SIDE))
        image.thumbnail((2 * SIDE, 2 * SIDE))
        return np.asarray(image.convert("RGB"))
    except Exception:
        return None


def png(pixels: Any, painter: Painter, masks: Mapping[str, Any] = {}, boxes: Sequence[Box] = ()) -> str:
    """Laptop: draw masks and boxes over pixels; base64 of a PNG."""
    from PIL import Image

    first, *others = [*masks.values()] or [None]
    picture = painter.draw(Image.fromarray(pixels), Overlay(first, list(boxes)))
    for mask in others:
        picture = painter.draw(picture, Overlay(mask, []))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _corners(box: Any, form: str) -> tuple[float, float, float, float]:
    x, y, a, b = map(float, box)
    if form == "XYWH":
        a, b = x + a, y + b
    elif form == "CXCYWH":
        x, y, a, b = x - a / 2, y - b / 2, x + a / 2, y + b / 2
    return min(x, a), min(y, b), max(x, a), max(y, b)


def _other(tile: Tile, name: str, value: Any) -> None:
    import numpy as np

    if isinstance(value, str):
        tile.texts.append((f"{name}, {len(value)} characters", value[:MOST_TEXT]))
        return
    if isinstance(value, bytes):
        sound = _wav(value)
        if sound is None:
            tile.texts.append((name, f"{len(value)} bytes"))
        else:
            tile.waves.append((f"{name}, {len(sound)} samples", points(sound)))
        return
    array = as_array(value)
    if array is None:
        tile.texts.append((name, repr(value)[:MOST_TEXT]))
    elif array.dtype.kind == "f" and array.ndim == 1 and len(array) >= LEAST_SOUND:
        tile.waves.append((f"{name}, {len(array)} values", points(array)))
    elif array.ndim == 2 and array.dtype.kind in "iuf" and min(array.shape) >= 8:
        # Time from left to right, as in a spectrogram.
        grey = np.repeat(_as_uint8(array.T[::-1, :, None]), 3, axis=2)
        tile.images.append((f"{name}, {times(array.shape)}", png(grey, Painter((), SIDE))))
    elif array.ndim == 0:
        tile.texts.append((name, f"{array.item():g}" if array.dtype.kind in "iuf" else str(array.item())))
    else:
        numbers = ", ".join(f"{v:.4g}" for v in array.reshape(-1)[:MOST_NUMBERS].tolist())
        more = ", …" if array.size > MOST_NUMBERS else ""
        tile.texts.append((f"{name}, {times(array.shape)}", numbers + more))


def _wav(content: bytes) -> Any:
    import wave

    import numpy as np

    try:
        with wave.open(io.BytesIO(content)) as file:
            kind = {1: "u1", 2: "<i2", 4: "<i4"}[file.getsampwidth()]
            return np.frombuffer(file.readframes(file.getnframes()), kind)[:: file.getnchannels()]
    except Exception:
        return None


def points(sound: Any) -> str:
    """Laptop: outline of a sound: minimum and maximum per slice, as SVG points."""
    import numpy as np

    sound = np.nan_to_num(np.asarray(sound, dtype=np.float64))
    parts = np.array_split(sound, min(MOST_POINTS, len(sound)))
    top = max(float(np.abs(sound).max(initial=0)), 1e-12)
    ends = [(part.min(), part.max()) for part in parts if len(part)]
    return " ".join(
        f"{i * 160 / max(len(ends) - 1, 1):.1f},{20 - 19 * float(v) / top:.1f}"
        for i, pair in enumerate(ends)
        for v in pair
    )


def _is_number(value: Any) -> bool:
    array = as_array(value)
    return array is not None and array.ndim == 0 and array.dtype.kind in "iuf"


def _arrays(values: Record) -> dict[str, Any]:
    arrays = {name: as_array(value) for name, value in values.items() if not isinstance(value, str | bytes)}
    return {name: array for name, array in arrays.items() if array is not None}


def _is_mask(array: Any, size: tuple[int, int]) -> bool:
    return array.shape == size and array.dtype.kind in "iub"


def _is_boxes(name: str, array: Any, known: Mapping[str, str]) -> bool:
    four = array.ndim == 2 and array.shape[1] == 4 and array.dtype.kind in "iuf"
    return four and (name in known or "box" in name)
