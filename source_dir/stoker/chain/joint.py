"""Masks, boxes and key points: declared once, then moved with their image by every later transform.

`DecodeMask`, `Boxes` and `KeyPoints` declare columns, which get the types of `torchvision.tv_tensors`. From
there on torchvision's v2 transforms get the whole record, and Stoker's own move all declared columns. A
column that nothing declares stays as it is.
"""

from __future__ import annotations

import io
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stoker.chain.decode import PNG, as_stored, check_png, orientation_of
from stoker.chain.picture import image_size, tensor_of
from stoker.chain.stages import RecordTransform, column_value, is_plain, may_draw, record_image
from stoker.errors import UsageError
from stoker.protocol import Record

if TYPE_CHECKING:
    import numpy as np

_LOSSY = ("AVIF", "JPEG", "JPEG2000", "MPO", "WEBP")


class Declaration(RecordTransform):
    """Declares columns of places in the image, and gives their values torchvision's type."""

    random = False
    uses_torch = True

    def __init__(self, *columns: str) -> None:
        self.columns = columns

    def prepare(self) -> None:
        from torchvision import tv_tensors  # noqa: F401

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        size = image_size(record_image(record))
        values = {name: column_value(record, name) for name in self.columns}
        return {**record, **{name: self.part(name, v, size) for name, v in values.items()}}

    @abstractmethod
    def part(self, name: str, value: Any, size: tuple[int, int]) -> Any:
        """A value as torchvision's type, for an image of this height and width."""


class DecodeMask(Declaration):
    """An encoded mask, a Pillow image or an array → `tv_tensors.Mask` of class numbers, height × width.

    Files and Pillow images are turned by their own EXIF; with `DecodeImage(exif=False)` in the chain, they are
    left as stored. Palette colours are ignored: the numbers in the file are the classes, as uint8, or int32 if
    they have 16 bits. Colour images, lossy formats and inverted numbers are refused.
    """

    exif: bool | None = None
    """The same as that of the chain's DecodeImage."""

    def __init__(self, *columns: str) -> None:
        super().__init__(*(columns or ("mask",)))

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        masks = {}
        for name in self.columns:
            value: Any = column_value(record, name)
            array = hasattr(value, "shape") and not isinstance(value, memoryview)
            masks[name] = self.part(name, value if array else self._numbers(name, value), (0, 0))
        return {**record, **masks}

    def part(self, name: str, value: Any, size: tuple[int, int]) -> Any:
        import numpy as np
        from torchvision import tv_tensors

        if not hasattr(value, "shape"):
            raise TypeError(f"{name} is still encoded; put DecodeMask({name!r}) before this stage")
        if "uint16" in str(value.dtype):  # torch hardly supports it
            value = np.asarray(value, np.int32)
        return tv_tensors.Mask(_tensor(value))

    def _numbers(self, name: str, value: Any) -> Any:
        import numpy as np
        from PIL import Image, ImageOps, UnidentifiedImageError

        raw, image = "", value
        if isinstance(value, bytes | bytearray | memoryview):
            content = bytes(value)
            if content.startswith(PNG):
                check_png(content)
            try:
                image = Image.open(io.BytesIO(content))
            except UnidentifiedImageError:
                raise ValueError(f"{name}: not an image (first bytes {content[:8]!r})") from None
            raw = _raw_mode(image)
        elif not isinstance(value, Image.Image):
            raise TypeError(f"{name} is a {type(value).__name__}, not a mask")
        compression = str(image.info.get("compression"))
        lossy = image.format in _LOSSY or "jpeg" in compression or "webp" in compression
        deep = image.mode.startswith("I;16")
        if lossy or "I" in raw or not (deep or image.mode in ("L", "P", "1")):
            how = "inverted or scaled numbers" if "I" in raw else f"mode {image.mode}"
            how += " and a lossy compression" if lossy else ""
            raise ValueError(f"{name}: a {image.format} of {how} holds no class numbers")
        orientation = orientation_of(image) if self.exif is False else 1
        numbers = np.array(ImageOps.exif_transpose(image), dtype=np.int32 if deep else np.uint8)
        # Pillow stretches grey of 2 or 4 bits to 0 … 255.
        return as_stored(numbers, orientation) // {"2": 85, "4": 17}.get(raw[:1], 1)


def _raw_mode(image: Any) -> str:
    """How a file stores grey numbers: their bits, and "I" if Pillow inverts or scales them."""
    codec, _, _, args = image.tile[0] if image.tile else ("", 0, 0, "")
    raw, *rest = args if isinstance(args, tuple) else (args,)
    if codec.startswith("ppm") and rest != [255]:
        return "I"
    return "" if image.mode == "P" else str(raw).partition(";")[2].removesuffix("B")


class Boxes(Declaration):
    """Boxes of an image, number × 4, in pixels → `tv_tensors.BoundingBoxes`; integers become float32.

    Args:
        column: an array, a tensor or a list for each record; empty for an image without objects.
        format: XYXY, XYWH or CXCYWH.
    """

    def __init__(self, column: str = "boxes", format: str = "XYXY") -> None:
        super().__init__(column)
        self.format = str(getattr(format, "value", format)).upper()
        if self.format not in ("XYXY", "XYWH", "CXCYWH"):
            raise UsageError(f"Boxes(format={format!r}): must be XYXY, XYWH or CXCYWH")

    def part(self, name: str, value: Any, size: tuple[int, int]) -> Any:
        from torchvision import tv_tensors

        values = _floats(value)
        values = values if values.numel() else values.reshape(0, 4)
        if values.ndim != 2 or values.shape[1] != 4:
            raise ValueError(f"{name} has the shape {tuple(values.shape)}; boxes are number × 4")
        sides = values[:, 2:] - (values[:, :2] if self.format == "XYXY" else 0)
        fits = sides >= -1e-3 * max(size)  # they are rounded
        if len(wrong := values[~(values.isfinite() & fits.repeat(1, 2)).all(dim=1)]):
            box = wrong[0].tolist()
            padding = not wrong[0].isfinite().all() or (wrong[0] == -1).all()
            why = "padding; leave such rows out, `pad` adds them" if padding else "set `format`"
            raise ValueError(f"{name}: {box} is not a box of the format {self.format}: {why}")
        form: Any = self.format
        return tv_tensors.BoundingBoxes(values, format=form, canvas_size=size)


class KeyPoints(Declaration):
    """Points of an image, … × 2 (x and y in pixels) → `tv_tensors.KeyPoints`; integers become float32."""

    def __init__(self, column: str = "keypoints") -> None:
        from torchvision import tv_tensors

        super().__init__(column)
        if not hasattr(tv_tensors, "KeyPoints"):
            raise UsageError("KeyPoints: needs torchvision 0.23 or later")

    def part(self, name: str, value: Any, size: tuple[int, int]) -> Any:
        from torchvision import tv_tensors

        values = _floats(value)
        values = values if values.numel() else values.reshape(0, 2)
        if values.shape[-1] != 2:
            raise ValueError(
                f"{name} has the shape {tuple(values.shape)}; key points are … × 2: keep visibility"
                " in a column of its own"
            )
        return tv_tensors.KeyPoints(values, canvas_size=size)


def _tensor(values: Any) -> Any:
    """An array as a writable tensor, without a copy if the array is writable."""
    import numpy as np
    import torch

    if not isinstance(values, np.ndarray):
        return values
    return torch.from_numpy(np.require(values, requirements="W"))


def _floats(values: Any) -> Any:
    import torch

    values = torch.tensor(values) if isinstance(values, list | tuple) else _tensor(values)
    # Others overflow or lose fractions.
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def parts_of(record: Record, declared: Mapping[str, Declaration], image: Any) -> dict[str, Any]:
    """The columns that lie in an image, by their type or because the chain has declared them."""
    if not declared and "torchvision.tv_tensors" not in sys.modules:
        return {}
    from torchvision import tv_tensors as types

    parts: dict[str, Any] = {}
    for name, value in record.items():
        typed = types.TVTensor in type(value).__mro__  # isinstance takes microseconds for tensors
        if name == "image" or value is None or not (typed or name in declared):
            continue
        size = image_size(image)
        # A stage of the user's own may have made an array or a plain tensor of it.
        parts[name] = value if typed else declared[name].part(name, value, size)
        if (own := _size_of(parts[name])) not in (size, None):
            raise ValueError(f"{name} has size {own}, its image {size}")
    return parts


def _size_of(part: Any) -> tuple[int, ...] | None:
    from torchvision.tv_tensors import Mask

    return tuple(part.shape[-2:]) if isinstance(part, Mask) else getattr(part, "canvas_size", None)


def misfit(record: Record) -> str:
    """Why a record may not leave the chain; empty: its masks have the size of its image."""
    types: Any = sys.modules.get("torchvision.tv_tensors")
    image = record.get("image")
    for name, value in record.items() if types and hasattr(image, "shape") else ():
        if types.Mask not in type(value).__mro__:
            continue
        if (own := _size_of(value)) != (size := image_size(image)):
            return f"{name} has size {own}, its image {size}; if that is meant, end with v2.ToPureTensor()"
    return ""


class ImageModule(RecordTransform):
    """A transform of torchvision on an image, which becomes a CHW tensor, and all that is declared in it."""

    uses_torch = True
    declared: Mapping[str, Declaration] = {}
    """By earlier stages of the chain."""

    def __init__(self, module: Any) -> None:
        self.module, self.random = module, may_draw(module)

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        image = record_image(record)
        mode = getattr(image, "mode", None)
        if isinstance(mode, str) and mode not in ("L", "RGB"):
            raise ValueError(
                f"a PIL image of mode {mode}; put DecodeImage() before this stage, or make it an array"
            )
        if parts := parts_of(record, self.declared, image):
            return self._together(record, image, parts)
        return {**record, "image": _plain(self.module(tensor_of(image)))}

    def _together(self, record: Record, image: Any, parts: dict[str, Any]) -> Record:
        import numpy as np
        import torch
        from torchvision import tv_tensors

        # v2 takes tensors under `labels`, and leaves plain tensors alone if there is an image.
        inputs = {n: _tensor(v) if isinstance(v, np.ndarray) else v for n, v in record.items()}
        inputs |= {**parts, "image": tv_tensors.Image(tensor_of(image))}
        out = inputs
        for step, takes_records, moves in self._steps:
            if takes_records:
                out = step(out)
            elif moves:
                raise TypeError(
                    f"{type(step).__name__} of torchvision.transforms moves the image without"
                    f" {', '.join(parts)}; use torchvision.transforms.v2"
                )
            else:
                changed = step(out["image"])
                tensor = isinstance(changed, torch.Tensor)
                out = {**out, "image": tv_tensors.Image(changed) if tensor else changed}
        kept = inputs.keys() - {*parts, "image"}
        same = {n: record[n] for n in kept if n in record and out.get(n) is inputs[n]}
        return {**out, **same, "image": _plain(out["image"])}

    @cached_property
    def _steps(self) -> list[tuple[Any, bool, bool]]:
        compose = is_plain(self.module) and type(self.module).__name__ == "Compose"
        steps = self.module.transforms if compose else [self.module]
        return [(step, _takes_records(step), moves_pixels(step)) for step in steps]


def _plain(image: Any) -> Any:
    import numpy as np
    import torch

    if not isinstance(image, torch.Tensor):
        return np.array(image)  # nobody may write to the memory of a Pillow image
    return image.as_subclass(torch.Tensor) if type(image) is not torch.Tensor else image


def _leaves(module: Any) -> Iterator[Any]:
    parts = getattr(module, "transforms", None)
    if parts is None:
        yield module
    for part in parts or ():
        yield from _leaves(part)


def _takes_records(module: Any) -> bool:
    from torchvision.transforms import v2

    return all(isinstance(leaf, v2.Transform) for leaf in _leaves(module))


def moves_pixels(module: Any) -> bool:
    """Whether torchvision counts a transform, or one inside it, among the geometric ones or the policies."""
    from torchvision.transforms import v2

    kinds = [kind for leaf in _leaves(module) for kind in type(leaf).__mro__]
    own = [kind for kind in kinds if kind.__module__.startswith("torchvision.")]
    homes = [getattr(v2, kind.__name__, kind).__module__ for kind in own]
    return any(home.endswith(("._geometry", "._auto_augment")) for home in homes)
