"""Head: replaces torchvision transforms with Stoker's, if those do the same work faster."""

from __future__ import annotations

from typing import Any

from stoker.chain.blur import GaussianBlurs
from stoker.chain.stages import ImageModule, Stage, is_plain
from stoker.chain.transforms import (
    CenterCrop,
    CheckLabel,
    Compose,
    ImageTransform,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)

_CUBIC = {"bilinear": False, "bicubic": True, 2: False, 3: True}
"""Interpolation by torchvision's name or Pillow's number."""


def native(module: Any) -> ImageTransform | GaussianBlurs | None:
    """Head: Stoker's replacement for a torchvision transform (v1 or v2); None: keep torchvision's.

    Replaces only plain instances of torchvision's classes with arguments for which the result is the same:
    antialiased, bilinear or bicubic. Subclasses by users are kept.
    """
    if not is_plain(module):
        return None
    name = type(module).__name__
    if name == "Compose":
        parts = [part for part in map(native, module.transforms) if isinstance(part, ImageTransform)]
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
    """Head: give a user's transform that follows torchvision's a tensor, as torchvision would.

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
