"""The API for recipes: readers of data, transforms of records, and base classes for your own.

read_images(".data/flowers", "train")      class per folder, under train/ and val/
read_parquet(".data/rows", "train")        bytes, numbers, strings, tensors
read_webdataset(".data/shards", "train")   tar shards
read_delta(".data/table")                  a Delta table
read_torch(dataset)                        any map-style PyTorch dataset
read_range(10_000)                         numbers, for synthetic data
read_any(".data/flowers", "train")         detects which of the first four formats it is

Names are loaded on first use, so a process that decodes JPEGs does not import Parquet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.data.messages import BadRecord as BadRecord
    from stoker.data.messages import Pad as Pad
    from stoker.data.messages import Record as Record
    from stoker.data.messages import Shard as Shard
    from stoker.data.preprocessing.blur import GaussianBlurs as GaussianBlurs
    from stoker.data.preprocessing.stages import RecordTransform as RecordTransform
    from stoker.data.preprocessing.transforms import CenterCrop as CenterCrop
    from stoker.data.preprocessing.transforms import CheckLabel as CheckLabel
    from stoker.data.preprocessing.transforms import Compose as Compose
    from stoker.data.preprocessing.transforms import DecodeImage as DecodeImage
    from stoker.data.preprocessing.transforms import Drop as Drop
    from stoker.data.preprocessing.transforms import RandomHorizontalFlip as RandomHorizontalFlip
    from stoker.data.preprocessing.transforms import RandomResizedCrop as RandomResizedCrop
    from stoker.data.preprocessing.transforms import Rename as Rename
    from stoker.data.preprocessing.transforms import Resize as Resize
    from stoker.data.preprocessing.transforms import ShrinkLarger as ShrinkLarger
    from stoker.data.preprocessing.video import DecodeVideo as DecodeVideo
    from stoker.data.sources.base import IndexedSource as IndexedSource
    from stoker.data.sources.base import Source as Source
    from stoker.data.sources.base import StreamedSource as StreamedSource
    from stoker.data.sources.base import cut_indices as cut_indices
    from stoker.data.sources.delta import read_delta as read_delta
    from stoker.data.sources.detect import read_any as read_any
    from stoker.data.sources.images import read_images as read_images
    from stoker.data.sources.indexed import read_range as read_range
    from stoker.data.sources.indexed import read_torch as read_torch
    from stoker.data.sources.parquet import read_parquet as read_parquet
    from stoker.data.sources.webdataset import read_webdataset as read_webdataset

_ROOMS = {
    "messages": ("BadRecord", "Pad", "Record", "Shard"),
    "preprocessing.blur": ("GaussianBlurs",),
    "preprocessing.joint": ("DecodeMask", "Joint"),
    "preprocessing.stages": ("RecordTransform",),
    "preprocessing.video": ("DecodeVideo",),
    "preprocessing.transforms": (
        *("CenterCrop", "CheckLabel", "DecodeImage", "Drop", "RandomHorizontalFlip", "RandomResizedCrop"),
        *("Rename", "ShrinkLarger", "Resize", "Compose"),
    ),
    "sources.base": ("IndexedSource", "Source", "StreamedSource", "cut_indices"),
    "sources.delta": ("read_delta",),
    "sources.detect": ("read_any",),
    "sources.images": ("read_images",),
    "sources.indexed": ("read_range", "read_torch"),
    "sources.parquet": ("read_parquet",),
    "sources.webdataset": ("read_webdataset",),
}
_WHERE = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"stoker.data.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
