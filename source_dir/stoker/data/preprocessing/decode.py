"""Chain worker: encoded images → arrays. Of a JPEG no more is decoded than its use needs.

Which decoder an image gets is told by its header. Baseline and progressive JPEG of 8 bits with one or
three components goes through libjpeg-turbo (simplejpeg), which can leave out rows below a crop and can
decode at half, a quarter or an eighth of the size. All else, and all that libjpeg-turbo finds fault
with, is judged by Pillow.
"""

from __future__ import annotations

import io
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stoker.data.messages import BadRecord, Record
from stoker.data.preprocessing import pixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

Mode = Literal["RGB", "L"]

_START_OF_FRAME = range(0xC0, 0xD0)
_NO_FRAMES = {0xC4, 0xC8, 0xCC}
"""Markers in that range that stand for tables."""
_TRANSPOSED = {5, 6, 7, 8}
"""EXIF orientations that exchange height and width."""
_ORIGIN_STAYS = {1, 5}

_KEPT_BYTES = 64 << 20
_DAMAGE = ("premature end", "corrupt jpeg data", "inconsistent progression")
"""Warnings of libjpeg-turbo after which pixels are wrong; Pillow would pass over them."""
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")
_PNG = b"\x89PNG\r\n\x1a\n"

_of_thread = threading.local()


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """Chain worker: what a JPEG says about itself before its pixels."""

    rows: int
    columns: int
    rows_at: int
    """Where in the file the number of rows stands (two bytes)."""
    sequential: bool
    """One scan from top to bottom, so that decoding may end early."""
    orientation: int
    """EXIF: 1 as it lies, 2 to 8 mirrored or turned."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the upright picture, pixels."""
        turned = self.orientation in _TRANSPOSED
        return (self.columns, self.rows) if turned else (self.rows, self.columns)


def jpeg_header(content: bytes) -> JpegHeader | None:
    """Chain worker: the header of a JPEG that libjpeg-turbo shall decode.

    Returns:
        None for what is not JPEG, has 12 bits or four components (CMYK), is arithmetic coded or
        lossless, or is damaged: Pillow judges those.

    Raises:
        ValueError: it has more pixels than are allowed.
    """
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
            if marker > 0xC2 or at + 10 > end or content[at + 4] != 8 or content[at + 9] not in (1, 3):
                return None
            rows, columns = int.from_bytes(content[at + 5 : at + 7]), int.from_bytes(content[at + 7 : at + 9])
            frame = (rows, columns, at + 5, content[at + 9], marker)
        elif marker == 0xE1:
            part = content[at : at + 2 + length]
            # The number of the tag in either byte order, or its name in XMP.
            may_turn |= b"\x01\x12" in part or b"\x12\x01" in part or b":Orientation" in part
        at += 2 + length
    if frame is None or at + 5 > end or not frame[0] * frame[1]:
        return None
    rows, columns, rows_at, components, marker = frame
    pixels.check(columns, rows)
    sequential = marker != 0xC2 and content[at + 4] == components
    orientation = _orientation(content) if may_turn else 1
    return JpegHeader(rows, columns, rows_at, sequential, orientation) if orientation else None


def check_size(content: bytes) -> None:
    """Chain worker: refuse an encoded image whose header tells too many pixels, whatever is to decode it.

    Raises:
        ValueError: it does.
    """
    from PIL import Image

    if content.startswith(_IMAGES) and jpeg_header(content) is None:
        try:
            with Image.open(io.BytesIO(content)) as image:
                pixels.check(*image.size)
        except Image.DecompressionBombError as error:
            raise pixels.too_large(error) from None
        except (OSError, SyntaxError):
            return  # damaged, or no image: its decoder says so


def sized(record: Record | BadRecord, decodes: bool) -> Record | BadRecord:
    """Chain worker: a record; a bad one where an encoded image in it has too many pixels.

    Args:
        record: as its source gives it.
        decodes: the column `image` needs no look: its decoder refuses such images.
    """
    if isinstance(record, BadRecord):
        return record
    for name, value in record.items():
        if isinstance(value, bytes) and not (decodes and name == "image"):
            try:
                check_size(value)
            except ValueError as error:
                return BadRecord(record["key"], f"column {name}: {error}")
    return record


def _orientation(content: bytes) -> int:
    """What `ImageOps.exif_transpose` would go by; 0 where Pillow fails."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            value = image.getexif().get(0x0112, 1)
    except Exception:
        return 0
    return value if isinstance(value, int) and 2 <= value <= 8 else 1


def decode_image(content: bytes, mode: Mode = "RGB") -> NDArray[Any]:
    """Chain worker: an encoded image, upright, as a uint8 array, height × width × channels.

    Raises:
        ValueError: empty, damaged, truncated, too large or no image.
    """
    import numpy as np

    header = jpeg_header(content)
    if header is None:
        return decode_with_pillow(content, mode)
    buffer = np.empty(header.rows * header.columns * (1 if mode == "L" else 3), dtype=np.uint8)
    array = _decode_jpeg(content, header, mode, 1, header.rows, buffer)
    return decode_with_pillow(content, mode) if array is None else upright(array, header.orientation)


def decode_part(
    content: bytes, header: JpegHeader, mode: Mode, factor: int, height: int
) -> tuple[NDArray[Any], int]:
    """Chain worker: the upper part of a JPEG, made smaller, in memory that the thread's next call uses again.

    Args:
        content: the file.
        header: its header.
        mode: "RGB" or "L".
        factor: 1, 2, 4 or 8: height and width are divided by it and rounded up.
        height: how many rows of the upright, full-size picture are needed; more may come.

    Returns:
        The array, height × width × channels, and the factor that it has, which may be less: 1 from Pillow.

    Raises:
        ValueError: truncated.
    """
    import numpy as np

    # A broken last pixel would come first when the picture is turned, and move all the others.
    while header.orientation not in _ORIGIN_STAYS and (header.rows % factor or header.columns % factor):
        factor //= 2
    size = -(-header.rows // factor) * -(-header.columns // factor) * (1 if mode == "L" else 3)
    buffer = getattr(_of_thread, "buffer", None)
    # A thread that met one huge picture shall not keep its memory for ever.
    if buffer is None or not size <= buffer.size <= max(8 * size, _KEPT_BYTES):
        buffer = _of_thread.buffer = np.empty(size, dtype=np.uint8)
    rows = header.rows
    if header.sequential and header.orientation == 1 and _ends_whole(content):
        # The next row of blocks is needed, too: colours are interpolated between rows.
        wanted = -(-height // 16) * 16 + 16
        rows = wanted if wanted < rows * 0.95 else rows
    array = _decode_jpeg(content, header, mode, factor, rows, buffer)
    if array is None:
        return decode_with_pillow(content, mode), 1
    return upright(array, header.orientation), factor


def _decode_jpeg(
    content: bytes, header: JpegHeader, mode: Mode, factor: int, rows: int, buffer: NDArray[Any]
) -> NDArray[Any] | None:
    """The first `rows` rows as they lie in the file; None where Pillow shall judge.

    Decoding ends early in a copy of the file whose header tells fewer rows. libjpeg-turbo then finds
    bytes left over before the end of the image and says so, when all rows are in the buffer.
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
                raise ValueError(f"cannot be decoded: {text}") from None
            return None
    channels = 1 if mode == "L" else 3
    array: NDArray[Any] = buffer[: height * width * channels].reshape(height, width, channels)
    return array


def _ends_whole(content: bytes) -> bool:
    """Whether the file ends with the end of the image; zeros and a line break may follow."""
    return content.endswith(b"\xff\xd9") or content[-4096:].rstrip(b"\0\r\n").endswith(b"\xff\xd9")


def upright(array: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Chain worker: a picture turned as EXIF says, like `ImageOps.exif_transpose`."""
    if orientation == 1:
        return array
    if orientation in _TRANSPOSED:
        array = array.swapaxes(0, 1)
    # Orientation → whether rows, and whether columns, then run backwards.
    rows, columns = {2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}[orientation]
    return array[:: -1 if rows else 1, :: -1 if columns else 1].copy()


def decode_with_pillow(content: bytes, mode: Mode) -> NDArray[Any]:
    """Chain worker: any image that Pillow reads, upright, as a uint8 array, height × width × channels.

    Raises:
        ValueError: empty, damaged, truncated, too large or no image.
    """
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not content:
        raise ValueError("the image is empty (0 bytes)")
    if content.startswith(_PNG):
        check_png(content)
    try:
        with Image.open(io.BytesIO(content)) as opened:
            pixels.check(*opened.size)
            opened.load()
            image = ImageOps.exif_transpose(opened)
    except Image.DecompressionBombError as error:
        raise pixels.too_large(error) from None
    except UnidentifiedImageError:
        raise ValueError(f"not an image (first bytes {content[:8]!r})") from None
    except (OSError, SyntaxError) as error:
        raise ValueError(f"cannot be decoded: {error}") from None
    if image.mode.startswith("I"):
        # Pillow clips 16-bit values when it converts; scaling keeps the picture.
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    array = np.asarray(image.convert(mode))
    return array[..., None] if array.ndim == 2 else array


def check_png(content: bytes) -> None:
    """Chain worker: compare the chunks of a PNG with their checksums, which Pillow does for its header only.

    Raises:
        ValueError: one is wrong or missing.
    """
    at, view = len(_PNG), memoryview(content)
    kind = b""
    while kind != b"IEND":
        end = at + 8 + int.from_bytes(content[at : at + 4])
        kind = content[at + 4 : at + 8]
        if end + 4 > len(content):
            raise ValueError("cannot be decoded: the PNG is truncated")
        if zlib.crc32(view[at + 4 : end]) != int.from_bytes(content[end : end + 4]):
            raise ValueError(f"cannot be decoded: the checksum of the PNG's {kind!r} part is wrong")
        at = end + 4
