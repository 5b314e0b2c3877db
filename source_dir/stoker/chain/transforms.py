"""Stoker's image transforms, with torchvision's names and arguments.

They differ from torchvision's in execution: adjacent ones run as one stage, which chooses the crop from the
header, decodes only what it needs and resizes once (see `entries`). Images stay uint8 arrays, height ×
width × channels. Random numbers come from the record's generator.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoker.chain.decode import Mode, as_stored, orientation_of
from stoker.chain.joint import Declaration, parts_of
from stoker.chain.picture import (
    Picture,
    TensorPicture,
    as_mode,
    open_picture,
    resizing_kernels,
    tensor_of,
)
from stoker.chain.stages import RecordTransform, column_value, record_image
from stoker.errors import UsageError
from stoker.protocol import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Pictured = Picture | TensorPicture


class DecodeImage(RecordTransform):
    """Encoded bytes in `image` → uint8 array, height × width × channels, upright.

    JPEG goes through libjpeg-turbo; everything it refuses (CMYK, 16 bit, PNG, …) goes through Pillow. Alpha
    is dropped. Pillow images, and uint8 arrays or tensors of 1 to 4 channels, get the channels of `mode`. A
    truncated image raises, and so do text and arrays of other types.

    Args:
        mode: "RGB" or "L" (one channel).
        bits: of grey images with more than 8 bits: those that the values use, such as 12; the upper 8 of them
            are kept. Default: those of the file, usually 16.
        exif: True: turn images as EXIF tells; masks and boxes beside them are of the turned image. False:
            leave the pixels as stored, as torchvision does, also those of masks. Default: turn them, but
            quarantine those with masks or boxes that EXIF does not turn alike.
    """

    random = False
    exif: bool | None = None
    places: Sequence[str] = ()
    """Columns that later stages of the chain declare to lie in the image."""

    def __init__(
        self, mode: Mode = "RGB", bits: int | None = None, exif: bool | None = None
    ) -> None:
        if bits is not None and not 8 < bits <= 16:
            raise UsageError(f"DecodeImage(bits={bits}): must be 9 to 16")
        self.mode, self.bits, self.exif = mode, bits, exif

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        return {**record, "image": self.opened(record).pixels()}

    def opened(self, record: Record) -> Picture:
        """The picture of a record; of a JPEG, only its header is read."""
        image = column_value(record, "image")
        places = self.places if self.exif is None else ()
        orientation = max(orientation_of(image), 1) if places or self.exif is False else 1
        others = [n for n in places if max(orientation_of(record.get(n)), 1) != orientation]
        if wrong := ", ".join(others):
            raise ValueError(
                f"EXIF does not turn the image and {wrong} alike: set DecodeImage(exif=True) if {wrong} is of"
                " the turned image, or exif=False if it is of the pixels as stored"
            )
        encoded = isinstance(image, bytes | bytearray | memoryview)
        source = bytes(image) if encoded else as_mode(image, self.mode, self.bits)
        picture = Picture(source, self.mode, self.bits)
        if self.exif is not False or orientation == 1:
            return picture
        return Picture(as_stored(picture.pixels(), orientation))


class CheckLabel(RecordTransform):
    """Quarantines a record whose `label` is not an integer in 0 … classes-1.

    With the `names` of the classes, a label that is text becomes the number of its name. With `multi_label`,
    the label must be a vector with a 0 or 1 for each class.
    """

    random = False

    def __init__(self, classes: int, names: Sequence[str] = (), multi_label: bool = False) -> None:
        self.classes, self.multi_label = classes, multi_label
        self.numbers = {name: number for number, name in enumerate(names)}

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        label = column_value(record, "label")
        if self.multi_label:
            self._check_vector(label)
            return record
        if isinstance(label, str) and self.numbers:
            if label not in self.numbers:
                raise ValueError(f"label {label!r} is not one of the {len(self.numbers)} classes")
            label = self.numbers[label]
        if isinstance(label, str) and not re.fullmatch(r"\s*[+-]?[0-9]+\s*", label):
            raise ValueError(f"label {label!r} is not an integer")
        number = int(label)
        if number != label and not isinstance(label, str):
            raise ValueError(f"label {label} is not an integer")
        if not 0 <= number < self.classes:
            raise ValueError(f"label {label} is outside 0…{self.classes - 1}")
        return {**record, "label": number}

    def _check_vector(self, label: Any) -> None:
        import numpy as np

        vector = np.asarray(label)
        if vector.shape != (self.classes,):
            raise ValueError(
                f"label of shape {vector.shape} is not a vector of {self.classes} zeros and ones"
            )
        if (odd := vector[(vector != 0) & (vector != 1)]).size:
            raise ValueError(
                f"label holds {odd[0]}; write 1 for each class of the record and 0 for the others"
            )


class Rename(RecordTransform):
    """Renames columns: `Rename(new="old")`."""

    random = False

    def __init__(self, **columns: str) -> None:
        self.columns = columns

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        renamed = {new: column_value(record, old) for new, old in self.columns.items()}
        old = {*self.columns.values()}
        return {**{name: value for name, value in record.items() if name not in old}, **renamed}


class Drop(RecordTransform):
    """Drops columns that are not used for training; a record may lack them."""

    random = False

    def __init__(self, *columns: str) -> None:
        self.columns = frozenset(columns)

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        return {name: value for name, value in record.items() if name not in self.columns}


class ImageTransform(RecordTransform):
    """Changes the picture in `record["image"]`; adjacent ones are executed as one."""

    uses_random = False
    gives_tensor = False
    """Leave a tensor, channels × height × width, as torchvision's transforms do."""
    declared: Mapping[str, Declaration] = {}
    """Columns that earlier stages of the chain declare to lie in the image."""

    def prepare(self) -> None:
        import cv2  # noqa: F401

        resizing_kernels()

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        return self.finished(record, self.change(opened(record, self.declared), rng))

    def finished(self, record: Record, picture: Pictured) -> Record:
        pixels = picture.pixels()
        image = tensor_of(pixels) if self.gives_tensor else pixels
        return {**record, **picture.parts, "image": image}

    @abstractmethod
    def change(self, picture: Pictured, rng: np.random.Generator) -> Pictured:
        """Add the operation to the picture; pixels are computed later."""


def opened(record: Record, declared: Mapping[str, Declaration]) -> Pictured:
    """The picture of a record, with the parts that lie in it."""
    image = record_image(record)
    parts = parts_of(record, declared, image)
    return open_picture(image, parts, bool(parts or declared))


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    return (size[0], size[0]) if len(size) == 1 else (size[0], size[1])


class RandomResizedCrop(ImageTransform):
    """A random part of the image with random aspect ratio, resized with antialiasing.

    Area and aspect ratio are drawn as torchvision draws them; if ten draws do not fit, it takes the largest
    centred part of an allowed shape. If the picture is more than 3 times larger than the result, the box lies
    on a grid of 2, 4 or 8 pixels.

    Args:
        size: height and width of the result, pixels; a number for both.
        scale: minimum and maximum share of the image's area.
        ratio: minimum and maximum width / height; uniform in its logarithm.
        cubic: bicubic instead of bilinear.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        cubic: bool = False,
    ) -> None:
        self.size, self.scale, self.ratio, self.cubic = _pair(size), scale, ratio, cubic

    def change(self, picture: Pictured, rng: np.random.Generator) -> Pictured:
        return picture.resized_crop(self.box(*picture.shape, rng), *self.size, cubic=self.cubic)

    def box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Top, left, height and width of a random part of an image, pixels."""
        draw = rng.random
        least, most = self.scale
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = height * width * (least + (most - least) * draw())
            ratio = math.exp(low + (high - low) * draw())
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                top, left = int(draw() * (height - tall + 1)), int(draw() * (width - wide + 1))
                return top, left, tall, wide
        wide, tall = width, height
        if width / height < self.ratio[0]:
            tall = round(width / self.ratio[0])
        elif width / height > self.ratio[1]:
            wide = round(height * self.ratio[1])
        return (height - tall) // 2, (width - wide) // 2, tall, wide


class Resize(ImageTransform):
    """Resizes with antialiasing.

    Args:
        size: height and width, pixels; a number: the shorter side, the longer one in proportion.
        max_size: with a number for `size`: limit of the longer side.
        cubic: bicubic instead of bilinear.
    """

    random = False

    def __init__(
        self, size: int | Sequence[int], max_size: int | None = None, cubic: bool = False
    ) -> None:
        self.size, self.max_size, self.cubic = size, max_size, cubic

    def change(self, picture: Pictured, rng: np.random.Generator) -> Pictured:
        return picture.resize(*self.target(*picture.shape), cubic=self.cubic)

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result, pixels; rounded as torchvision does."""
        if not isinstance(self.size, int) and len(self.size) == 2:
            return self.size[0], self.size[1]
        short = self.size if isinstance(self.size, int) else self.size[0]
        long = int(short * max(height, width) / min(height, width))
        if self.max_size is not None and long > self.max_size:
            short, long = int(self.max_size * short / long), self.max_size
        return (short, long) if height <= width else (long, short)


class ShrinkLarger(ImageTransform):
    """Shrinks images whose shorter side is above `size` pixels, with antialiasing; others are unchanged."""

    random = False

    def __init__(self, size: int) -> None:
        self.size = size

    def change(self, picture: Pictured, rng: np.random.Generator) -> Pictured:
        if min(picture.shape) <= self.size:
            return picture
        return picture.resize(*Resize(self.size).target(*picture.shape))


class CenterCrop(ImageTransform):
    """Crops the centre to `size` pixels (a number, or height and width); smaller images get black margins."""

    random = False

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = _pair(size)

    def change(self, picture: Pictured, rng: np.random.Generator) -> Pictured:
        (tall, wide), (height, width) = self.size, picture.shape
        lack, gap = max(tall - height, 0), max(wide - width, 0)
        if lack or gap:
            picture = picture.pad(lack // 2, gap // 2, (lack + 1) // 2, (gap + 1) // 2)
            height, width = picture.shape
        return picture.crop(round((height - tall) / 2), round((width - wide) / 2), tall, wide)


class RandomHorizontalFlip(ImageTransform):
    """Mirrors left and right, with the probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def change(self, picture: Pictured, rng: np.random.Generator) -> Pictured:
        return picture.flip() if rng.random() < self.p else picture


class Compose(ImageTransform):
    """Several transforms in sequence, like torchvision's `Compose`."""

    def __init__(self, parts: Sequence[ImageTransform]) -> None:
        self.parts = list(parts)
        self.random = any(part.random for part in parts)

    def change(self, picture: Pictured, rng: np.random.Generator) -> Pictured:
        for part in self.parts:
            picture = part.change(picture, rng)
        return picture


Blur = tuple[tuple[int, ...], tuple[float, ...]]
"""Kernel size across and down in pixels; minimum and maximum sigma in pixels."""

NEGLIGIBLE = 1e-8
"""Share of a kernel's weight that may be cut off at its ends; the error is below float32 precision."""


class GaussianBlurs(RecordTransform):
    """Torchvision's `GaussianBlur`, or several in sequence, in one convolution.

    Each draws its sigma as torchvision does, from torch's generator seeded for the record. Kernels in
    sequence equal one kernel, their convolution. It is separable like each of them, and because they are
    symmetric, reflecting the image at its border once equals doing it for each. On float32 images the result
    equals torchvision's blurs in sequence to 1e-6 of the range. On uint8 images torchvision rounds
    after each blur and this class once, so several blurs may differ by 2 levels.
    """

    uses_random = False
    uses_torch = True
    gives_tensor = False

    def __init__(self, blurs: list[Blur]) -> None:
        self.blurs = blurs

    def prepare(self) -> None:
        import cv2  # noqa: F401
        import torch  # noqa: F401

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        import torch

        image = record_image(record)
        sigmas = [torch.empty(1).uniform_(*limits).item() for _, limits in self.blurs]
        as_tensor, array = self.gives_tensor, image
        if isinstance(image, torch.Tensor):
            as_tensor = True
            array = image.permute(1, 2, 0).numpy() if image.ndim == 3 else None
        if array is None or not self._fits(array):
            return {**record, "image": self._by_torchvision(image, sigmas)}
        out = self.blurred(array, sigmas)
        return {**record, "image": torch.from_numpy(out).permute(2, 0, 1) if as_tensor else out}

    def _fits(self, array: NDArray[Any]) -> bool:
        """Whether the type is supported and the image large enough for torchvision's reflected margins."""
        height, width, channels = array.shape
        inside = all(x // 2 < width and y // 2 < height for (x, y), _ in self.blurs)
        return inside and channels <= 4 and array.dtype.name in ("uint8", "float32")

    def blurred(self, array: NDArray[Any], sigmas: list[float]) -> NDArray[Any]:
        """The image, height × width × channels, blurred with these sigmas, pixels."""
        import cv2
        import numpy as np

        sizes = [size for size, _ in self.blurs]
        across = kernel([*zip((x for x, _ in sizes), sigmas, strict=True)])
        down = kernel([*zip((y for _, y in sizes), sigmas, strict=True)])
        source = np.ascontiguousarray(array)
        out = cv2.sepFilter2D(source, cv2.CV_32F, across, down, borderType=cv2.BORDER_REFLECT_101)
        if array.dtype == np.uint8:
            out = cv2.convertScaleAbs(out)
        result: NDArray[Any] = out.reshape(array.shape)
        return result

    def _by_torchvision(self, image: Any, sigmas: list[float]) -> Any:
        from torchvision.transforms.v2 import functional

        image = tensor_of(image)
        for (size, _), sigma in zip(self.blurs, sigmas, strict=True):
            image = functional.gaussian_blur(image, list(size), [sigma, sigma])
        return image


def kernel(steps: list[tuple[int, float]]) -> NDArray[Any]:
    """Weights of a sequence of Gaussian kernels (size and sigma, pixels), float32."""
    import numpy as np

    weights = np.ones(1)
    for size, sigma in steps:
        x = np.arange(size) - size // 2
        step = np.exp(-0.5 * (x / sigma) ** 2)
        weights = np.convolve(weights, step / step.sum())
    tail = np.cumsum(weights[: len(weights) // 2])
    cut = int(np.searchsorted(tail, NEGLIGIBLE))
    kept = weights[cut : len(weights) - cut]
    result: NDArray[Any] = (kept / kept.sum()).astype(np.float32)
    return result
