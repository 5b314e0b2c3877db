"""Every host: bits per channel and number of pictures of an image file, by its header."""

from __future__ import annotations

from typing import Any

from stoker.chain import tiff

PNG = b"\x89PNG\r\n\x1a\n"


def depth_of(image: Any) -> tuple[int, int]:
    """Every host: bits per channel, and number of pictures, of encoded bytes or a Pillow image.

    Returns:
        (8, 1) for JPEG and for anything else that is no such image.
    """
    if isinstance(image, bytes):
        if image.startswith(b"\xff\xd8"):
            return 8, 1
        with tiff.opened(image, tiff.layout_of(image)) as opened:
            depth, frames = depth_of(opened)
        return (image[24] if image.startswith(PNG) else depth), frames
    depth = 16 if getattr(image, "mode", "")[:1] == "I" else 8
    if hasattr(image, "tag_v2"):
        depth = tiff.Layout.of(image.tag_v2).bits
    return depth, getattr(image, "n_frames", 1)
