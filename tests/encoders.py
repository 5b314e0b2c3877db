"""TIFF and PNG files of any layout, written by hand, as references for decoders."""

from __future__ import annotations

import itertools
import struct
import zlib
from typing import Any

import numpy as np


def smooth(channels: int = 3, height: int = 37, width: int = 29) -> Any:
    y, x = np.mgrid[0:height, 0:width].astype(float)
    return np.stack(
        [0.5 + 0.4 * np.sin(x / (3 + c) + y / (5 - c / 2) + c) for c in range(channels)], -1
    )


def bits_of(values: Any, bits: int) -> bytes:
    """Rows of numbers of fewer than 8 or of 12 bits, each row padded to bytes."""
    rows = [
        "".join(format(int(v), f"0{bits}b") for v in row) for row in values.reshape(len(values), -1)
    ]
    return b"".join(int(r + "0" * (-len(r) % 8), 2).to_bytes(-(-len(r) // 8)) for r in rows)


def tiff(
    pixels: Any,
    order: str = "<",
    planes: bool = False,
    packed: bool = False,
    tile: int = 0,
    photometric: int | None = None,
    extra: tuple[int, ...] = (),
    kind: int = 1,
    bits: int = 0,
    palette: Any = None,
) -> bytes:
    height, width, channels = pixels.shape
    parts = [pixels[..., c : c + 1] for c in range(channels)] if planes else [pixels]
    places = list(
        itertools.product(range(0, height, tile or height), range(0, width, tile or width))
    )
    chunks = []
    for part, (top, left) in itertools.product(parts, places):
        cut = part[top : top + (tile or height), left : left + (tile or width)]
        if tile:
            cut = np.pad(cut, ((0, tile - cut.shape[0]), (0, tile - cut.shape[1]), (0, 0)))
        raw = bits_of(cut, bits) if bits else cut.astype(cut.dtype.newbyteorder(order)).tobytes()  # type: ignore[call-overload]
        chunks.append(zlib.compress(raw) if packed else raw)
    colours = (2 if channels > 2 else 1) if photometric is None else photometric
    tags: dict[int, tuple[str, Any]] = {
        256: ("I", [width]),
        257: ("I", [height]),
        258: ("H", [bits or 8 * pixels.dtype.itemsize] * channels),
        259: ("H", [8 if packed else 1]),
        262: ("H", [colours]),
        277: ("H", [channels]),
        284: ("H", [2 if planes else 1]),
        339: ("H", [kind] * channels),
        **({338: ("H", extra)} if extra else {}),
        **({320: ("H", palette.T.ravel())} if palette is not None else {}),
        **({322: ("I", [tile]), 323: ("I", [tile])} if tile else {278: ("I", [height])}),
        (324 if tile else 273): ("I", [0] * len(chunks)),
        (325 if tile else 279): ("I", [len(chunk) for chunk in chunks]),
    }
    sizes = {tag: len(values) * struct.calcsize(form) for tag, (form, values) in tags.items()}
    ext_at = 8 + 2 + 12 * len(tags) + 4
    at = ext_at + sum(size for size in sizes.values() if size > 4)
    tags[324 if tile else 273] = "I", [at + sum(map(len, chunks[:i])) for i in range(len(chunks))]
    head, ext = b"", b""
    for tag, (form, values) in sorted(tags.items()):
        packed_values = struct.pack(order + form * len(values), *map(int, values))
        head += struct.pack(order + "HHI", tag, 3 if form == "H" else 4, len(values))
        if len(packed_values) <= 4:
            head += packed_values.ljust(4, b"\0")
        else:
            head, ext = head + struct.pack(order + "I", ext_at + len(ext)), ext + packed_values
    magic = b"II" if order == "<" else b"MM"
    start = magic + struct.pack(order + "HIH", 42, 8, len(tags))
    return start + head + bytes(4) + ext + b"".join(chunks)


def png(pixels: Any, colour: int, bits: int, *parts: tuple[bytes, bytes]) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    rows = [
        b"\0" + (bits_of(row[None], bits) if bits < 8 else row.astype(f">u{bits // 8}").tobytes())
        for row in pixels
    ]
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], bits, colour, 0, 0, 0)
    inner = [chunk(*part) for part in parts]
    body = chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(inner) + body
