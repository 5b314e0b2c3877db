"""Train worker: the first batch's images as the model sees them, small, for the report."""

from __future__ import annotations

import base64
import io
import logging
import traceback
from typing import Any

from stoker.recipe import Batch
from stoker.training.worker import Worker

MOST = 16
SIDE, SMALL_SIDE = 96, 64
MOST_BYTES = 20_000
"""A picture that needs more as PNG, such as noise, is made smaller."""


def show_once(worker: Worker, batch: Batch) -> None:
    """Train worker: log a `samples` event of the first batch that this process trains on; rank 0 alone.

    A batch without images is passed over, and whatever goes wrong here is no reason to stop training.

    Args:
        worker: whose `pictured` is set.
        batch: after `on_device`, so with every augmentation.
    """
    if worker.pictured or worker.rank:
        return
    worker.pictured = True
    try:
        images = pictures(batch)
        if images:
            worker.log("samples", images=images)
    except Exception:
        logging.getLogger("stoker").info("no sample images: %s", traceback.format_exc())


def pictures(batch: Batch) -> list[dict[str, str]]:
    """Train worker: up to MOST images of a batch as {"png": base64, "label": text}; none: no images in it.

    Normalised images (floats) are scaled back one by one, their least value to 0 and their largest to 255:
    how they were normalised is the recipe's affair.
    """
    found = image_tensor(batch)
    if found is None:
        return []
    images = found[:MOST].detach().cpu()
    labels = label_texts(batch, len(images))
    return [{"png": png(image), "label": text} for image, text in zip(images, labels, strict=True)]


def image_tensor(batch: Batch) -> Any:
    """Train worker: the batch's images, count × channels (1, 3 or 4) × height × width; None: it has none."""
    import torch

    for name in sorted(batch, key=lambda name: name != "image"):
        tensor = batch[name]
        if (
            torch.is_tensor(tensor)
            and tensor.ndim == 4
            and tensor.shape[1] in (1, 3, 4)
            and min(tensor.shape[2:]) > 1
            and (tensor.is_floating_point() or tensor.dtype == torch.uint8)
        ):
            return tensor
    return None


def png(image: Any) -> str:
    """Train worker: one image (channels × height × width) as the base64 of a PNG."""
    import torch
    from PIL import Image

    if image.dtype != torch.uint8:
        image = torch.nan_to_num(image.float(), nan=0.0, posinf=0.0, neginf=0.0)
        low, high = image.min(), image.max()
        image = ((image - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)
    pixels = image[:3] if image.shape[0] >= 3 else image[0]
    shown = Image.fromarray((pixels.permute(1, 2, 0) if pixels.ndim == 3 else pixels).contiguous().numpy())
    content = b""
    for side in (SIDE, SMALL_SIDE):
        shown.thumbnail((side, side))
        file = io.BytesIO()
        shown.save(file, "PNG")
        content = file.getvalue()
        if len(content) <= MOST_BYTES:
            break
    return base64.b64encode(content).decode()


def label_texts(batch: Batch, count: int) -> list[str]:
    """Train worker: the labels as text; of mixed ones the classes with their shares."""
    import torch

    labels = next((batch[name] for name in ("label", "target", "class") if name in batch), None)
    if labels is None:
        return [""] * count
    if not torch.is_tensor(labels):
        return [str(label)[:40] for label in labels[:count]]
    if labels.ndim == 1:
        return [f"{value:g}" for value in labels[:count].tolist()]
    if labels.ndim != 2:
        return [""] * count
    texts = []
    for row in labels[:count].detach().float().cpu():
        shares, classes = row.topk(min(2, len(row)))
        mixed = zip(classes.tolist(), shares.tolist(), strict=True)
        texts.append(" + ".join(f"{number} ({100 * share:.0f} %)" for number, share in mixed if share > 0.01))
    return texts
