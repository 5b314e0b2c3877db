"""Train worker: images as the model sees them, small, for the report; over them targets and predictions."""

from __future__ import annotations

import base64
import io
import logging
import traceback
from typing import Any

from stoker.recipe import Batch, Recipe, Split
from stoker.train.overlays import Painter, agreement, predictions_of, targets_of
from stoker.train.state import Worker
from stoker.train.train_state import rng_state, set_rng_state

MOST, MOST_OVERLAID = 16, 8
SIDE, SMALL_SIDE = 96, 64
MOST_BYTES = 20_000
"""A picture that needs more as PNG, such as noise, is made smaller."""


def show_once(worker: Worker, batch: Batch, result: Any = None) -> None:
    """Train worker: log a `samples` event of the first batch that this process trains on; rank 0 alone.

    A batch without images is passed over, and whatever goes wrong here is no reason to stop training.

    Args:
        worker: whose `pictured` is set.
        batch: after `on_device`, so with every augmentation.
        result: of `training_step`.
    """
    if worker.rank or "train" in worker.pictured:
        return
    worker.pictured.add("train")
    _show(worker, "train", batch, result, {})


def show_predictions(worker: Worker, epoch: int, batch: Batch, result: Any, metrics: dict[str, Any]) -> None:
    """Train worker: log masks or boxes as predicted for a batch of validation, in some 20 epochs of a run.

    Args:
        worker: rank 0 logs; after a failure its `pictured` is set.
        epoch: the present one.
        batch: after `on_device`.
        result: of `validation_step`.
        metrics: of which one for boxes knows their format.
    """
    epochs = worker.config.train.epochs
    due = (epoch + 1) % max(1, epochs // 20) == 0 or epoch + 1 == epochs
    if due and not worker.rank and "val" not in worker.pictured:
        _show(worker, "val", batch, result, metrics, epoch=epoch)


def _show(
    worker: Worker, split: Split, batch: Batch, result: Any, metrics: dict[str, Any], **more: Any
) -> None:
    # Asking the user's code for its chain may draw random numbers; training draws as without.
    draws = rng_state(worker.device)
    try:
        images = image_tensor(batch)
        if images is None:
            return
        shown: dict[str, Any] = {}
        try:
            shown = overlaid(worker.recipe, split, batch, images, result, metrics)
        except Exception as error:
            worker.pictured.add(split)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            worker.log("note", text=f"report: nothing is drawn over the {split} images: {text}")
        if not shown and split == "train":
            shown = {"images": pictures(batch)}
        if shown:
            worker.log("samples", split=split, **shown, **more)
    except Exception:
        logging.getLogger("stoker").info("no sample images: %s", traceback.format_exc())
    finally:
        set_rng_state(draws, worker.device)


def overlaid(
    recipe: Recipe, split: Split, batch: Batch, images: Any, result: Any, metrics: dict[str, Any]
) -> dict[str, Any]:
    """Train worker: images under their targets, those of validation also under what was predicted.

    Returns:
        images: up to MOST_OVERLAID as {"png": base64, "predicted": base64, "label": text}; legend: names and
        colours of the classes. Empty where the recipe has neither masks nor boxes.

    Raises:
        ValueError: masks or boxes do not fit the images.
    """
    images = images[:MOST_OVERLAID].detach().cpu()
    size = (len(images), *images.shape[2:])
    formats = [metric.box_format for metric in metrics.values() if hasattr(metric, "box_format")]
    targets = targets_of(recipe, split, batch, result, size, *formats[:1])
    predicted = predictions_of(result, size, *formats[:1]) if targets and split == "val" else []
    if not targets or (split == "val" and not predicted):
        return {}
    painter, found = Painter(recipe.class_names), []
    for i, (image, target) in enumerate(zip(images, targets, strict=True)):
        picture = as_picture(image)
        drawn = {"png": encoded(painter.draw(picture, target)), "label": ""}
        if predicted:
            drawn |= {"predicted": encoded(painter.draw(picture, predicted[i]))}
            drawn["label"] = agreement(target, predicted[i])
        found.append(drawn)
    return {"images": found, "legend": painter.legend()}


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
    """Train worker: one image (channels × height × width) as the base64 of a small PNG."""
    shown, content = as_picture(image), ""
    for side in (SIDE, SMALL_SIDE):
        shown.thumbnail((side, side))
        content = encoded(shown)
        if len(content) <= MOST_BYTES * 4 / 3:
            break
    return content


def as_picture(image: Any) -> Any:
    """Train worker: one image (channels × height × width) as Pillow has it."""
    import torch
    from PIL import Image

    if image.dtype != torch.uint8:
        image = torch.nan_to_num(image.float(), nan=0.0, posinf=0.0, neginf=0.0)
        low, high = float(image.min()), float(image.max())
        if low >= 0 and high <= 255:
            low, high = 0.0, 1.0 if high <= 1 else 255.0
        # Normalised images: a single colour must not become black and white.
        image = ((image - low) / max(high - low, 1.0) * 255).round().to(torch.uint8)
    pixels = image[:3] if image.shape[0] >= 3 else image[0]
    return Image.fromarray((pixels.permute(1, 2, 0) if pixels.ndim == 3 else pixels).contiguous().numpy())


def encoded(picture: Any) -> str:
    """Train worker: the base64 of a picture's PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


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
