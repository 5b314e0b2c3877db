"""Laptop: images/s per core through the chain against Pillow + torchvision; compares outputs."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks.harness import Measure, cpu_seconds
from recipes.synthetic_vit import RandomImage
from stoker.chain.chain import Chain
from stoker.chain.entries import as_stages
from stoker.chain.transforms import DecodeImage

IMAGES = 24
ROUNDS = 9
CROP = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]


def photos(width: int, height: int) -> list[bytes]:
    """JPEGs (quality 85) with structure at several scales, like photos."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(IMAGES):
        layers = [
            rng.integers(0, 256, (height // s + 1, width // s + 1, 3), dtype=np.uint8)
            for s in (64, 16, 4)
        ]
        big = [
            np.asarray(Image.fromarray(a).resize((width, height), Image.Resampling.BICUBIC))
            for a in layers
        ]
        mixed = (0.6 * big[0] + 0.3 * big[1] + 0.1 * big[2]).astype(np.uint8)
        content = io.BytesIO()
        Image.fromarray(mixed).save(content, "JPEG", quality=85)
        found.append(content.getvalue())
    return found


def run() -> list[Measure]:
    """Run the benchmark and return its rows."""
    torch.set_num_threads(1)
    rows = []
    for size, goal in (((500, 375), 1.8), ((2048, 1536), 2.7)):
        rows += decoding(*size, goal)
    return [*rows, *cached(3.5), *blurring(20.0)]


def decoding(width: int, height: int, goal: float) -> list[Measure]:
    """JPEG → random crop of 224², antialiased, and a flip."""
    images = photos(width, height)
    records = [{"key": str(i), "image": image, "label": 0} for i, image in enumerate(images)]
    check(images[0], records[0], [v2.Resize(256, antialias=True), v2.CenterCrop(224)])
    chain = Chain(as_stages([DecodeImage(), *CROP]), seed=0)
    return compare(
        f"JPEG {width}×{height} → 224², per core",
        lambda: chain.run([dict(record) for record in records], epoch=0),
        peers(images),
        goal,
    )


def cached(goal: float) -> list[Measure]:
    """The same from decoded images, against decoding them again."""
    images = photos(500, 375)
    decoded = [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in images]
    records = [{"key": str(i), "image": image, "label": 0} for i, image in enumerate(decoded)]
    chain = Chain(as_stages(CROP), seed=0)
    return compare(
        "decoded 500×375 → 224², per core",
        lambda: chain.run([dict(record) for record in records], epoch=0),
        peers(images),
        goal,
    )


def peers(images: list[bytes]) -> dict[str, Callable[[], Any]]:
    """From the JPEG on Pillow images, the default of torchvision's own scripts, and on tensors."""
    on_images = v2.Compose([*CROP, v2.PILToTensor()])
    on_tensors = v2.Compose([v2.PILToTensor(), *CROP])

    def of(transform: Any) -> Callable[[], Any]:
        return lambda: torch.stack(
            [transform(Image.open(io.BytesIO(b)).convert("RGB")) for b in images]
        )

    return {"Pillow + v2 on images": of(on_images), "Pillow + v2 on tensors": of(on_tensors)}


def blurring(goal: float) -> list[Measure]:
    """A random image and ten Gaussian blurs, as in recipes/synthetic_vit.py."""
    blurs = [v2.GaussianBlur(11) for _ in range(10)]
    chain = Chain(as_stages([RandomImage(224, 1000), *blurs]), seed=0)
    records = [{"key": str(i), "index": i} for i in range(IMAGES)]

    def theirs() -> None:
        rng = np.random.default_rng(0)
        for _ in records:
            image = torch.from_numpy(rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)).permute(
                2, 0, 1
            )
            for blur in blurs:
                image = blur(image)

    ours = lambda: chain.run([dict(record) for record in records], epoch=0)  # noqa: E731
    return compare("ten blurs of 224², per core", ours, {"torchvision v2": theirs}, goal)


def compare(
    name: str, ours: Callable[[], Any], theirs: dict[str, Callable[[], Any]], goal: float
) -> list[Measure]:
    """Interleave all cases; the goal applies to the first peer, which runs twice to measure the noise."""
    first = next(iter(theirs))
    cases = {"ours": ours, **theirs, "again": theirs[first]}
    rates = {case: IMAGES / seconds for case, seconds in cpu_seconds(cases, ROUNDS).items()}
    unit, mine, rows = "images/s", rates["ours"], []
    for peer in theirs:
        ratio, aim = mine / rates[peer], goal if peer == first else None
        met = None if aim is None else ratio >= aim
        label = name if peer == first else f"{name}, {peer.rpartition(' ')[2]}"
        rows.append(Measure(label, mine, rates[peer], peer, ratio, aim, met, unit))
    noise = rates["again"] / rates[first]
    rows.append(
        Measure(
            f"{name}: noise (A/A)", rates["again"], rates[first], "itself", noise, None, None, unit
        )
    )
    return rows


def check(image: bytes, record: dict[str, Any], resize: list[Any]) -> None:
    """Check that speed does not come from doing less: the same picture within 4 of 255 levels."""
    columns, _ = Chain(as_stages([DecodeImage(), *resize]), seed=0).run([dict(record)], epoch=0)
    expected = v2.Compose([v2.PILToTensor(), *resize])(Image.open(io.BytesIO(image)).convert("RGB"))
    difference = np.abs(
        columns["image__hwc"][0].astype(int) - expected.permute(1, 2, 0).numpy().astype(int)
    ).max()
    if difference > 4:
        raise RuntimeError(f"our picture differs from torchvision's by {difference} levels")
