"""Chain worker: Gaussian blurs; adjacent ones become one convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.chain.picture import is_hwc
from stoker.chain.stages import RecordTransform, value_of
from stoker.messages import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Blur = tuple[tuple[int, ...], tuple[float, ...]]
"""Kernel size across and down in pixels; minimum and maximum sigma in pixels."""

NEGLIGIBLE = 1e-8
"""Share of a kernel's weight that may be cut off at its ends; the error is below float32 precision."""


class GaussianBlurs(RecordTransform):
    """Chain worker: torchvision's `GaussianBlur`, or several in sequence, in one convolution.

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
        """Chain worker: import what the first image would otherwise import."""
        import cv2  # noqa: F401
        import torch  # noqa: F401

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        import numpy as np
        import torch

        image = value_of(record, "image")
        if isinstance(image, bytes):
            raise TypeError("the image is still encoded; put DecodeImage() before this stage")
        sigmas = [torch.empty(1).uniform_(*limits).item() for _, limits in self.blurs]
        as_tensor = self.gives_tensor
        if isinstance(image, np.ndarray) and not is_hwc(image.shape):
            image = torch.from_numpy(image)
        if isinstance(image, torch.Tensor):
            as_tensor = True
            array = image.permute(1, 2, 0).numpy() if image.ndim == 3 else None
        else:
            array = image
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
        """Chain worker: the image, height × width × channels, blurred with these sigmas, pixels."""
        import cv2
        import numpy as np

        across = kernel([(size[0], sigma) for (size, _), sigma in zip(self.blurs, sigmas, strict=True)])
        down = kernel([(size[1], sigma) for (size, _), sigma in zip(self.blurs, sigmas, strict=True)])
        source = np.ascontiguousarray(array)
        out = cv2.sepFilter2D(source, cv2.CV_32F, across, down, borderType=cv2.BORDER_REFLECT_101)
        if array.dtype == np.uint8:
            out = cv2.convertScaleAbs(out)
        result: NDArray[Any] = out.reshape(array.shape)
        return result

    def _by_torchvision(self, image: Any, sigmas: list[float]) -> Any:
        import numpy as np
        import torch
        from torchvision.transforms.v2 import functional

        if isinstance(image, np.ndarray):
            image = torch.from_numpy(image).permute(2, 0, 1)
        for (size, _), sigma in zip(self.blurs, sigmas, strict=True):
            image = functional.gaussian_blur(image, list(size), [sigma, sigma])
        return image


def kernel(steps: list[tuple[int, float]]) -> NDArray[Any]:
    """Chain worker: weights of a sequence of Gaussian kernels (size and sigma, pixels), float32."""
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
