"""Chain worker: the limit on an image's pixels, checked by its header before decoding.

A PNG of 21 kB can hold 13,000 × 13,000 pixels, which takes gigabytes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

MOST = 100_000_000
MOST_TEXT_BYTES = 16 * 2**20
"""Of a colour profile or a text in a PNG; Pillow refuses the whole image if it holds more than 1 MiB."""

_of_process = {"most": MOST}


def limit_pixels(most: int) -> None:
    """Chain worker: set the limit of this process for Stoker's decoders, Pillow and OpenCV.

    Pillow then refuses larger images in users' datasets and transforms too. OpenCV reads its limit when it
    is imported.
    """
    if _of_process.get("set") == most:
        return
    _of_process.update(most=most, set=most)
    if "cv2" not in sys.modules:
        os.environ["OPENCV_IO_MAX_IMAGE_PIXELS"] = str(most)
    with contextlib.suppress(ImportError):
        from PIL import Image

        allow_text()
        # Pillow warns above this number and refuses above twice this number.
        Image.MAX_IMAGE_PIXELS = (most + 1) // 2
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def allow_text() -> None:
    """Chain worker: let Pillow read PNGs with long texts and profiles, in this process."""
    from PIL import PngImagePlugin

    PngImagePlugin.MAX_TEXT_CHUNK = MOST_TEXT_BYTES


def allowed() -> int:
    """Chain worker: the limit of this process."""
    return _of_process["most"]


def check(width: int, height: int) -> None:
    """Chain worker: refuse an image that is too large.

    Raises:
        ValueError: it exceeds the limit.
    """
    if width * height > allowed():
        raise ValueError(f"{width} × {height} = {width * height:,} pixels: {_beyond()}")


def too_large(error: Exception) -> ValueError:
    """Chain worker: rephrase Pillow's error in terms of the configuration."""
    return ValueError(f"{str(error).partition(' exceeds')[0]}: {_beyond()}")


def _beyond() -> str:
    return f"more than data.max_pixels allows ({allowed():,})"
