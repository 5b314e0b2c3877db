"""From the entries of a recipe's chain to the stages that run.

The head names the stages and replaces torchvision's transforms by Stoker's where those do the same work
faster. Chain workers fuse adjacent stages: decoding with the geometric transforms after it (the crop is then
chosen before decoding), geometric transforms alone (one resize, for example of a cached image), and Gaussian
blurs (one kernel).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stoker.chain.decode import DecodeError
from stoker.chain.joint import (
    Declaration,
    DecodeMask,
    ImageModule,
    moves_pixels,
    parts_of,
)
from stoker.chain.picture import TensorPicture, tensor_of
from stoker.chain.stages import RecordTransform, Stage, is_plain
from stoker.chain.transforms import (
    CenterCrop,
    CheckLabel,
    Compose,
    DecodeImage,
    Drop,
    GaussianBlurs,
    ImageTransform,
    Pictured,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Rename,
    Resize,
    opened,
)
from stoker.errors import UsageError
from stoker.protocol import Record

if TYPE_CHECKING:
    import numpy as np


def fuse(stages: list[Stage]) -> list[Stage]:
    """The stages as they are executed.

    CheckLabel does not use the image: between fused stages it moves in front of them.
    """
    fused: list[Stage] = []
    run: list[Stage] = []
    labels: list[Stage] = []
    for stage in stages:
        if run and isinstance(stage.apply, CheckLabel):
            labels.append(stage)
        elif run and _continues(run[0], stage):
            fused += labels
            labels = []
            run.append(stage)
        else:
            fused += [*_as_one(run), *labels]
            run, labels = [stage], []
    return [*fused, *_as_one(run), *labels]


def _continues(first: Stage, stage: Stage) -> bool:
    if isinstance(stage.apply, GaussianBlurs):
        return isinstance(first.apply, GaussianBlurs)
    return _is_geometric(stage) and (type(first.apply) is DecodeImage or _is_geometric(first))


def _is_geometric(stage: Stage) -> bool:
    return getattr(type(stage.apply), "__call__", None) is ImageTransform.__call__  # noqa: B004


def _as_one(run: list[Stage]) -> list[Stage]:
    if len(run) < 2:
        return run
    names = [stage.name for stage in run]
    name = "+".join(names if len(names) < 5 else [names[0], "…", names[-1]])
    whole: RecordTransform
    if isinstance(run[0].apply, GaussianBlurs):
        whole = GaussianBlurs([blur for stage in run for blur in stage.apply.blurs])  # type: ignore[attr-defined]
        whole.gives_tensor = run[-1].apply.gives_tensor  # type: ignore[attr-defined]
    else:
        whole = Fused(run)
    draws = (any(getattr(s, n) for s in run) for n in ("uses_torch", "random", "uses_random"))
    return [Stage(name, "record", whole, *draws)]


class Fused(RecordTransform):
    """Geometric transforms, optionally with the decoding before them, in one step."""

    def __init__(self, run: list[Stage]) -> None:
        first = run[0].apply
        self.decode = first if isinstance(first, DecodeImage) else None
        parts = run[1:] if self.decode else run
        self.parts: list[tuple[str, ImageTransform]] = [(s.name, s.apply) for s in parts]  # type: ignore[misc]
        self.first = run[0].name

    def prepare(self) -> None:
        import simplejpeg  # noqa: F401

        for _, part in self.parts:
            part.prepare()

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        name = self.first
        try:
            picture = self._opened(record)
            for part_name, part in self.parts:
                name = part_name
                picture = part.change(picture, rng)
            return part.finished(record, picture)
        except Exception as error:
            # Pixels are decoded only when a later transform needs them.
            late = self.decode and isinstance(error, DecodeError)
            error.stage = self.first if late else name  # type: ignore[attr-defined]
            raise

    def _opened(self, record: Record) -> Pictured:
        declared = self.parts[0][1].declared
        if not self.decode:
            return opened(record, declared)
        picture = self.decode.opened(record)
        parts = parts_of(record, declared, picture)
        whole = parts or declared
        return TensorPicture(tensor_of(picture.pixels()), parts) if whole else picture


_CUBIC = {"bilinear": False, "bicubic": True, 2: False, 3: True}
"""Interpolation by torchvision's name or Pillow's number."""


def native(module: Any) -> ImageTransform | GaussianBlurs | None:
    """Stoker's replacement for a torchvision transform (v1 or v2); None: keep torchvision's.

    Replaces only plain instances of torchvision's classes with arguments for which the result is the same:
    antialiased, bilinear or bicubic. Subclasses by users are kept.
    """
    if not is_plain(module):
        return None
    name = type(module).__name__
    if name == "Compose":
        replaced = map(native, module.transforms)
        parts = [part for part in replaced if isinstance(part, ImageTransform)]
        return Compose(parts) if parts and len(parts) == len(module.transforms) else None
    if name == "CenterCrop":
        return CenterCrop(module.size)
    if name == "RandomHorizontalFlip":
        return RandomHorizontalFlip(module.p)
    if name == "GaussianBlur":
        return GaussianBlurs([(tuple(module.kernel_size), tuple(module.sigma))])
    if name in ("RandomResizedCrop", "Resize"):
        cubic = _CUBIC.get(getattr(module.interpolation, "value", module.interpolation))
        if cubic is None or module.antialias is not True:
            return None
        if name == "RandomResizedCrop":
            return RandomResizedCrop(module.size, tuple(module.scale), tuple(module.ratio), cubic)
        if _is_understood(module.size, module.max_size):
            return Resize(module.size, module.max_size, cubic)
    return None


def _is_understood(size: Any, max_size: Any) -> bool:
    """Whether Stoker's Resize supports these; torchvision handles or refuses other combinations."""
    sides = [size] if isinstance(size, int) else size
    if not isinstance(sides, list | tuple) or len(sides) not in (1, 2):
        return False
    return max_size is None or (len(sides) == 1 and max_size > sides[0])


def tensors_for_others(stages: list[Stage]) -> None:
    """Give a user's transform that follows torchvision's a tensor, as torchvision would.

    Inside Stoker and at the end of a chain, images are arrays, height × width × channels.
    """
    following: Any = None
    for stage in reversed(stages):
        if isinstance(stage.apply, CheckLabel):
            continue
        if isinstance(stage.apply, ImageTransform | GaussianBlurs) and stage.of_torchvision:
            known = ImageTransform | GaussianBlurs | ImageModule
            stage.apply.gives_tensor = following is not None and not isinstance(following, known)
        following = stage.apply


_BATCH_ONLY = {"MixUp", "CutMix"}


def as_stages(chain: Sequence[Any]) -> list[Stage]:
    """The entries of a chain as named stages; repeated names get a number.

    Plain torchvision transforms are replaced by Stoker's if those are faster (see `native`).
    """
    if not isinstance(chain, list | tuple):
        raise UsageError(f"preprocess() must return a list, not {type(chain).__name__}")
    stages: list[Stage] = []
    for position, entry in enumerate(chain):
        stage = _as_stage(entry, position)
        taken = sum(s.name.split("#")[0] == stage.name for s in stages)
        name = f"{stage.name}#{taken + 1}" if taken else stage.name
        stages.append(replace(stage, name=name))
    tensors_for_others(stages)
    declare(stages)
    compare_exif(stages)
    return stages


def declare(stages: list[Stage]) -> None:
    """Tell each transform of the image which columns earlier stages have declared to lie in it."""
    declared: dict[str, Declaration] = {}
    moved = ""
    for number, stage in enumerate(stages):
        entry = stage.apply
        if own := declared_by(entry):
            new = [name for name in own if name not in declared]
            if moved and new:
                raise UsageError(
                    f"preprocess(): {moved} moves the image before {stage.name} declares {', '.join(new)};"
                    f" put {moved} behind {stage.name}"
                )
            declared = declared | own
        elif isinstance(entry, Rename):
            old = {new: declared[name] for new, name in entry.columns.items() if name in declared}
            declared = {n: d for n, d in declared.items() if n not in entry.columns.values()} | old
        elif isinstance(entry, Drop):
            declared = {name: d for name, d in declared.items() if name not in entry.columns}
        elif not isinstance(entry, _OF_STOKER):
            moved = ""  # what it makes may be of the image as it is now
        if isinstance(entry, ImageTransform | ImageModule):
            entry = copy(entry)  # another chain may have the same
            entry.declared = declared
            stages[number] = replace(stage, apply=entry)
            if stage.random and (isinstance(entry, ImageTransform) or moves_pixels(entry.module)):
                moved = stage.name


_OF_STOKER = (ImageTransform, ImageModule, GaussianBlurs, CheckLabel, DecodeImage)


def declared_by(entry: Any) -> dict[str, Declaration]:
    return dict.fromkeys(entry.columns, entry) if isinstance(entry, Declaration) else {}


def compare_exif(stages: list[Stage]) -> None:
    """Let the image's decoder know the masks and boxes beside it, and those of masks its `exif`."""
    decoders = [s.apply for s in stages if isinstance(s.apply, DecodeImage | DecodeMask)]
    image = next((entry for entry in decoders if isinstance(entry, DecodeImage)), None)
    if image is None:
        return
    if image.exif is None and image is not decoders[0]:
        raise UsageError(
            "preprocess(): put DecodeImage() before DecodeMask(); it compares their EXIF"
        )
    dropped = [n for s in stages if isinstance(s.apply, Drop) for n in s.apply.columns]
    needed = [name for stage in stages for name in declared_by(stage.apply)]
    for number, stage in enumerate(stages):
        if isinstance(stage.apply, DecodeImage | DecodeMask):
            decoder = copy(stage.apply)
            decoder.exif = image.exif
            if isinstance(decoder, DecodeImage):
                decoder.places = [n for n in dict.fromkeys(needed) if n not in dropped]
            stages[number] = replace(stage, apply=decoder)


def _as_stage(entry: Any, position: int) -> Stage:
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
        stage = _as_stage(entry[1], position)
        return replace(stage, name=entry[0])
    if isinstance(entry, Stage):
        return entry
    name = getattr(entry, "__name__", None) or type(entry).__name__
    if isinstance(entry, type):
        raise UsageError(f"preprocess() entry {position + 1}: {name} is a class; write {name}()")
    if isinstance(entry, RecordTransform):
        return _of_transform(name, entry)
    ancestors = [f"{c.__module__}.{c.__name__}" for c in type(entry).__mro__]
    of_ray = [a for a in ancestors if a.startswith("ray.data.preprocessor")]
    if any(a.endswith(".Preprocessor") for a in of_ray):
        if "NOT_FITTED" in str(entry.fit_status()):
            raise UsageError(
                f"preprocess() entry {position + 1}: {name} is not fitted; call fit() first"
            )
        return Stage(name, "batch", entry.transform_batch, random=False)
    if any(a.startswith("torchvision.transforms") for a in ancestors):
        if name in _BATCH_ONLY:
            raise UsageError(
                f"preprocess() entry {position + 1}: {name} mixes the records of a batch; return it"
                " from on_device()"
            )
        return replace(
            _of_transform(name, native(entry) or ImageModule(entry)), of_torchvision=True
        )
    if callable(entry):
        return Stage(name, "batch", entry)
    raise UsageError(
        f"preprocess() entry {position + 1}: {entry!r} is neither a transform nor a callable"
    )


def _of_transform(name: str, entry: RecordTransform) -> Stage:
    uses_torch = getattr(entry, "uses_torch", False)
    uses_random = entry.random and entry.uses_random
    return Stage(name, "record", entry, uses_torch, entry.random, uses_random)
