"""Transforms of an image together with its masks and boxes, and the search for those of the image alone."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.chain.decode import PERHAPS, PNG, SURELY, Layout, as_stored, check_png, orientation_of, places_in
from stoker.chain.picture import is_hwc
from stoker.chain.stages import ImageModule, RecordTransform, Stage, column_value, is_plain, may_draw
from stoker.chain.transforms import Compose, Drop, ImageTransform
from stoker.errors import UsageError
from stoker.protocol import Record

if TYPE_CHECKING:
    import numpy as np

    from stoker.chain.chain import Chain

_LOSSLESS = {None, "BMP", "DIB", "GIF", "PCX", "PNG", "PPM", "PSD", "SGI", "SUN", "TGA", "TIFF", "XBM"}


class DecodeMask(RecordTransform):
    """An encoded mask, or a Pillow image → its class numbers, uint8, height × width, upright by its own EXIF.

    With `DecodeImage(exif=False)` in the chain, it is left as stored, too.
    Palette colours are ignored: the numbers in the file are the classes. Colour images, lossy formats and
    more than 8 bits are refused, since they hold no class numbers.
    """

    random = False
    exif: bool | None = None
    """The same as that of the chain's DecodeImage."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns or ("mask",)

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        import numpy as np
        from PIL import Image, ImageOps, UnidentifiedImageError

        found = {}
        for name in self.columns:
            mask: Any = column_value(record, name)
            if isinstance(mask, bytes | bytearray | memoryview):
                if (content := bytes(mask)).startswith(PNG):
                    check_png(content)
                try:
                    mask = Image.open(io.BytesIO(content))
                except UnidentifiedImageError:
                    raise ValueError(f"{name}: not an image (first bytes {bytes(mask[:8])!r})") from None
            elif not isinstance(mask, Image.Image):
                kind = type(mask).__name__
                raise TypeError(
                    f"{name} is a {kind}, neither an encoded mask nor a PIL image; leave it out here"
                )
            codec, _, _, args = mask.tile[0] if getattr(mask, "tile", None) else ("", 0, 0, _raw_of(mask))
            raw, *rest = args if isinstance(args, tuple) else (args,)
            grey = str(raw).partition(";")[2] if mask.mode != "P" else ""
            changed = "I" in grey or (codec.startswith("ppm") and rest != [255])
            lossy = mask.format not in _LOSSLESS or "jpeg" in str(mask.info.get("compression"))
            if mask.mode not in ("L", "P", "1") or lossy or changed:
                how = "inverted or scaled numbers" if changed else f"mode {mask.mode}"
                how += " and a lossy compression" if lossy else ""
                raise ValueError(f"{name}: a {mask.format} of {how} holds no class numbers")
            orientation = orientation_of(mask) if self.exif is False else 1
            numbers = as_stored(np.array(ImageOps.exif_transpose(mask), dtype=np.uint8), orientation)
            # Pillow stretches 2 or 4 bits to 0 … 255.
            found[name] = numbers // {"2": 85, "4": 17}.get(grey[:1], 1)
        return {**record, **found}


def _raw_of(mask: Any) -> str:
    """How the file has the numbers of a grey image that is read: Pillow has stretched or inverted them."""
    if mask.format == "TIFF":
        layout = Layout.of(mask.tag_v2)
        return f"L;{layout.bits}{'I' * layout.white_is_zero}"
    with contextlib.suppress(OSError, AttributeError, TypeError):  # it may be gone
        file = mask._fp
        file = io.BytesIO(Path(mask.filename or file.name).read_bytes()) if file.closed else file
        file.seek(0)
        head = file.read(25)
        return f"L;{head[24]}" if head.startswith(PNG) else ""
    return ""


class Joint(RecordTransform):
    """One transform of torchvision.transforms.v2 for an image with its masks and boxes.

    Random numbers are drawn once for all of them, seeded by the record. Masks are resized without mixing
    classes. The transform gets the whole record, so `v2.SanitizeBoundingBoxes` finds `labels`.

    Args:
        transform: a v2 transform or a `v2.Compose`.
        masks: columns of class numbers, height × width, the size of the image. Default: `mask`, which records
            may lack if `boxes` are given.
        boxes: columns of boxes, number × 4, in pixels.
        format: of the boxes: XYXY, XYWH or CXCYWH.
    """

    uses_torch = True

    def __init__(
        self,
        transform: Any,
        masks: Sequence[str] | None = None,
        boxes: Sequence[str] = (),
        format: str = "XYXY",
    ) -> None:
        self.transform, self.boxes, self.format = transform, tuple(boxes), format
        self.masks = ("mask",) if masks is None else tuple(masks)
        self.needs_masks = masks is not None or not boxes
        self.columns = {*self.masks, *self.boxes}
        parts = (transform, *getattr(transform, "transforms", ()))
        self.random = any(map(may_draw, parts))
        self.removes: Any = next((p for p in parts if type(p).__name__ == "SanitizeBoundingBoxes"), None)

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        import numpy as np
        import torch
        from torchvision import tv_tensors

        image = column_value(record, "image")
        if not hasattr(image, "shape"):
            raise TypeError("the image is still encoded; put DecodeImage() before this stage")
        image = _tensor(image).permute(2, 0, 1) if _has_channels_last(image) else _tensor(image)
        size = tuple(image.shape[-2:])
        parts: dict[str, Any] = {"image": tv_tensors.Image(image)}
        for name in self.masks:
            if name not in record and not self.needs_masks:
                continue
            mask = column_value(record, name)
            if not hasattr(mask, "shape"):
                raise TypeError(f"the column {name!r} is still encoded; put DecodeMask() before this stage")
            parts[name] = tv_tensors.Mask(_tensor(mask))
            if tuple(parts[name].shape[-2:]) != size:
                raise ValueError(f"{name} has size {tuple(parts[name].shape[-2:])}, its image {size}")
        for name in self.boxes:
            values = _tensor(column_value(record, name))
            if values.ndim != 2 or values.shape[1] != 4:
                raise ValueError(f"{name} has the shape {tuple(values.shape)}; boxes are number × 4")
            if values.dtype not in (torch.float32, torch.float64):
                values = values.float()  # others overflow or lose fractions
            sides = values[:, 2:] - (values[:, :2] if "XYXY" in str(self.format).upper() else 0)
            if len(wrong := values[~(values.isfinite() & (sides >= 0).repeat(1, 2)).all(dim=1)]):
                box = [round(each, 2) for each in wrong[0].tolist()]
                raise ValueError(f"{name}: {box} is not a box of the format {self.format}; set `format`")
            parts[name] = tv_tensors.BoundingBoxes(values, format=self.format, canvas_size=size)
            if self.removes and len(parts[name]) != len(parts[self.boxes[0]]):
                why = f"SanitizeBoundingBoxes goes by {self.boxes[0]}, and there are not as many {name}"
                raise ValueError(f"{why}; give each a Joint with that alone")
        # v2 expects tensors under `labels`, and leaves plain tensors alone if there is an image.
        others = {n: _tensor(v) if isinstance(v, np.ndarray) else v for n, v in record.items()}
        out = self.transform({**others, **parts})
        for name in self.masks if self.removes else ():
            # With as many rows as there are boxes, it lost some with them.
            if name in parts and (after := out[name].shape[-2:]) != (size := out["image"].shape[-2:]):
                raise ValueError(f"{name} has size {(*after,)}, its image {(*size,)}, after the transform")
        return {n: v.as_subclass(torch.Tensor) if n in parts else v for n, v in out.items()}

    def unpaired(self, records: Sequence[Record]) -> list[str]:
        """Columns with a row for each box that keep them where the transform removes boxes."""
        import torch
        from torchvision import tv_tensors

        first = self.boxes[0] if self.removes and self.boxes else ""
        lengths = [{n: len(v) for n, v in each.items() if getattr(v, "shape", ())} for each in records]
        if len({length.get(first) for length in lengths}) < 2:
            return []  # as many by chance
        paired = [n for n in lengths[0] if all(each.get(n) == each.get(first) for each in lengths)]
        record = max(records, key=lambda each: len(each[first]))
        none = torch.zeros(len(record[first]), 4)
        boxes = tv_tensors.BoundingBoxes(none, format="XYXY", canvas_size=(9, 9))
        out = self.removes({**{n: _tensor(v) for n, v in record.items()}, first: boxes})
        return [n for n in paired if n not in self.columns and len(out[n])]


def _has_channels_last(image: Any) -> bool:
    """A tensor only if its channels cannot be first."""
    import numpy as np

    shape = tuple(image.shape)
    return is_hwc(shape) if isinstance(image, np.ndarray) else len(shape) == 3 and shape[2] <= 4 < shape[0]


def _tensor(values: Any) -> Any:
    """An array as a writable tensor, without a copy if the array is writable."""
    import numpy as np
    import torch

    if not isinstance(values, np.ndarray):
        return values
    return torch.from_numpy(np.require(values, requirements="W"))


_STILL = {"CenterCrop", "FiveCrop", "Pad", "Resize", "TenCrop"}
_DRAWN = {
    *("ElasticTransform", "RandomAffine", "RandomCrop", "RandomHorizontalFlip", "RandomIoUCrop"),
    *("RandomPerspective", "RandomResize", "RandomResizedCrop", "RandomRotation", "RandomShortestSize"),
    *("RandomVerticalFlip", "RandomZoomOut", "ScaleJitter"),
}
_POLICIES = {"AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide"}
"""Transforms that may rotate and shear; torchvision does not apply them to masks."""


def refuse_image_alone(chains: Iterable[Chain]) -> None:
    """Refuse random transforms after which image and mask no longer show the same."""
    if found := [text for chain in chains for text, random in moved_alone(chain.stages) if random]:
        raise UsageError(*dict.fromkeys(found))


def moved_alone(
    stages: list[Stage], reached: Mapping[str, list[Record]] | None = None, degree: int = SURELY
) -> list[tuple[str, bool]]:
    """A line per transform of the image alone in a chain for masks or boxes, and whether it is random.

    A deterministic one may be meant: masks can be stored as the image is afterwards.

    Args:
        reached: the records that reached each stage, which show what lies beside the image.
        degree: how surely columns of these records are about places in the image.
    """
    lines, known, dropped = [], dict[str, int](), _dropped(stages)
    for stage in stages:
        joint = stage.apply if isinstance(stage.apply, Joint) else None
        records = (reached or {}).get(stage.name, [])
        known = _beside(stage, records) | known  # what had the image's size before it was resized, too
        there = {name for record in records for name in record} - dropped
        seen = [name for name, surely in known.items() if surely == degree and name in there]
        if joint and (rows := ", ".join(n for n in joint.unpaired(records) if n in there)):
            what = f"SanitizeBoundingBoxes in {stage.name} removes boxes, but not their rows of {rows}"
            lines.append((f"chain: {what}; return these in its labels_getter, too", degree == SURELY))
        beside = [n for n in seen if n not in joint.columns] if joint else beside_the_image(stages, seen)
        left = ", ".join(beside)
        for name, random in _moved_by(stage) if left else ():
            remedy = "leave it out" if name in _POLICIES else "put it into Joint"
            if joint:
                name, remedy = f"{name} in Joint", "name it there among the masks or boxes"
            what = f"chain: {name} moves the pixels of the image only, not those of {left}"
            lines.append((f"{what}; {remedy}, or drop {left} with Drop", random))
    return lines


def noting_records(stages: list[Stage], reached: dict[str, list[Record]], most: int) -> list[Stage]:
    """The stages of a chain, which add to `reached` what the first records are before they move."""

    def note(stage: Stage) -> Stage:
        there = reached.setdefault(stage.name, [])

        def apply(record: Record, rng: np.random.Generator) -> Record:
            there.extend([dict(record)] * (len(there) < most))
            return record

        return Stage("masks", "record", apply, random=False)

    moves = [stage for stage in stages if isinstance(stage.apply, Joint) or _moved_by(stage)]
    return [each for stage in stages for each in ([note(stage), stage] if stage in moves else [stage])]


def _beside(stage: Stage, records: Iterable[Record]) -> dict[str, int]:
    """Columns that are about places in the image, and how surely."""
    found: dict[str, int] = {}
    joint = isinstance(stage.apply, Joint)
    for record in records:
        for name, known in (*places_in(record).items(), *_of_its_size(record).items()):
            value = record[name]
            if joint and type(value).__module__.startswith(("torchvision.", "PIL.")):
                continue  # it moves these too
            raw = joint and isinstance(value[0] if isinstance(value, list) and value else value, dict)
            # Its boxes were perhaps made of the struct.
            found[name] = max(PERHAPS if raw else known, found.get(name, 0))
    return found


def _of_its_size(record: Record) -> dict[str, int]:
    """Columns with a value for each pixel of the image."""
    import numpy as np

    image: Any = record.get("image")
    image = image if hasattr(image, "shape") else np.asarray(image)
    shape = tuple(image.shape)
    if len(shape) < 2:
        return {}  # encoded
    last = min(shape[0], shape[-1]) <= 4 and _has_channels_last(image)
    size = shape[:2] if last else shape[-2:]
    found = {}
    for name, value in record.items():
        there, kind = tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", ""))
        if name != "image" and size in (there[:2], there[-2:]):
            picture = there == shape and len(shape) > 2 and 1 not in (shape[0], shape[-1])
            chance = "float" in kind and size[0] == size[1] <= 64
            found[name] = PERHAPS if chance or (picture and kind == str(image.dtype)) else SURELY
    return found


def beside_the_image(stages: list[Stage], seen: Iterable[str] = ()) -> list[str]:
    found: dict[str, None] = dict.fromkeys(seen)
    for stage in stages:
        if isinstance(stage.apply, DecodeMask):
            found |= dict.fromkeys(stage.apply.columns)
        elif isinstance(stage.apply, Joint):
            masks = stage.apply.masks if stage.apply.needs_masks else ()
            found |= dict.fromkeys((*masks, *stage.apply.boxes))
    return [name for name in found if name not in _dropped(stages)]


def _dropped(stages: list[Stage]) -> set[str]:
    return {name for stage in stages if isinstance(stage.apply, Drop) for name in stage.apply.columns}


def _moved_by(stage: Stage) -> list[tuple[str, bool]]:
    transform = stage.apply
    if isinstance(transform, Joint):
        transform = transform.transform
        if not all(map(is_plain, (transform, *getattr(transform, "transforms", ())))):
            return []  # it gets the whole record
    return list(_moves(getattr(transform, "module", transform), stage))


def _moves(transform: Any, stage: Stage, drawn: bool = False) -> Iterator[tuple[str, bool]]:
    """The geometric parts of a transform, and whether they or what contains them is random."""
    if isinstance(transform, ImageTransform):
        if isinstance(transform, Compose):
            for part in transform.parts:
                yield from _moves(part, stage)
        else:
            yield type(transform).__name__, transform.random
    elif isinstance(stage.apply, ImageModule | Joint):
        kinds = [c.__name__ for c in type(transform).__mro__ if c.__module__.startswith("torchvision.")]
        drawn = drawn or bool({"RandomApply", "RandomChoice", "RandomOrder"} & {*kinds})
        for part in getattr(transform, "transforms", ()):
            yield from _moves(part, stage, drawn)
        if kind := next((kind for kind in kinds if kind in _STILL | _DRAWN | _POLICIES), ""):
            yield type(transform).__name__, drawn or kind not in _STILL
