"""Chain worker and script: pack Python objects into pages of bytes, tensors and arrays as raw buffers.

    object  →  pickle (protocol 5)  +  buffers of its tensors and arrays  →  uint8 rows of PAGE bytes

A block is made of pages, so a batch travels like the images of a recipe. The layout follows the buffers, its
length comes last. The receiver copies nothing: tensors and arrays are views of the received memory.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stoker.messages import Column, Schema
from stoker.serve.blocks.room import Room

if TYPE_CHECKING:
    import numpy as np

PAGE = 4096
PAGES = "pages"
"""Name of the only column of a block of pages."""
SCHEMA = Schema({PAGES: Column("uint8", (PAGE,))})
TAIL = struct.Struct("<Q")
"""The last bytes: length of the layout before them."""
ENTRY = 48
"""Largest number of bytes that a part takes in the layout."""


def pack(objects: Sequence[Any], room: Room | None = None) -> np.ndarray[Any, Any]:
    """Chain worker: objects → pages.

    Args:
        objects: memory shared by two of them is sent twice.
        room: tensors that were collated in it are not copied.

    Returns:
        uint8 of shape (rows, PAGE).

    Raises:
        Exception: an object cannot be pickled.
    """
    parts: list[list[Any]] = []
    for each in objects:
        buffers: list[pickle.PickleBuffer] = []
        target = io.BytesIO()
        _pickler()(target, buffers.append).dump(each)
        parts.append([target.getbuffer(), *(buffer.raw() for buffer in buffers)])
    flattened = [part for own in parts for part in own]
    spare = ENTRY * (len(flattened) + len(parts) + 1) + TAIL.size + PAGE
    flat, places, end = (room or Room()).place(flattened, spare)
    place = iter(places)
    layout = json.dumps([[(next(place), part.nbytes) for part in own] for own in parts]).encode()
    size = -(-(end + len(layout) + TAIL.size) // PAGE) * PAGE
    flat[end:size] = 0
    memory = flat.data
    memory[size - TAIL.size - len(layout) : size - TAIL.size] = layout
    memory[size - TAIL.size : size] = TAIL.pack(len(layout))
    return flat[:size].reshape(-1, PAGE)


def unpack(pages: np.ndarray[Any, Any]) -> list[Any]:
    """Script: the objects of `pack`.

    Args:
        pages: writable memory; the objects own it from now on.

    Raises:
        ValueError: these are not pages of `pack`.
    """
    from ray import cloudpickle

    flat = memoryview(pages.reshape(-1).data)
    layout_end = len(flat) - TAIL.size
    (length,) = TAIL.unpack(flat[layout_end:])
    if length > layout_end:
        raise ValueError("not pages of a batch")
    found = []
    for own in json.loads(bytes(flat[layout_end - length : layout_end])):
        parts = [flat[place : place + size] for place, size in own]
        found.append(cloudpickle.loads(parts[0], buffers=parts[1:]))
    return found


def _rebuild_storage(buffer: Any) -> Any:
    import torch

    if not memoryview(buffer).nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_typed(storage: Any, dtype: Any) -> Any:
    import torch

    of = torch.storage.TypedStorage
    return of(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _rebuild_tensor(storage: Any, dtype: Any, offset: int, size: Any, stride: Any) -> Any:
    import torch

    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


_made: list[type] = []


def _pickler() -> Any:
    """Create the class on first use, because it needs torch."""
    if _made:
        return _made[0]
    import torch
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Pickles torch's storages as buffers, where torch would copy them into the pickle.

        Ray's cloudpickle handles classes of the user's script, so the script gets its own class back.
        """

        def __init__(self, target: Any, take: Any) -> None:
            super().__init__(target, protocol=5, buffer_callback=take)
            self._storages: dict[int, Any] = {}

        def reducer_override(self, value: Any) -> Any:
            if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
                if value.layout is torch.strided and not value.is_quantized:
                    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                        value = value.clone()  # send only the visible part of a larger storage
                    if value.dtype in torch.storage._new_dtypes():  # torch reads them from files alone
                        own = value.untyped_storage()
                        own = self._storages.setdefault(own._cdata, own)
                        about = value.storage_offset(), value.size(), value.stride()
                        return _rebuild_tensor, (own, value.dtype, *about)
                    return value.__reduce_ex__(2)
            elif isinstance(value, torch.storage.TypedStorage):
                own = value._untyped_storage
                if own.device.type == "cpu":
                    # Keep memory shared between tensors of one object.
                    return _rebuild_typed, (self._storages.setdefault(own._cdata, own), value.dtype)
            elif isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
                view = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
                return _rebuild_storage, (pickle.PickleBuffer(view.data),)
            return super().reducer_override(value)

    _made.append(Pickler)
    return Pickler
