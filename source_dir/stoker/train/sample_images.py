"""Train worker: images as the model sees them, small, for the report; over them targets and predictions."""

from __future__ import annotations

import base64
import colorsys
import inspect
import io
import logging
import math
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.chain.columns import LENGTH_SUFFIX
from stoker.chain.joint import Joint
from stoker.events.kinds import Note, SamplesShown
from stoker.recipe import Batch, Recipe, Split
from stoker.train.state import Worker, same_draws

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


MOST, MOST_OVERLAID = 16, 8
SIDE, SMALL_SIDE = 96, 64
MOST_BYTES = 20_000
"""A picture that needs more as PNG, such as noise, is made smaller."""


def show_once(worker: Worker, batch: Batch, result: Any = None) -> None:
    """Log a `samples` event of the first batch that this process trains on; rank 0 alone.

    A batch without images is passed over, and whatever goes wrong here is no reason to stop training.
    """
    if worker.rank or "train" in worker.pictured:
        return
    worker.pictured.add("train")
    _show(worker, "train", batch, result, {})


def show_predictions(worker: Worker, epoch: int, batch: Batch, result: Any, metrics: dict[str, Any]) -> None:
    """Log masks or boxes as predicted for a batch of validation, in some 20 epochs of a run."""
    epochs = worker.config.train.epochs
    due = (epoch + 1) % max(1, epochs // 20) == 0 or epoch + 1 == epochs
    if due and not worker.rank and "val" not in worker.pictured:
        _show(worker, "val", batch, result, metrics, epoch=epoch)


def _show(
    worker: Worker, split: Split, batch: Batch, result: Any, metrics: dict[str, Any], **more: Any
) -> None:
    shown: dict[str, Any] = {}
    try:
        images = image_tensor(batch)
        if images is None:
            return
        try:
            # Asking the user's code for its chain may draw random numbers.
            with same_draws(worker.device):
                shown = overlaid(worker.recipe, split, batch, images, result, metrics)
        except Exception as error:
            worker.pictured.add(split)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            worker.log(Note(text=f"report: nothing is drawn over the {split} images: {text}"))
        if not shown and split == "train":
            shown = {"images": pictures(batch)}
        if shown:
            worker.log(SamplesShown(split=split, **shown, **more))
    except Exception:
        logging.getLogger("stoker").info("no sample images: %s", traceback.format_exc())


def overlaid(
    recipe: Recipe, split: Split, batch: Batch, images: Any, result: Any, metrics: dict[str, Any]
) -> dict[str, Any]:
    """Images under their targets, those of validation also under what was predicted.

    Returns:
        images: up to MOST_OVERLAID as {"png": base64, "predicted": base64, "label": text}; legend: names and
        colours of the classes. Empty where the recipe has neither masks nor boxes.
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
    """Up to MOST images of a batch as {"png": base64, "label": text}; none: no images in it.

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
    """The batch's images, count × channels (1, 3 or 4) × height × width; None: it has none."""
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
    shown, content = as_picture(image), ""
    for side in (SIDE, SMALL_SIDE):
        shown.thumbnail((side, side))
        content = encoded(shown)
        if len(content) <= MOST_BYTES * 4 / 3:
            break
    return content


def as_picture(image: Any) -> Any:
    """One image (channels × height × width) as Pillow has it."""
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
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def label_texts(batch: Batch, count: int) -> list[str]:
    """The labels as text; of mixed ones the classes with their shares."""
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


DRAWN_SIDE = 128
IGNORED = 255
LEAST_SCORE = 0.5
"""Predicted boxes below it are not drawn, as long as predictions bring scores."""


class Box(NamedTuple):
    """Corners in pixels, and what is in it."""

    corners: tuple[float, float, float, float]
    kind: int | None
    score: float | None


class Overlay(NamedTuple):
    """What is drawn over one image: class numbers, height × width, or boxes."""

    mask: np.ndarray[Any, Any] | None
    boxes: list[Box]


def targets_of(
    recipe: Recipe,
    split: Split,
    batch: Batch,
    result: Any,
    size: tuple[int, ...],
    box_format: str = "xyxy",
) -> list[Overlay]:
    """The truth about a batch's first images; empty: there is nothing to draw.

    It is the `target` of a step that gives one, else what the chain's `Joint` moves with the image.
    """
    target = result.get("target") if isinstance(result, dict) else None
    if found := _mask_overlays("target", _class_numbers(target), size) or _of_dicts(
        "target", target, size, box_format
    ):
        return found
    # One that belongs to something else, such as a class for each image, hides the columns.
    for joint in _joints(recipe.preprocess(split)) if target is None else ():
        for name in joint.masks:
            if found := _mask_overlays(name, _class_numbers(batch.get(name)), size):
                return found
        for name in joint.boxes:
            if name in batch:
                return _of_columns(name, batch, joint.format, size)
    return []


def predictions_of(result: Any, size: tuple[int, ...], box_format: str = "xyxy") -> list[Overlay]:
    """What the model says about the images that `targets_of` has found targets for."""
    preds = result.get("preds") if isinstance(result, dict) else None
    return _mask_overlays("preds", _predicted_numbers(preds, size[0]), size) or _of_dicts(
        "preds", preds, size, box_format
    )


def _class_numbers(values: Any) -> Any:
    """Class numbers of each pixel, count × height × width; None: that is not what they are."""
    import torch

    if not torch.is_tensor(values):
        return None
    if values.ndim == 4 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 3 or not values.numel():
        return None
    # The floats of a binary cross-entropy are class numbers, a depth is none.
    if values.is_floating_point() and not ((values == 0) | (values == 1) | (values == IGNORED)).all():
        return None
    return values.long()


def _predicted_numbers(values: Any, count: int) -> Any:
    import torch

    if not torch.is_tensor(values) or values.ndim not in (3, 4):
        return None
    if len(values) < count:
        raise ValueError(f"preds are of {len(values)} records, the images of {count}")
    values = values[:count].detach()
    if values.ndim == 4 and values.shape[1] > 1:
        return values.argmax(1)
    values = values[:, 0] if values.ndim == 4 else values
    if not values.is_floating_point():
        return values.long()
    is_share = bool((values >= 0).all() and (values <= 1).all())
    return (values > (0.5 if is_share else 0.0)).long()


def _mask_overlays(name: str, numbers: Any, size: tuple[int, ...]) -> list[Overlay]:
    if numbers is None:
        return []
    if len(numbers) < size[0] or tuple(numbers.shape[1:]) != size[1:]:
        raise ValueError(f"{name} is {_x(numbers.shape)}, the images {_x(size)}")
    return [Overlay(mask, []) for mask in numbers[: size[0]].cpu().numpy()]


def _of_dicts(name: str, found: Any, size: tuple[int, ...], box_format: str = "xyxy") -> list[Overlay]:
    """Boxes in a dict per image."""
    if not (isinstance(found, list | tuple) and found and isinstance(found[0], dict) and "boxes" in found[0]):
        return []
    if len(found) < size[0]:
        raise ValueError(f"{name} has the boxes of {len(found)} records, the images are {size[0]}")
    return [
        Overlay(None, _boxes(name, one["boxes"], one.get("labels"), one.get("scores"), box_format, size))
        for one in found[: size[0]]
    ]


def _of_columns(name: str, batch: Batch, box_format: str, size: tuple[int, ...]) -> list[Overlay]:
    """Boxes in a column, of which a padded one says how many there are."""
    boxes: Any = batch[name]
    labels, lengths = batch.get("labels"), batch.get(name + LENGTH_SUFFIX)
    if boxes.ndim != 3 or len(boxes) < size[0]:
        raise ValueError(f"{name} is {_x(boxes.shape)}, the images {_x(size)}")
    counts = [boxes.shape[1]] * len(boxes) if lengths is None else lengths.tolist()
    kinds = None if labels is None or labels.ndim != 2 else labels
    found = [
        {"boxes": boxes[i, :count], "labels": None if kinds is None else kinds[i, :count]}
        for i, count in enumerate(counts[: size[0]])
    ]
    return _of_dicts(name, found, size, box_format)


def _boxes(
    name: str, corners: Any, kinds: Any, scores: Any, box_format: str, size: tuple[int, ...]
) -> list[Box]:
    import torch
    from torchvision.ops import box_convert

    corners = torch.as_tensor(corners).detach().float().cpu()
    count = len(corners)
    if not count:
        return []
    if corners.ndim != 2 or corners.shape[1] != 4:
        raise ValueError(f"{name} has boxes of the shape {_x(corners.shape)}, not number × 4")
    if min(size[1:]) > 8 and corners.abs().max() <= 2:
        raise ValueError(f"{name} has boxes of at most 2 pixels, as if they were shares of the image")
    corners = box_convert(corners, box_format.lower(), "xyxy").tolist()
    kinds = [None] * count if kinds is None else torch.as_tensor(kinds).tolist()
    scores = [None] * count if scores is None else torch.as_tensor(scores).detach().float().tolist()
    if not len(kinds) == len(scores) == count:
        raise ValueError(f"{name} has {count} boxes, {len(kinds)} labels and {len(scores)} scores")
    return [
        Box(tuple(box), kind, score)
        for box, kind, score in zip(corners, kinds, scores, strict=True)
        if all(map(math.isfinite, box)) and (score is None or score >= LEAST_SCORE)
    ]


def _joints(entries: Sequence[Any]) -> list[Joint]:
    plain = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    return [entry for entry in plain if isinstance(entry, Joint)]


class Painter:
    """Draws overlays, one colour for each class, and collects their legend."""

    def __init__(self, names: Sequence[str], side: int = DRAWN_SIDE) -> None:
        self.names, self.side = names, side
        self.drawn: set[int] = set()
        self.background = not names or names[0].strip("_").lower() in ("background", "bg")
        """Whether class 0 of a mask is what lies between the others, and left as it is."""

    def draw(self, picture: Image.Image, overlay: Overlay) -> Image.Image:
        """A picture, `side` pixels long, with masks or boxes over it; few colours, so that it is small."""
        from PIL import Image
        from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

        picture = picture.convert("RGB")
        factor = self.side / max(picture.size)
        size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
        picture = picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)
        if overlay.mask is not None or overlay.boxes:
            pixels = self._with_mask(pil_to_tensor(picture), overlay.mask)
            picture = to_pil_image(self._with_boxes(pixels, overlay.boxes, factor))
        return picture.quantize(256)

    def legend(self) -> list[dict[str, str]]:
        """Names and colours of the classes that were drawn."""
        return [
            {"name": self._name(kind), "color": "#{:02x}{:02x}{:02x}".format(*color(kind))}
            for kind in sorted(self.drawn)
        ]

    def _with_mask(self, pixels: Any, mask: Any) -> Any:
        import numpy as np
        import torch
        from torchvision.transforms.v2.functional import rgb_to_grayscale
        from torchvision.utils import draw_segmentation_masks

        there = [] if mask is None else np.unique(mask).tolist()
        kinds = [kind for kind in there if 0 < kind < IGNORED or (kind == 0 and not self.background)]
        if not kinds:
            return pixels
        self.drawn.update(kinds)
        found = torch.from_numpy(mask.astype(np.int32))[None, None].float()
        shown = torch.nn.functional.interpolate(found, pixels.shape[1:])[0]
        layers = shown == torch.tensor(kinds)[:, None, None]
        # The brightness alone shines through, so that a class has its colour on images of any.
        below = torch.where(layers.any(0), rgb_to_grayscale(pixels, 3), pixels)
        drawn: Any = draw_segmentation_masks(below, layers, 0.5, [color(kind) for kind in kinds])
        return drawn

    def _with_boxes(self, pixels: Any, boxes: list[Box], factor: float) -> Any:
        import torch
        from torchvision.utils import draw_bounding_boxes

        boxes = [b for b in boxes if b.corners[0] < b.corners[2] and b.corners[1] < b.corners[3]]
        if not boxes:
            return pixels
        self.drawn.update(box.kind for box in boxes if box.kind is not None)
        # The last two corners are within the box.
        corners = torch.tensor([box.corners for box in boxes]).clamp(-1e6, 1e6) * factor
        corners[:, 2:] = torch.maximum(corners[:, 2:] - 1, corners[:, :2])
        colors = [color(box.kind or 0) for box in boxes]
        labels: Any = [self._label(box) or None for box in boxes]
        readable = {"fill_labels": True}
        if "fill_labels" not in inspect.signature(draw_bounding_boxes).parameters:
            readable = {}  # an older torchvision
        drawn: Any = draw_bounding_boxes(pixels, corners, labels, colors, width=2, **readable)
        return drawn

    def _label(self, box: Box) -> str:
        score = "" if box.score is None else f"{100 * box.score:.0f} %"
        return " ".join(filter(None, ["" if box.kind is None else self._name(box.kind)[:12], score]))

    def _name(self, kind: int) -> str:
        return str(self.names[kind]) if 0 <= kind < len(self.names) else f"class {kind}"


def color(kind: int) -> tuple[int, int, int]:
    """A bright colour for a class, far from those of the classes beside it."""
    red, green, blue = colorsys.hsv_to_rgb((0.09 + kind * 0.381966) % 1, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def agreement(target: Overlay, predicted: Overlay) -> str:
    """In a few words, how well a prediction fits."""
    if target.mask is None or predicted.mask is None:
        return f"{len(predicted.boxes)} box{'' if len(predicted.boxes) == 1 else 'es'}"
    told = (target.mask >= 0) & (target.mask < IGNORED)
    right = (target.mask == predicted.mask)[told]
    return f"{100 * right.mean():.0f} % right" if right.size else ""


def _x(shape: Any) -> str:
    return " × ".join(map(str, shape))
