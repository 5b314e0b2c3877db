"""The built-in recipe: image classification without writing Python.

params:
  data: .data/flowers          # images in class folders, tar shards or Parquet, with train/ and val/
  model: resnet18              # any timm model
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from stoker.config.loading import Resolved
from stoker.errors import Problems, UsageError, nearest
from stoker.recipe import Recipe, Split
from stoker.storage.filesystems import refuse_absent

if TYPE_CHECKING:
    from torch import nn

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class ImageClassification(Recipe):
    """Every host: trains a timm model on images and labels."""

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())

    data: str = Field(
        description="folder, s3:// or gs:// URI with train/ and, for validation, val/"
    )
    model_name: str = Field("resnet18", alias="model", description="timm model name")
    pretrained: bool = Field(
        False, description="start from timm's pretrained weights (downloads them)"
    )
    num_classes: int | None = Field(
        None, ge=2, description="number of classes; default: taken from the data"
    )
    labels: str | None = Field(
        None,
        description="CSV file with the labels of images in any folders: image, label and, for validation,"
        " split",
    )
    label_separator: str | None = Field(
        None, description="separates several labels in a cell of params.labels"
    )
    multi_label: bool = Field(
        False, description="an image may have several labels; implied by label_separator"
    )
    names: list[str] = Field(
        [],
        alias="class_names",
        description="names of class 0, 1, …; default: taken from the data, text labels sorted",
    )
    image_column: str = Field(
        "image", description="column or tar member with the image, or with its path"
    )
    label_column: str = Field(
        "label",
        description="column or tar member with the label; in tars also json.FIELD, or folder",
    )
    ignore: list[str] = Field([], description="patterns of files not to read, such as *.txt")
    image_size: int = Field(224, ge=8, description="side of the model's square input, pixels")
    augment: Literal["none", "flip", "crop"] = Field(
        "crop",
        description="of training images: none: centre crop; flip: centre crop and flips; crop: random resized"
        " crops and flips",
    )
    reduce_to: int | None = Field(
        None,
        ge=8,
        description="shrink larger training images to this shorter side, in pixels, before any random"
        " transform; makes data.cache smaller",
    )
    color: Literal["RGB", "L"] = Field("RGB", description="RGB, or L for greyscale")
    bits: int | None = Field(
        None,
        ge=9,
        le=16,
        description="bits that the values of grey images of more than 8 bits use, such as 12; default: all",
    )

    @model_validator(mode="before")
    @classmethod
    def _separated_labels_are_several(cls, given: Any) -> Any:
        return {"multi_label": True, **given} if given.get("label_separator") else given

    @model_validator(mode="after")
    def _crops_find_their_pixels(self) -> ImageClassification:
        if self.reduce_to is not None and self.reduce_to < self.image_size:
            raise ValueError(f"reduce_to must be at least image_size, {self.image_size}")
        if self.reduce_to is not None and self.augment != "crop":
            raise ValueError(
                f"reduce_to requires augment: crop; {self.augment} resizes images anyway"
            )
        if len({*self.names}) < len(self.names):
            raise ValueError(f"class_names has a name twice: {', '.join(self.names[:20])}")
        if self.label_separator is not None and self.labels is None:
            raise ValueError(
                "label_separator requires labels, the CSV file whose cells it separates"
            )
        return self

    @property
    def class_names(self) -> list[str]:  # type: ignore[override] # found in the data
        return self.names

    def check(self, resolved: Resolved) -> None:
        problems = Problems()
        with problems:
            if type(self).model is ImageClassification.model:
                refuse_unknown_model(self.model_name)
        with problems:
            if type(self) is ImageClassification:  # others may mean something else by it
                refuse_absent(self.data)
        problems.refuse()

    def read(self, split: Split) -> Any:
        from stoker.data import read_any, read_images

        if self.labels is None:
            return read_any(self.data, split, self.wanted(), self.ignore)
        chosen = self.model_fields_set
        return read_images(
            self.data,
            split,
            self.labels,
            self.label_separator,
            self.image_column if "image_column" in chosen else None,
            self.label_column if "label_column" in chosen else None,
            self.names,
            self.multi_label,
            self.ignore,
        )

    def wanted(self) -> list[str] | None:
        """None: all columns."""
        return [self.image_column, self.label_column]

    def discover(self) -> dict[str, Any]:
        from stoker.read.detect import find_classes, refuse_absent_columns

        source = self.read("train")
        if type(self).preprocess is ImageClassification.preprocess:
            columns = {"image_column": self.image_column, "label_column": self.label_column}
            refuse_absent_columns(self.data, source, columns)
        # Of a recipe that names the classes of folders, the names are for people.
        lists = hasattr(source, "classes") and source.classes() is not None
        count, names = find_classes(
            self.data,
            source,
            self.read,
            self.label_column,
            self.names or ([] if lists else [*self.class_names]),
            self.num_classes,
        )
        if self.num_classes is None and count < 2:
            raise UsageError(f"{self.data}: holds one class only; a classifier needs two or more")
        found: dict[str, Any] = {"num_classes": self.num_classes or count}
        if self.labels is not None:
            found["multi_label"] = source.several
        return {**found, **({"class_names": names} if names else {})}

    def preprocess(self, split: Split) -> list[Any]:
        from torchvision.transforms import v2

        from stoker.chain.transforms import CheckLabel, DecodeImage, Rename, ShrinkLarger

        columns = {"image": self.image_column, "label": self.label_column}
        # The source of a CSV file has named the columns.
        renamed = {new: old for new, old in columns.items() if new != old and self.labels is None}
        chain: list[Any] = [
            *([Rename(**renamed)] if renamed else []),
            DecodeImage(self.color, self.bits),
        ]
        if self.num_classes:
            chain.append(CheckLabel(self.num_classes, self.names, self.multi_label))
        if split == "train" and self.augment == "crop":
            if self.reduce_to:
                chain.append(ShrinkLarger(self.reduce_to))
            chain += [
                v2.RandomResizedCrop(self.image_size, antialias=True),
                v2.RandomHorizontalFlip(),
            ]
            return chain
        shorter = round(self.image_size * 256 / 224)
        chain += [v2.Resize(shorter, antialias=True), v2.CenterCrop(self.image_size)]
        if split == "train" and self.augment == "flip":
            chain.append(v2.RandomHorizontalFlip())
        return chain

    def model(self) -> nn.Module:
        import timm

        channels = 1 if self.color == "L" else 3
        try:
            module: nn.Module = timm.create_model(
                self.model_name,
                pretrained=self.pretrained,
                num_classes=self.num_classes,
                in_chans=channels,
            )
        except RuntimeError as error:
            raise UsageError(f"params.model: timm cannot create it: {error}") from None
        return module

    def on_device(self, split: Split) -> nn.Module:
        return normalize(self.color)


def refuse_unknown_model(name: str) -> None:
    """Head: refuse a model that timm does not have; names with a prefix are of a model hub or folder."""
    if ":" in name or "/" in name or importlib.util.find_spec("timm") is None:
        return
    import timm

    if not timm.is_model(name):
        known = timm.list_models()
        raise UsageError(f"params.model: timm has no model {name!r}{nearest(name, known)}")


def normalize(color: str) -> nn.Module:
    """A module that normalises uint8 images to float32 on the device."""
    import torch
    from torch import nn

    class Normalize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mean, std = (MEAN, STD) if color == "RGB" else ((0.5,), (0.5,))
            self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1) * 255)
            self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1) * 255)

        def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {**batch, "image": (batch["image"].float() - self.mean) / self.std}

    return Normalize()
