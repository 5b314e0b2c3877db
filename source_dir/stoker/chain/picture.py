"""Chain worker: a picture that is cropped, resized and flipped in one step when its pixels are requested.

Until then only its header is read. So a crop is chosen before decoding, and decoding can skip what no pixel
of the result needs. Resizing uses torch's antialiased uint8 kernel, the one that torchvision calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from stoker.chain.decode import (
    Mode,
    decode_part,
    decode_whole,
    decode_with_pillow,
    image_array,
    jpeg_header,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPARE = 1.0
"""A JPEG is decoded at a reduced size (by 2, 4 or 8) only while it stays at least this many times larger than
the result, like Pillow's `draft`. Photos of 2048×1536 then differ from a full decode by 0.5 of 255 levels on
average and 2 in the 99th percentile; with 1.5 by 0.3 and 1.3, at 10 % more CPU time."""


def channels_last(image: Any) -> bool:
    """Arrays are height × width × channels, tensors channels × height × width."""
    import numpy as np

    return isinstance(image, np.ndarray) and image.ndim == 3


def image_size(image: Any) -> tuple[int, int]:
    """Height and width of an array, a tensor or a Pillow image."""
    if not hasattr(image, "shape"):
        return image.height, image.width
    shape = tuple(image.shape)
    return shape[:2] if channels_last(image) else shape[-2:]


def as_mode(image: Any, mode: Mode, bits: int | None = None) -> NDArray[Any]:
    """An image that is not encoded, with the channels of a mode, as conversion by Pillow gives."""
    import numpy as np
    from PIL import Image

    if isinstance(image, Image.Image):
        return image_array(image, mode, bits)
    dtype = str(
        getattr(image, "dtype", "text" if isinstance(image, str) else f"a {type(image).__name__}")
    )
    if not dtype.endswith("uint8"):
        raise TypeError(f"column image is {dtype}, neither an encoded image nor a uint8 array")
    array = np.asarray(image)
    if array.ndim == 3 and not channels_last(image):
        array = array.transpose(1, 2, 0)
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or not 1 <= channels <= 4:
        raise ValueError(
            f"column image has the shape {tuple(image.shape)}; arrays are height × width × 1 to 4 channels,"
            " tensors channels × height × width"
        )
    array = np.ascontiguousarray(array)
    if channels == (3 if mode == "RGB" else 1):
        return array.reshape(*array.shape[:2], channels)
    return image_array(Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array), mode)


def tensor_of(image: Any) -> Any:
    """An array as a tensor, with channels first; anything else as it is."""
    import numpy as np

    if not isinstance(image, np.ndarray):
        return image
    import torch

    # A transform may write into it; memory of a cache or of Pillow cannot be written.
    tensor = torch.from_numpy(image if image.flags.writeable else image.copy())
    return tensor.permute(2, 0, 1) if channels_last(image) else tensor


def open_picture(image: Any, parts: dict[str, Any], whole: bool) -> Picture | TensorPicture:
    """A picture of an image; with the parts that lie in it, if there may be any (`whole`)."""
    import numpy as np

    if isinstance(image, np.ndarray) and not whole:
        image = image[..., None] if image.ndim == 2 else image
        if image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] in (1, 3):
            return Picture(image)
    return TensorPicture(tensor_of(image), parts)


class Picture:
    """A uint8 image and its pending operations: crop → resize → window → flip."""

    parts: Mapping[str, Any] = {}
    __slots__ = ("array", "box", "content", "cubic", "flipped", "header", "mode", "size", "window")

    def __init__(self, source: Any, mode: Mode = "RGB", bits: int | None = None) -> None:
        self.mode, self.content = mode, source
        self.header: Any = None
        self.array: NDArray[Any] | None = None
        if not isinstance(source, bytes):
            self.array = source
        elif (header := jpeg_header(source)) is None:
            self.array = decode_with_pillow(source, mode, bits)
        else:
            self.header = header
        height, width = self.array.shape[:2] if self.array is not None else self.header.size
        self.box = (0, 0, height, width)
        self.size: tuple[int, int] | None = None
        self.window: tuple[int, int, int, int] | None = None
        """Top, left, height and width of the part of that to keep."""
        self.cubic = False
        self.flipped = False

    @property
    def shape(self) -> tuple[int, int]:
        return (self.window or (0, 0, *self.size))[2:] if self.size else self.box[2:]

    def crop(self, top: int, left: int, height: int, width: int) -> Picture:
        if self.flipped:
            left = self.shape[1] - left - width
        if self.size:
            outer = self.window or (0, 0, *self.size)
            self.window = (outer[0] + top, outer[1] + left, height, width)
        else:
            self.box = (self.box[0] + top, self.box[1] + left, height, width)
        return self

    def resize(self, height: int, width: int, cubic: bool = False) -> Picture:
        if (height, width) == self.shape:
            return self
        picture = Picture(self.pixels()) if self.size else self
        picture.size, picture.cubic = (height, width), cubic
        return picture

    def resized_crop(
        self, box: tuple[int, int, int, int], height: int, width: int, cubic: bool = False
    ) -> Picture:
        """Crop and resize. If the picture is much larger than the result, the box moves to a grid.

        The grid has 2, 4 or 8 pixels, so that the box has whole pixels in the reduced picture. It depends on
        the sizes alone, never on whether the picture is decoded already.
        """
        top, left, tall, wide = box
        rows, columns = self.shape
        factor = shrink(tall, wide, height, width)
        if factor > 1:
            top, left = top // factor * factor, left // factor * factor
            tall = min(round(tall / factor), (rows - top) // factor) * factor
            wide = min(round(wide / factor), (columns - left) // factor) * factor
        return self.crop(top, left, tall, wide).resize(height, width, cubic)

    def flip(self) -> Picture:
        self.flipped = not self.flipped
        return self

    def pad(self, top: int, left: int, bottom: int, right: int) -> Picture:
        import numpy as np

        return Picture(np.pad(self.pixels(), ((top, bottom), (left, right), (0, 0))))

    def pixels(self) -> NDArray[Any]:
        import numpy as np

        if self.size is None:
            whole = self.array
            if whole is None:
                whole = decode_whole(self.content, self.header, self.mode)
            top, left, height, width = self.box
            out = np.ascontiguousarray(whole[top : top + height, left : left + width])
            return mirrored(out, in_place=False) if self.flipped else out
        out = self._resized(*self.size)
        if self.window:
            top, left, height, width = self.window
            out = np.ascontiguousarray(out[top : top + height, left : left + width])
        return mirrored(out, in_place=True) if self.flipped else out

    def _resized(self, rows: int, columns: int) -> NDArray[Any]:
        """The resized crop, only as far down and to the right as the window reaches."""
        top, left, tall, wide = self.box
        factor = shrink(tall, wide, rows, columns)
        while top % factor or left % factor:
            factor //= 2
        scale = (tall / rows, wide / columns)
        if self.window:
            rows, columns = self.window[0] + self.window[2], self.window[1] + self.window[3]
            # Input pixels that the last kept row and column average over.
            tall = min(tall, input_extent(rows, scale[0], self.cubic))
            wide = min(wide, input_extent(columns, scale[1], self.cubic))
        if self.array is not None:
            array, factor = self.array, 1
        else:
            below = top + tall + 2 * factor
            array, factor = decode_part(self.content, self.header, self.mode, factor, below)
        bottom, right = -(-(top + tall) // factor), -(-(left + wide) // factor)
        part = array[top // factor : bottom, left // factor : right]
        return resample(part, rows, columns, (scale[0] / factor, scale[1] / factor), self.cubic)


def shrink(tall: int, wide: int, height: int, width: int) -> int:
    """Factor by which a crop of tall × wide pixels may be reduced for height × width."""
    factor = 1
    while factor < 8 and min(tall / height, wide / width) >= 2 * factor * SPARE:
        factor *= 2
    return factor


def mirrored(array: NDArray[Any], in_place: bool) -> NDArray[Any]:
    import cv2

    out = array if in_place else array.copy()
    cv2.flip(out, 1, dst=out)
    return out


class TensorPicture:
    """Any other image (a tensor, an array of more channels), and what lies in it, handled by torchvision."""

    def __init__(self, image: Any, parts: Mapping[str, Any] = {}) -> None:
        from torchvision.transforms.v2 import functional

        self.image, self.parts, self._by = image, parts, functional

    def _each(self, change: Callable[[Any], Any]) -> TensorPicture:
        parts = {name: change(part) for name, part in self.parts.items()}
        return TensorPicture(change(self.image), parts)

    @property
    def shape(self) -> tuple[int, int]:
        height, width = self._by.get_size(self.image)
        return height, width

    def crop(self, top: int, left: int, height: int, width: int) -> TensorPicture:
        return self._each(lambda part: self._by.crop(part, top, left, height, width))

    def resize(self, height: int, width: int, cubic: bool = False) -> TensorPicture:
        how = self._by.InterpolationMode.BICUBIC if cubic else self._by.InterpolationMode.BILINEAR
        return self._each(lambda part: self._by.resize(part, [height, width], how, antialias=True))

    def resized_crop(
        self, box: tuple[int, int, int, int], height: int, width: int, cubic: bool = False
    ) -> TensorPicture:
        return self.crop(*box).resize(height, width, cubic)

    def flip(self) -> TensorPicture:
        return self._each(self._by.horizontal_flip)

    def pad(self, top: int, left: int, bottom: int, right: int) -> TensorPicture:
        return self._each(lambda part: self._by.pad(part, [left, top, right, bottom]))

    def pixels(self) -> Any:
        return self.image


@cache
def resizing_kernels() -> tuple[Any, Any]:
    """torch's antialiased bilinear and bicubic kernels; the first call imports torch."""
    import numpy as np
    import torch

    with warnings.catch_warnings():
        # torch warns once per process about read-only memory. Cached images are, and are only read here.
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))
    return torch.ops.aten._upsample_bilinear2d_aa, torch.ops.aten._upsample_bicubic2d_aa


def resample(
    array: NDArray[Any], height: int, width: int, scale: tuple[float, float], cubic: bool
) -> NDArray[Any]:
    """Row i averages around input row scale × (i + ½) - ½, as torchvision's `resize` does."""
    import numpy as np
    import torch

    kernel = resizing_kernels()[cubic]
    if min(array.strides) < 0:  # torch does not support negative strides
        array = np.ascontiguousarray(array)
    out = np.empty((height, width, array.shape[2]), dtype=np.uint8)
    # Both as channels × height × width in channels-last memory, for which the kernel has a fast path.
    source = torch.from_numpy(array).permute(2, 0, 1)[None]
    target = torch.from_numpy(out).permute(2, 0, 1)[None]
    kernel.out(source, [height, width], False, 1 / scale[0], 1 / scale[1], out=target)
    return out


def input_extent(outputs: int, scale: float, cubic: bool) -> int:
    """Number of input pixels that the first `outputs` output pixels average over."""
    support = (2.0 if cubic else 1.0) * max(scale, 1.0)
    return int(scale * (outputs - 0.5) + support + 0.5) + 1
