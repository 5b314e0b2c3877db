"""Laptop: one core's images/s through the chain against Pillow + torchvision, outputs compared."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks.harness import Measure, cpu_seconds
from stoker.data.chain import Chain
from stoker.data.transforms import DecodeImage, as_stages

IMAGES = 24
ROUNDS = 9


def photos(width: int, height: int) -> list[bytes]:
    """JPEGs (quality 85) with structure at several scales, as photos have."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(IMAGES):
        layers = [
            rng.integers(0, 256, (height // s + 1, width // s + 1, 3), dtype=np.uint8) for s in (64, 16, 4)
        ]
        big = [
            np.asarray(Image.fromarray(a).resize((width, height), Image.Resampling.BICUBIC)) for a in layers
        ]
        mixed = (0.6 * big[0] + 0.3 * big[1] + 0.1 * big[2]).astype(np.uint8)
        content = io.BytesIO()
        Image.fromarray(mixed).save(content, "JPEG", quality=85)
        found.append(content.getvalue())
    return found


def run() -> list[Measure]:
    """The rows of this benchmark."""
    torch.set_num_threads(1)
    rows = []
    for size, goal in (((500, 375), 1.8), ((2048, 1536), 2.7)):
        images = photos(*size)
        records = [{"key": str(i), "image": image, "label": 0} for i, image in enumerate(images)]
        resize = [v2.Resize(256, antialias=True), v2.CenterCrop(224)]
        check(images[0], records[0], resize)
        crop = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
        chain = Chain(as_stages([DecodeImage(), *crop]), seed=0)
        peer = v2.Compose([v2.PILToTensor(), *crop])

        def ours(chain: Chain = chain, records: list[Any] = records) -> None:
            chain.run([dict(record) for record in records], epoch=0)

        def theirs(peer: Any = peer, images: list[bytes] = images) -> None:
            torch.stack([peer(Image.open(io.BytesIO(image)).convert("RGB")) for image in images])

        medians = cpu_seconds({"ours": ours, "peer": theirs, "peer again": theirs}, ROUNDS)
        rates = {name: IMAGES / seconds for name, seconds in medians.items()}
        ratio = rates["ours"] / rates["peer"]
        name = f"JPEG {size[0]}×{size[1]} → 224², per core"
        met = ratio >= goal
        rows.append(
            Measure(
                name, rates["ours"], rates["peer"], "Pillow + torchvision v2", ratio, goal, met, "images/s"
            )
        )
        noise = rates["peer again"] / rates["peer"]
        rows.append(
            Measure(
                f"{name}: noise (A/A)",
                rates["peer again"],
                rates["peer"],
                "itself",
                noise,
                None,
                None,
                "images/s",
            )
        )
    return rows


def check(image: bytes, record: dict[str, Any], resize: list[Any]) -> None:
    """Speed never comes from doing less: the same picture within 4 of 255 levels."""
    columns, _ = Chain(as_stages([DecodeImage(), *resize]), seed=0).run([dict(record)], epoch=0)
    expected = v2.Compose([v2.PILToTensor(), *resize])(Image.open(io.BytesIO(image)).convert("RGB"))
    difference = np.abs(
        columns["image__hwc"][0].astype(int) - expected.permute(1, 2, 0).numpy().astype(int)
    ).max()
    if difference > 4:
        raise RuntimeError(f"our picture differs from torchvision's by {difference} levels")
