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
    from stoker.chain.clips import DecodeVideo as DecodeVideo
    from stoker.chain.joint import Boxes as Boxes
    from stoker.chain.joint import DecodeMask as DecodeMask
    from stoker.chain.joint import KeyPoints as KeyPoints
    from stoker.chain.stages import RecordTransform as RecordTransform
    from stoker.chain.transforms import CenterCrop as CenterCrop
    from stoker.chain.transforms import CheckLabel as CheckLabel
    from stoker.chain.transforms import Compose as Compose
    from stoker.chain.transforms import DecodeImage as DecodeImage
    from stoker.chain.transforms import Drop as Drop
    from stoker.chain.transforms import GaussianBlurs as GaussianBlurs
    from stoker.chain.transforms import RandomHorizontalFlip as RandomHorizontalFlip
    from stoker.chain.transforms import RandomResizedCrop as RandomResizedCrop
    from stoker.chain.transforms import Rename as Rename
    from stoker.chain.transforms import Resize as Resize
    from stoker.chain.transforms import ShrinkLarger as ShrinkLarger
    from stoker.protocol import BadRecord as BadRecord
    from stoker.protocol import Pad as Pad
    from stoker.protocol import Record as Record
    from stoker.protocol import Shard as Shard
    from stoker.read.delta import read_delta as read_delta
    from stoker.read.detect import read_any as read_any
    from stoker.read.images import read_images as read_images
    from stoker.read.parquet import read_parquet as read_parquet
    from stoker.read.sources import IndexedSource as IndexedSource
    from stoker.read.sources import Source as Source
    from stoker.read.sources import StreamedSource as StreamedSource
    from stoker.read.sources import cut_indices as cut_indices
    from stoker.read.sources import read_range as read_range
    from stoker.read.sources import read_torch as read_torch
    from stoker.read.webdataset import read_webdataset as read_webdataset

_EXPORTS = {
    "protocol": "BadRecord Pad Record Shard",
    "chain.joint": "Boxes DecodeMask KeyPoints",
    "chain.stages": "RecordTransform",
    "chain.clips": "DecodeVideo",
    "chain.transforms": "CenterCrop CheckLabel Compose DecodeImage Drop GaussianBlurs RandomHorizontalFlip"
    " RandomResizedCrop Rename Resize ShrinkLarger",
    "read.sources": "IndexedSource Source StreamedSource cut_indices read_range read_torch",
    "read.delta": "read_delta",
    "read.detect": "read_any",
    "read.images": "read_images",
    "read.parquet": "read_parquet",
    "read.webdataset": "read_webdataset",
}
_WHERE = {name: room for room, names in _EXPORTS.items() for name in names.split()}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"stoker.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
