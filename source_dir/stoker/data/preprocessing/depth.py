"""Every host: the bits per channel that an image file holds, by its header."""

from __future__ import annotations

import io
from typing import Any

from stoker.data.preprocessing import tiff

PNG = b"\x89PNG\r\n\x1a\n"


def depth_of(image: Any) -> int:
    """Every host: bits per channel of encoded bytes or of a Pillow image, by its header; 8 if unknown."""
    from PIL import Image

    if isinstance(image, bytes):
        if image.startswith(PNG):
            return image[24] if len(image) > 24 else 8
        if layout := tiff.layout_of(image):
            return layout.bits
        if image.startswith(b"\xff\xd8"):
            return 8
        try:
            with Image.open(io.BytesIO(image)) as opened:
                return depth_of(opened)
        except Exception:
            return 8  # its decoder reports that
    return 16 if getattr(image, "mode", "")[:1] == "I" else 8
