"""Chain worker: fuses adjacent stages into one stage with joined names.

Fused are decoding with the geometric transforms after it (the crop is then chosen before decoding), geometric
transforms alone (one resize, for example of a cached image), and Gaussian blurs (one kernel).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.chain.blur import GaussianBlurs
from stoker.chain.picture import Picture, open_picture, with_channels
from stoker.chain.stages import RecordTransform, Stage, value_of
from stoker.chain.transforms import CheckLabel, DecodeImage, ImageTransform, tensor_of
from stoker.messages import Record

if TYPE_CHECKING:
    import numpy as np


def fuse(stages: list[Stage]) -> list[Stage]:
    """Chain worker: the stages as they are executed.

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
    uses_torch = any(stage.uses_torch for stage in run)
    random, uses_random = any(stage.random for stage in run), any(stage.uses_random for stage in run)
    return [Stage(name, "record", whole, uses_torch, random, uses_random)]


class Fused(RecordTransform):
    """Chain worker: geometric transforms, optionally with the decoding before them, in one step."""

    def __init__(self, run: list[Stage]) -> None:
        first = run[0].apply
        self.decode = first if isinstance(first, DecodeImage) else None
        parts = run[1:] if self.decode else run
        self.parts: list[tuple[str, ImageTransform]] = [(s.name, s.apply) for s in parts]  # type: ignore[misc]
        self.first = run[0].name
        self.gives_tensor = self.parts[-1][1].gives_tensor

    def prepare(self) -> None:
        """Chain worker: import what the first image would otherwise import."""
        import simplejpeg  # noqa: F401

        for _, part in self.parts:
            part.prepare()

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        name = self.first
        try:
            image = value_of(record, "image")
            decode = self.decode
            if decode and isinstance(image, bytes | bytearray | memoryview):
                picture = Picture(bytes(image), decode.mode, decode.bits)
            else:
                if decode:
                    image = with_channels(image, decode.mode, decode.bits)
                picture = open_picture(image)  # type: ignore[assignment]
            for part_name, part in self.parts:
                name = part_name
                picture = part.change(picture, rng)  # type: ignore[assignment]
            pixels = picture.pixels()
        except Exception as error:
            # Pixels are decoded only when a later transform needs them.
            late = self.decode and "cannot be decoded" in str(error)
            error.stage = self.first if late else name  # type: ignore[attr-defined]
            raise
        return {**record, "image": tensor_of(pixels) if self.gives_tensor else pixels}
