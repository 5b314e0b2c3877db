"""Chain worker: TIFF files that Pillow would show wrongly, or refuse without saying what is in them."""

from __future__ import annotations

import io
import struct
import threading
from typing import Any, NamedTuple

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_FORMATS = {1: "unsigned", 2: "signed", 3: "floating-point", 4: "unsigned"}
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _PALETTE = 0, 1, 3
_as_planes = threading.Lock()


class Layout(NamedTuple):
    """Chain worker: how a TIFF stores its pixels."""

    bits: int
    kind: str
    """Of the numbers."""
    photometric: int
    channels: int
    extra: tuple[int, ...]
    """What each channel beyond the colours is: 0 unknown, 1 and 2 alpha."""
    planes: bool
    """Each channel is stored separately."""
    dark_palette: bool
    """Its colours have 8 bits where the format asks for 16."""

    @classmethod
    def of(cls, tags: Any) -> Layout:
        """The layout that the tags of a file describe."""
        channels = tags.get(277, 1)
        return cls(
            max(tags.get(258, (1,))),
            _FORMATS.get(max(tags.get(339, (1,))), "complex"),
            tags.get(262, 0),
            channels,
            tuple(tags.get(338, ())),
            tags.get(284, 1) == 2 and channels > 1,
            max(tags.get(320, (65535,))) < 256,
        )

    def check(self, by_libtiff: bool) -> None:
        """Refuse what Pillow would decode to other pixels.

        Raises:
            ValueError: says what the file holds and how to convert it.
        """
        if self.kind != "unsigned" or self.bits > 16:
            raise ValueError(
                f"{self.bits}-bit pixels, whose range only you can tell; convert it to 8 or 16 bits"
                f" (these are {self.kind})"
            )
        grey = self.photometric in (_WHITE_IS_ZERO, _BLACK_IS_ZERO)
        if grey and self.channels > 1 and (self.channels > 2 or self.extra[:1] not in ((1,), (2,))):
            raise ValueError(f"{self}, which are marked neither grey nor RGB; {_REMEDY}")
        if self.photometric == _PALETTE and self.dark_palette:
            raise ValueError(f"the palette of {self} has 8-bit colours, which would be black; {_REMEDY}")
        if self.planes and self.extra[:1] == (1,):
            # Pillow divides by alpha only where it lies beside the colours.
            raise ValueError(f"{self} in separate planes, multiplied by its alpha; {_REMEDY}")
        if self.planes and self.bits > 8 and not by_libtiff:
            # Pillow's own reader takes each byte of a plane for a pixel.
            raise ValueError(f"{self} in separate planes; give its bytes to DecodeImage, or {_REMEDY}")

    @property
    def inverted(self) -> bool:
        """Whether Pillow leaves black and white exchanged."""
        return self.photometric == _WHITE_IS_ZERO and self.bits > 8

    def __str__(self) -> str:
        return f"a TIFF of {self.channels} channel{'s'[: self.channels > 1]} of {self.bits} bits"

    def unread(self) -> ValueError:
        """The error for a file of this layout that Pillow does not open."""
        return ValueError(f"cannot be decoded: {self} ({self.kind}) is not supported; {_REMEDY}")


_REMEDY = (
    "write it as grey or RGB of 8 or 16 bits, for example with gdal_translate -b 1 -b 2 -b 3 -co"
    " PHOTOMETRIC=RGB"
)


def layout_of(content: bytes) -> Layout | None:
    """Chain worker: the layout of a file; None if it is no TIFF, or has a damaged header."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    if not content.startswith(MAGIC):
        return None
    try:
        tags = ImageFileDirectory_v2(content[: 16 if 43 in content[2:4] else 8])
        file = io.BytesIO(content)
        file.seek(tags.next)
        tags.load(file)
        return Layout.of(tags)
    except (SyntaxError, OSError, struct.error, TypeError, ValueError):
        return None


def opened(content: bytes, layout: Layout | None) -> Any:
    """Chain worker: the file as Pillow opens it, with separate planes read by libtiff."""
    from PIL import Image, TiffImagePlugin

    if layout is None or not layout.planes:
        return Image.open(io.BytesIO(content))
    with _as_planes:
        before = TiffImagePlugin.READ_LIBTIFF
        TiffImagePlugin.READ_LIBTIFF = True
        try:
            return Image.open(io.BytesIO(content))
        finally:
            TiffImagePlugin.READ_LIBTIFF = before
