"""Transforms of an image together with its masks and boxes, and the search for those of the image alone."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.chain.decode import PNG, Layout, as_stored, check_png, orientation_of, words_of
from stoker.chain.picture import is_hwc
from stoker.chain.stages import (
    ImageModule,
    RecordTransform,
    Stage,
    column_value,
    is_plain,
    may_draw,
)
from stoker.chain.transforms import Compose, Drop, ImageTransform, Rename
from stoker.errors import UsageError
from stoker.protocol import Record

if TYPE_CHECKING:
    import numpy as np

    from stoker.chain.chain import Chain

_LOSSY = ("AVIF", "JPEG", "JPEG2000", "MPO", "WEBP")


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
                    raise ValueError(
                        f"{name}: not an image (first bytes {bytes(mask[:8])!r})"
                    ) from None
            elif not isinstance(mask, Image.Image):
                kind = type(mask).__name__
                raise TypeError(
                    f"{name} is a {kind}, neither an encoded mask nor a PIL image; leave it out here"
                )
            codec, _, _, args = (
                mask.tile[0] if getattr(mask, "tile", None) else ("", 0, 0, _raw_of(mask))
            )
            raw, *rest = args if isinstance(args, tuple) else (args,)
            grey = str(raw).partition(";")[2] if mask.mode != "P" else ""
            changed = "I" in grey or (codec.startswith("ppm") and rest != [255])
            of_tiff = str(mask.info.get("compression"))
            lossy = mask.format in _LOSSY or "jpeg" in of_tiff or "webp" in of_tiff
            if mask.mode not in ("L", "P", "1") or lossy or changed:
                how = "inverted or scaled numbers" if changed else f"mode {mask.mode}"
                how += " and a lossy compression" if lossy else ""
                raise ValueError(f"{name}: a {mask.format} of {how} holds no class numbers")
            orientation = orientation_of(mask) if self.exif is False else 1
            numbers = as_stored(
                np.array(ImageOps.exif_transpose(mask), dtype=np.uint8), orientation
            )
            if raw == _UNKNOWN and mask.format in ("PNG", "PPM") and not (numbers % 17).any():
                there = np.unique(numbers)
                if len(there) >= 4 and there[-1] == 255:  # fewer may be a class and what is ignored
                    raise ValueError(
                        f"{name}: {there.tolist()} are stretched from 2 or 4 bits; give its bytes"
                    )
            # Pillow stretches 2 or 4 bits to 0 … 255.
            found[name] = numbers // {"2": 85, "4": 17}.get(grey[:1], 1)
        return {**record, **found}


_UNKNOWN = "unknown"


def _raw_of(mask: Any) -> str:
    """How the file has the numbers of a grey image that is read: Pillow has stretched or inverted them."""
    # It may be closed, gone, or not of a file.
    with contextlib.suppress(OSError, AttributeError, TypeError, ValueError):
        if mask.mode != "L":
            return ""
        if mask.format == "TIFF":
            layout = Layout.of(mask.tag_v2)
            return f"L;{layout.bits}{'I' * (layout.photometric == 0)}"
        path = mask.filename or (mask._fp.closed and mask._fp.name)
        file = io.BytesIO(Path(path).read_bytes()) if path else mask._fp
        file.seek(0)
        head = file.read(25)
        if head.startswith(PNG):
            return f"L;{head[24]}"
    return _UNKNOWN


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
        self.random = may_draw(transform)

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
                raise TypeError(
                    f"the column {name!r} is still encoded; put DecodeMask() before this stage"
                )
            parts[name] = tv_tensors.Mask(_tensor(mask))
            if tuple(parts[name].shape[-2:]) != size:
                raise ValueError(
                    f"{name} has size {tuple(parts[name].shape[-2:])}, its image {size}"
                )
        for name in self.boxes:
            values = column_value(record, name)
            values = torch.tensor(values) if isinstance(values, list | tuple) else _tensor(values)
            values = (
                values if values.numel() else values.reshape(0, 4)
            )  # of an image without objects
            if values.ndim != 2 or values.shape[1] != 4:
                raise ValueError(
                    f"{name} has the shape {tuple(values.shape)}; boxes are number × 4"
                )
            if values.dtype not in (torch.float32, torch.float64):
                values = values.float()  # others overflow or lose fractions
            sides = values[:, 2:] - (values[:, :2] if "XYXY" in str(self.format).upper() else 0)
            fits = sides >= -1e-3 * max(size)  # they are rounded
            if len(wrong := values[~(values.isfinite() & fits.repeat(1, 2)).all(dim=1)]):
                box = wrong[0].tolist()
                padding = not wrong[0].isfinite().all() or (wrong[0] == -1).all()
                why = "padding; leave such rows out, `pad` adds them" if padding else "set `format`"
                raise ValueError(f"{name}: {box} is not a box of the format {self.format}: {why}")
            parts[name] = tv_tensors.BoundingBoxes(values, format=self.format, canvas_size=size)
        # v2 expects tensors under `labels`, and leaves plain tensors alone if there is an image.
        others = {n: _tensor(v) if isinstance(v, np.ndarray) else v for n, v in record.items()}
        out = self.transform({**others, **parts})
        for boxes, name in itertools.product(self.boxes, self.masks):
            left, mask = _shape(out.get(boxes))[:1], _shape(out.get(name))
            # With as many rows as there were boxes, a mask lost some with them.
            lost = len(mask) == 2 and mask[:1] == left < (len(parts[boxes]),)
            if lost and left != _shape(out.get("image"))[-2:-1]:
                raise ValueError(
                    f"{name} has {mask[0]} rows after the transform, its image does not"
                )
        return {n: v.as_subclass(torch.Tensor) if n in parts else v for n, v in out.items()}


def _parts(transform: Any) -> Iterator[Any]:
    yield transform
    for part in getattr(transform, "transforms", ()):
        yield from _parts(part)


def _has_channels_last(image: Any) -> bool:
    """A tensor only if its channels cannot be first."""
    import numpy as np

    shape = tuple(image.shape)
    return (
        is_hwc(shape)
        if isinstance(image, np.ndarray)
        else len(shape) == 3 and shape[2] <= 4 < shape[0]
    )


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
    *(
        "RandomPerspective",
        "RandomResize",
        "RandomResizedCrop",
        "RandomRotation",
        "RandomShortestSize",
    ),
    *("RandomVerticalFlip", "RandomZoomOut", "ScaleJitter"),
}
_POLICIES = {"AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide"}
"""Transforms that may rotate and shear; torchvision does not apply them to masks."""
LAST = ""
"""Stands for the end of a chain among its stages."""
_MOVES_TOO, PERHAPS, SURELY = -1, 1, 2
_SURE = re.compile(
    r"(?<![a-z])(?<!\bnum_)(?<!\bn_)"
    r"(?:((?:bounding|bnd)?b?box(?:es)?)|(polygons?|keypoints?|segmentation)|(masks?))(_[cxywh]+)?$"
)
_OF_TOKENS = re.compile(r"(?<![a-z])(attention|attn|causal|padding|text|token)s?_?mask")
_UNSURE = re.compile(r"(?<![a-z])(key)?(points?|landmarks?|corners?|kpt?s)$")
_WHOLE = re.compile(r"(torch\.)?(u?int|bool)")


def refuse_image_alone(chains: Iterable[Chain]) -> None:
    """Refuse random transforms after which image and mask no longer show the same."""
    if found := [text for chain in chains for text, random in moved_alone(chain.stages) if random]:
        raise UsageError(*dict.fromkeys(found))


def moved_alone(
    stages: list[Stage],
    reached: Mapping[str, Mapping[str, int]] | None = None,
    degree: int = SURELY,
) -> list[tuple[str, bool]]:
    """A line per transform of the image alone in a chain for masks or boxes, and whether it is random.

    A deterministic one may be meant: masks can be stored as the image is afterwards.

    Args:
        reached: by stage, how surely columns of the records that reached it are about places in the image.
        degree: of the columns to name.
    """
    lines, known, dropped, reached = [], dict[str, int](), _dropped(stages), reached or {LAST: {}}
    renamed = {o for s in stages if isinstance(s.apply, Rename) for o in s.apply.columns.values()}
    for stage in stages:
        joint = stage.apply if isinstance(stage.apply, Joint) else None
        now = reached.get(stage.name, {})
        # What had the image's size before it was resized is a mask, too.
        known = {
            n: max(s, known.get(n, 0))
            for n, s in {**known, **now}.items()
            if now.get(n) != _MOVES_TOO
        }
        # Only the stage that leaves out a column knows whether it used it.
        left_out = {*known} - renamed - {*reached[LAST]}
        seen = [n for n, s in known.items() if s - (n in left_out) == degree and n not in dropped]
        beside = (
            [n for n in seen if n not in joint.columns] if joint else beside_the_image(stages, seen)
        )
        left = ", ".join(beside)
        for name, random in _moved_by(stage) if left else ():
            remedy = "leave it out" if name in _POLICIES else "put it into Joint"
            if joint:
                name, remedy = f"{name} in Joint", "name it there among the masks or boxes"
            what = f"chain: {name} moves the pixels of the image only, not those of {left}"
            lines.append((f"{what}; {remedy}, or drop {left} with Drop", random))
    return lines


def noting_places(stages: list[Stage], reached: dict[str, dict[str, int]]) -> list[Stage]:
    """The stages of a chain, which add to `reached` what `moved_alone` needs."""

    boxed = any(isinstance(stage.apply, Joint) and stage.apply.boxes for stage in stages)

    def note(stage: Stage | None) -> Stage:
        there = reached.setdefault(stage.name if stage else LAST, {})
        joint = stage is not None and isinstance(stage.apply, Joint)

        def apply(record: Record, rng: np.random.Generator) -> Record:
            with contextlib.suppress(Exception):  # of values that nobody expects
                for name, surely in _places(record, joint, boxed).items():
                    there[name] = max(surely, there.get(name, surely))
            return record

        return Stage("masks", "record", apply, random=False)

    moves = [stage for stage in stages if isinstance(stage.apply, Joint) or _moved_by(stage)]
    noted = [
        each for stage in stages for each in ([note(stage), stage] if stage in moves else [stage])
    ]
    return [*noted, note(None)] if moves else noted


def _places(record: Record, joint: bool, boxed: bool) -> dict[str, int]:
    """How surely each column is about places in the image."""
    image: Any = record.get("image")
    size = _shape(image)
    if len(size) > 2:
        size = size[:2] if _has_channels_last(image) else size[-2:]
    return {
        n: _place(str(n), value, size, joint, boxed) for n, value in record.items() if n != "image"
    }


def _place(name: str, value: Any, size: tuple[int, ...], joint: bool, boxed: bool) -> int:
    if joint and type(value).__module__.startswith(("torchvision.", "PIL.")):
        return _MOVES_TOO
    struct = value[0] if isinstance(value, list) and value else value
    if isinstance(struct, dict):
        inner = {
            n: each if struct is value else [each] for n, each in struct.items()
        }  # a row for each
        # `face_bboxes` may be about the picture as it was; in a Joint, boxes were perhaps made of the struct.
        most = {n: PERHAPS if joint or not _SURE.match(words_of(str(n))) else SURELY for n in inner}
        found = (
            min(most[n], _place(str(n), each, size, joint, boxed)) for n, each in inner.items()
        )
        return max(found, default=0)
    if not (shape := _shape(value)):
        return 0
    kind = str(getattr(value, "dtype", getattr(value, "mode", "")))
    whole, sure = _WHOLE.match(kind), _SURE.search(words := words_of(name))
    box, points, mask = sure.groups()[:3] if sure else ("", "", "")
    of_its_size = len(size) == 2 and size in (shape[:2], shape[-2:])
    numbers = (whole and shape in (size, (1, *size), (*size, 1))) or (
        mask and (whole or kind in ("1", "L", "P"))
    )
    masks = of_its_size and numbers and not _OF_TOKENS.search(words)
    of_boxes = box and not boxed and shape[-1] == 4
    if masks or (len(shape) > 1 and (of_boxes or points)):
        return SURELY
    return PERHAPS * bool(of_its_size or box or points or _UNSURE.search(words))


def _shape(value: Any) -> tuple[int, ...]:
    """Of an array or a Pillow image, or of lists by their first elements; empty: it holds no numbers."""
    if isinstance(value, list | tuple):
        inner = _shape(value[0]) if value else ()
        return (len(value), *inner) if inner or (value and isinstance(value[0], Number)) else ()
    if hasattr(value, "getbands"):
        return (value.height, value.width)
    kind = str(getattr(value, "dtype", ""))
    return () if kind.startswith(("object", "<U", "|S")) else tuple(getattr(value, "shape", ()))


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
    return {
        name for stage in stages if isinstance(stage.apply, Drop) for name in stage.apply.columns
    }


def _moved_by(stage: Stage) -> list[tuple[str, bool]]:
    transform = stage.apply
    if isinstance(transform, Joint):
        transform = transform.transform
        if not all(map(is_plain, _parts(transform))):
            return []  # it gets the whole record
    return list(_moves(getattr(transform, "module", transform), stage))


def _moves(transform: Any, stage: Stage, drawn: bool = False) -> Iterator[tuple[str, bool]]:
    """The geometric parts of a transform, and whether they or what contains them is random."""
    if getattr(transform, "p", 1) == 0:
        return
    if isinstance(transform, ImageTransform):
        if isinstance(transform, Compose):
            for part in transform.parts:
                yield from _moves(part, stage)
        else:
            yield type(transform).__name__, transform.random
    elif isinstance(stage.apply, ImageModule | Joint):
        kinds = [
            c.__name__ for c in type(transform).__mro__ if c.__module__.startswith("torchvision.")
        ]
        drawn = drawn or bool({"RandomApply", "RandomChoice", "RandomOrder"} & {*kinds})
        for part in getattr(transform, "transforms", ()):
            yield from _moves(part, stage, drawn)
        if kind := next((kind for kind in kinds if kind in _STILL | _DRAWN | _POLICIES), ""):
            yield type(transform).__name__, drawn or kind not in _STILL
