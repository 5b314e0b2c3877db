"""Chain worker: antialiased resizing of uint8 arrays with torch's kernel, without torchvision."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

with warnings.catch_warnings():
    # torch warns once per process about read-only memory. Cached images are read-only, and are only read
    # here.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))


def resample(
    array: NDArray[Any], height: int, width: int, scale: tuple[float, float], cubic: bool
) -> NDArray[Any]:
    """Chain worker: row i averages around input row scale × (i + ½) - ½, as torchvision's `resize` does.

    Args:
        array: uint8, height × width × channels; may be a slice of a larger one.
        height: rows of the result.
        width: columns of the result.
        scale: input pixels per output pixel, down and across.
        cubic: bicubic instead of bilinear.
    """
    if min(array.strides) < 0:  # torch does not support negative strides
        array = np.ascontiguousarray(array)
    out = np.empty((height, width, array.shape[2]), dtype=np.uint8)
    # Both as channels × height × width in channels-last memory, for which the kernel has a fast path.
    source = torch.from_numpy(array).permute(2, 0, 1)[None]
    target = torch.from_numpy(out).permute(2, 0, 1)[None]
    kernel = torch.ops.aten._upsample_bicubic2d_aa if cubic else torch.ops.aten._upsample_bilinear2d_aa
    kernel.out(source, [height, width], False, 1 / scale[0], 1 / scale[1], out=target)
    return out


def reach(outputs: int, scale: float, cubic: bool) -> int:
    """Chain worker: number of input pixels that the first `outputs` output pixels average over."""
    support = (2.0 if cubic else 1.0) * max(scale, 1.0)
    return int(scale * (outputs - 0.5) + support + 0.5) + 1
