"""A recipe on a torch dataset of PIL images, as torchvision and Hugging Face datasets return them."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from stoker.data import DecodeImage, Record, read_torch
from stoker.recipe import Recipe


def pixels(number: int) -> Any:
    y, x, c = np.mgrid[0:16, 0:16, 0:3]
    return (5 * y + 7 * x + 20 * c + 3 * number).astype(np.uint8)


class Pictures:
    def __init__(self, mode: str, array: bool) -> None:
        self.mode, self.array = mode, array

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Record:
        image: Any = Image.fromarray(pixels(number)).convert(self.mode if number % 2 else "RGB")
        return {"image": np.asarray(image) if self.array else image, "label": number % 2}


class Pictured(Recipe):
    first: str = "decode"
    mode: str = "RGB"
    array: bool = False
    pads: bool = False

    @property
    def pad(self) -> Any:
        return {"image": 0} if self.pads else {}

    def read(self, split: str) -> Any:
        return read_torch(Pictures(self.mode, self.array))

    def preprocess(self, split: str) -> list[Any]:
        from torchvision.transforms import v2

        chains = {
            "decode": [DecodeImage()],
            "grey": [DecodeImage("L")],
            "image": [v2.ToImage()],
            "resize": [DecodeImage(), v2.Resize(8)],
            "nothing": [],
        }
        return chains[self.first]

    def model(self) -> Any:
        from torch import nn

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.last = nn.Linear(3, 2)

            def forward(self, image: Any) -> Any:
                return self.last(image.float().mean((2, 3)) / 255)

        return Net()

    def training_step(self, model: Any, batch: Any) -> Any:
        from torch.nn import functional

        return functional.cross_entropy(model(batch["image"]), batch["label"])
