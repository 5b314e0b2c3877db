"""Chain worker: decodes images to arrays; of a JPEG, only as much as its use needs.

The header decides which decoder an image gets. 8-bit baseline and progressive JPEGs with one or three
components go through libjpeg-turbo (simplejpeg), which can skip rows below a crop and decode at a half, a
quarter or an eighth of the size. Everything else, and everything that libjpeg-turbo rejects, goes to Pillow.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import sys
import threading
import warnings
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from stoker.protocol import BadRecord, Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BITS, _PHOTOMETRIC, _CHANNELS, _ORDER, _EXTRA, _KIND = 258, 262, 277, 284, 338, 339
"""Tags of a TIFF."""
_REMEDY = "write it as grey, 0 for black, or RGB of 8 or 16 unsigned bits, channels side by side"


def check_tiff(tags: Any) -> None:
    """Refuse a TIFF unless it holds 8 or 16 bits, grey or in colours, channel beside channel."""
    bits, channels = max(tags.get(_BITS, (1,))), tags.get(_CHANNELS, 1)
    unsigned = max(tags.get(_KIND, (1,))) in (1, 4)
    photometric = tags.get(_PHOTOMETRIC, 0)
    planes = tags.get(_ORDER, 1) == 2 and channels > 1
    alpha = channels == 2 and tuple(tags.get(_EXTRA, ()))[:1] in ((1,), (2,))
    bands = photometric == 1 and channels > 1 and not alpha
    if not unsigned or bits not in (8, 16) or planes or photometric in (0, 3) or bands:
        raise ValueError(f"a TIFF of {channels} × {bits} bits in another form; {_REMEDY}")


MOST_PIXELS = 100_000_000
MOST_TEXT_BYTES = 16 * 2**20
"""Limit of a colour profile or text in a PNG; by default, Pillow refuses an image with more than 1 MiB."""

_of_process = {"most": MOST_PIXELS}


@lru_cache(maxsize=1)  # sets a limit once
def limit_pixels(most: int) -> None:
    """Set the limit of this process for Stoker's decoders, Pillow and OpenCV.

    Pillow then refuses larger images in users' datasets and transforms too. OpenCV reads its limit when it
    is imported.
    """
    _of_process["most"] = most
    if "cv2" not in sys.modules:
        os.environ["OPENCV_IO_MAX_IMAGE_PIXELS"] = str(most)
    with contextlib.suppress(ImportError):
        from PIL import Image

        allow_text()
        # Pillow warns above this number and refuses above twice this number.
        Image.MAX_IMAGE_PIXELS = (most + 1) // 2
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def allow_text() -> None:
    from PIL import PngImagePlugin

    PngImagePlugin.MAX_TEXT_CHUNK = MOST_TEXT_BYTES


def check_pixels(width: int, height: int) -> None:
    if width * height > _of_process["most"]:
        raise ValueError(f"{width} × {height} = {width * height:,} pixels: {_beyond()}")


def too_large(error: Exception) -> ValueError:
    return ValueError(f"{str(error).partition(' exceeds')[0]}: {_beyond()}")


def _beyond() -> str:
    return f"more than data.max_pixels allows ({_of_process['most']:,})"


class DecodeError(ValueError):
    """A file that begins as an image but is damaged."""


PNG = b"\x89PNG\r\n\x1a\n"


def depth_of(content: bytes, picture: Any) -> int:
    """Bits per channel that a file stores, of which Pillow keeps 8 in colours."""
    if content.startswith(PNG):
        return content[24]
    return int(max(picture.tag_v2.get(_BITS, (1,)))) if hasattr(picture, "tag_v2") else 8


Mode = Literal["RGB", "L"]

_START_OF_FRAME = range(0xC0, 0xD0)
_NO_FRAMES = {0xC4, 0xC8, 0xCC}
"""Markers in that range that introduce tables."""
_TRANSPOSED = {5, 6, 7, 8}
"""EXIF orientations that swap height and width."""
_ORIGIN_STAYS = {1, 5}

_KEPT_BYTES = 64 << 20
_DAMAGE = ("premature end", "corrupt jpeg data", "inconsistent progression")
"""Warnings of libjpeg-turbo, told apart by text alone, that mean wrong pixels; Pillow would ignore them."""
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")

_of_thread = threading.local()


@dataclass(frozen=True, slots=True)
class JpegHeader:
    rows: int
    columns: int
    rows_at: int
    """Byte offset of the number of rows (two bytes)."""
    sequential: bool
    """One scan from top to bottom, so that decoding may end early."""
    orientation: int
    """EXIF: 1 as stored, 2 to 8 mirrored or rotated."""

    @property
    def size(self) -> tuple[int, int]:
        turned = self.orientation in _TRANSPOSED
        return (self.columns, self.rows) if turned else (self.rows, self.columns)


def jpeg_header(content: bytes) -> JpegHeader | None:
    """The header of a JPEG that libjpeg-turbo can decode."""
    if content[:2] != b"\xff\xd8":
        return None
    frame: tuple[int, int, int, int, int] | None = None
    may_turn = False
    at, end = 2, len(content)
    while at + 4 <= end:
        if content[at] != 0xFF:
            return None
        marker = content[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        length = content[at + 2] << 8 | content[at + 3]
        if marker == 0xDA:
            break
        if marker in _START_OF_FRAME and marker not in _NO_FRAMES:
            if marker > 0xC2 or at + 10 > end:
                return None
            if content[at + 4] != 8 or content[at + 9] not in (1, 3):
                return None
            rows, columns = struct.unpack_from(">HH", content, at + 5)
            frame = (rows, columns, at + 5, content[at + 9], marker)
        elif marker == 0xE1:
            part = content[at : at + 2 + length]
            # Look for the tag number in either byte order, or its name in XMP.
            may_turn |= b"\x01\x12" in part or b"\x12\x01" in part or b":Orientation" in part
        at += 2 + length
    if frame is None or at + 5 > end or not frame[0] * frame[1]:
        return None
    rows, columns, rows_at, components, marker = frame
    check_pixels(columns, rows)
    sequential = marker != 0xC2 and content[at + 4] == components
    orientation = orientation_of(content) if may_turn else 1
    return JpegHeader(rows, columns, rows_at, sequential, orientation) if orientation else None


def sized(record: Record | BadRecord, decodes: bool) -> Record | BadRecord:
    """A record, or a bad one if the header of an encoded image in it exceeds the pixel limit."""
    if isinstance(record, BadRecord):
        return record
    for name, value in record.items():
        if not isinstance(value, bytes) or (decodes and name == "image"):
            continue
        if not value.startswith(_IMAGES):
            continue
        from PIL import Image

        try:
            if value.startswith(PNG) and value[12:16] == b"IHDR":  # at a fraction of Pillow's cost
                check_pixels(*struct.unpack_from(">II", value, 16))
            elif jpeg_header(value) is None:
                with Image.open(io.BytesIO(value)) as image:
                    check_pixels(*image.size)
        except Image.DecompressionBombError as error:
            return BadRecord(record["key"], f"column {name}: {too_large(error)}")
        except ValueError as error:
            return BadRecord(record["key"], f"column {name}: {error}")
        except (OSError, SyntaxError, struct.error):
            pass  # damaged or not an image: its decoder reports that
    return record


def orientation_of(image: Any) -> int:
    """The orientation that `ImageOps.exif_transpose` would use; 0 if it is no image, or Pillow fails."""
    from PIL import Image

    try:
        encoded = isinstance(image, bytes | bytearray | memoryview)
        is_png = encoded and bytes(image[:8]) == PNG
        if is_png and not re.search(b"eXIf|type exif|adobe.xmp", image):
            return 1  # Pillow would decode all pixels to look behind them
        value = (Image.open(io.BytesIO(image)) if encoded else image).getexif().get(0x0112, 1)
    except Exception:
        return 0
    return value if isinstance(value, int) and 2 <= value <= 8 else 1


def decode_whole(content: bytes, header: JpegHeader, mode: Mode) -> NDArray[Any]:
    import numpy as np

    buffer = np.empty(header.rows * header.columns * (1 if mode == "L" else 3), dtype=np.uint8)
    array = _decode_jpeg(content, header, mode, 1, header.rows, buffer)
    if array is None:
        return decode_with_pillow(content, mode)
    return upright(array, header.orientation)


def decode_part(
    content: bytes, header: JpegHeader, mode: Mode, factor: int, height: int
) -> tuple[NDArray[Any], int]:
    """The upper part of a JPEG, scaled down, in memory that the thread's next call reuses."""
    import numpy as np

    # A partial last pixel would come first when the picture is rotated, and shift all others.
    moves = header.orientation not in _ORIGIN_STAYS
    while moves and (header.rows % factor or header.columns % factor):
        factor //= 2
    size = -(-header.rows // factor) * -(-header.columns // factor) * (1 if mode == "L" else 3)
    buffer = getattr(_of_thread, "buffer", None)
    # Do not keep the memory of one huge picture forever.
    if buffer is None or not size <= buffer.size <= max(8 * size, _KEPT_BYTES):
        buffer = _of_thread.buffer = np.empty(size, dtype=np.uint8)
    rows = header.rows
    if header.sequential and header.orientation == 1 and _ends_whole(content):
        # Decode the next row of blocks too: colours are interpolated between rows.
        wanted = -(-height // 16) * 16 + 16
        rows = wanted if wanted < rows * 0.95 else rows
    array = _decode_jpeg(content, header, mode, factor, rows, buffer)
    if array is None:
        return decode_with_pillow(content, mode), 1
    return upright(array, header.orientation), factor


def _decode_jpeg(
    content: bytes, header: JpegHeader, mode: Mode, factor: int, rows: int, buffer: NDArray[Any]
) -> NDArray[Any] | None:
    """The first `rows` rows as stored in the file; None if Pillow must decode it.

    To end early, it decodes a copy of the file whose header gives fewer rows. Once all rows are in the
    buffer, libjpeg-turbo warns of bytes left over before the end of the image.
    """
    import simplejpeg

    space = "GRAY" if mode == "L" else "RGB"
    height, width = -(-rows // factor), -(-header.columns // factor)
    cut = rows < header.rows
    data = bytearray(content) if cut else content
    if isinstance(data, bytearray):
        data[header.rows_at : header.rows_at + 2] = rows.to_bytes(2)
    least = {"min_height": height, "min_width": width} if factor > 1 else {}
    try:
        simplejpeg.decode_jpeg(data, colorspace=space, buffer=buffer, strict=True, **least)
    except ValueError as error:
        text = str(error)
        if cut and "extraneous bytes before marker 0xd9" not in text:
            return _decode_jpeg(content, header, mode, factor, header.rows, buffer)
        if not cut:
            if any(words in text.lower() for words in _DAMAGE):
                raise DecodeError(f"cannot be decoded: {text}") from None
            return None
    channels = 1 if mode == "L" else 3
    array: NDArray[Any] = buffer[: height * width * channels].reshape(height, width, channels)
    return array


def _ends_whole(content: bytes) -> bool:
    """Whether the file ends with the end of the image; zeros and a line break may follow."""
    return content.endswith(b"\xff\xd9") or content[-4096:].rstrip(b"\0\r\n").endswith(b"\xff\xd9")


def upright(array: NDArray[Any], orientation: int) -> NDArray[Any]:
    """A picture rotated according to EXIF, like `ImageOps.exif_transpose`."""
    if orientation == 1:
        return array
    if orientation in _TRANSPOSED:
        array = array.swapaxes(0, 1)
    rows_reversed, columns_reversed = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return array[:: -1 if rows_reversed else 1, :: -1 if columns_reversed else 1].copy()


def as_stored(array: NDArray[Any], orientation: int) -> NDArray[Any]:
    """What `upright` has turned, as it was."""
    return upright(array, {0: 1, 6: 8, 8: 6}.get(orientation, orientation))


def decode_with_pillow(content: bytes, mode: Mode, bits: int | None = None) -> NDArray[Any]:
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise ValueError("the image is empty (0 bytes)")
    if content.startswith(PNG):
        check_png(content)
        allow_text()
    try:
        with Image.open(io.BytesIO(content)) as picture:
            check_pixels(*picture.size)
            if bits and picture.mode not in _DEEP and depth_of(content, picture) > 8:
                raise ValueError("bits is for grey images only; scale colour images to 16 bits")
            return image_array(picture, mode, bits, in_place=True)
    except Image.DecompressionBombError as error:
        raise too_large(error) from None
    except UnidentifiedImageError:
        if content.startswith((b"II*\0", b"MM\0*")):
            raise DecodeError(
                f"cannot be decoded: a TIFF that Pillow cannot read; {_REMEDY}"
            ) from None
        raise ValueError(f"not an image (first bytes {content[:8]!r})") from None
    except (OSError, SyntaxError) as error:
        raise DecodeError(f"cannot be decoded: {error}") from None


def image_array(
    image: Any, mode: Mode, bits: int | None = None, in_place: bool = False
) -> NDArray[Any]:
    """A Pillow image, upright, as a uint8 array, height × width × channels.

    Of more than 8 bits per channel, it keeps the upper 8. `in_place`: the image itself may be changed.
    """
    import numpy as np
    from PIL import Image, ImageOps

    if hasattr(image, "tag_v2"):
        check_tiff(image.tag_v2)
    fits = image.format == "FITS"  # Pillow ignores its zero and scale
    if fits or image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        kind = "FITS" if fits else "32-bit"
        raise ValueError(
            f"{kind} pixels, whose range only you can tell; convert it to 8 or 16 bits"
        )
    if in_place:
        ImageOps.exif_transpose(image, in_place=True)
    else:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # Pillow clips 16-bit values on conversion; scaling preserves the picture.
        values = np.asarray(image).astype(np.uint32)
        bits = bits or 16
        if int(values.max(initial=0)) >> bits:
            raise ValueError(f"a value of {values.max()} has more than {bits} bits")
        image = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
    image.info.pop("transparency", None)  # Pillow warns of it, for each image
    # The only mode that Pillow converts it to.
    if step := {"La": "LA", "LAB": "RGB"}.get(image.mode):
        image = image.convert(step)
    array = np.asarray(image.convert(mode))
    return array[..., None] if array.ndim == 2 else array


def check_png(content: bytes) -> None:
    """Check the CRCs of all PNG chunks; Pillow does that for the header only."""
    at, view = len(PNG), memoryview(content)
    kind = b""
    while kind != b"IEND":
        end = at + 8 + int.from_bytes(content[at : at + 4])
        kind = content[at + 4 : at + 8]
        if end + 4 > len(content):
            raise DecodeError("cannot be decoded: the PNG is truncated")
        if zlib.crc32(view[at + 4 : end]) != int.from_bytes(content[end : end + 4]):
            raise DecodeError(
                f"cannot be decoded: the checksum of the PNG's {kind!r} part is wrong"
            )
        at = end + 4
