"""Chain worker and script: any Python object as pages of bytes, its tensors and arrays as they lie in memory.

    object  →  pickle (protocol 5)  +  buffers of its tensors and arrays  →  uint8 rows of PAGE bytes

Pages are what blocks are made of, so a batch takes the way that images of recipes take. The receiving process
copies nothing: tensors and arrays are views of the memory that the rows arrived in.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

PAGE = 4096
ALIGNED = 64
"""Bytes: where a buffer may begin, so that vector instructions read it well."""
HEAD = struct.Struct("<Q")


def pack(objects: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Chain worker: objects → pages.

    Returns:
        uint8 of shape (rows, PAGE).

    Raises:
        Exception: an object cannot be pickled.
    """
    import numpy as np

    parts: list[Any] = []
    layout: list[list[int]] = []
    for each in objects:
        buffers: list[pickle.PickleBuffer] = []
        target = io.BytesIO()
        _pickler()(target, buffers.append).dump(each)
        raw = [target.getbuffer(), *(buffer.raw() for buffer in buffers)]
        layout.append([part.nbytes for part in raw])
        parts += raw
    head = json.dumps(layout).encode()
    size = _aligned(HEAD.size + len(head)) + sum(_aligned(part.nbytes) for part in parts)
    pages = np.empty((-(-size // PAGE), PAGE), np.uint8)
    flat = pages.reshape(-1)
    flat[: HEAD.size] = np.frombuffer(HEAD.pack(len(head)), np.uint8)
    flat[HEAD.size : HEAD.size + len(head)] = np.frombuffer(head, np.uint8)
    at = _aligned(HEAD.size + len(head))
    for part in parts:
        if part.nbytes:
            flat[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
        at += _aligned(part.nbytes)
    flat[at:] = 0
    return pages


def unpack(pages: np.ndarray[Any, Any]) -> list[Any]:
    """Script: the objects of `pack`.

    Args:
        pages: writable memory that belongs to the objects from now on.

    Raises:
        ValueError: these are not pages of `pack`.
    """
    from ray import cloudpickle

    flat = memoryview(pages.reshape(-1).data)
    (length,) = HEAD.unpack(flat[: HEAD.size])
    if length > len(flat):
        raise ValueError("not pages of a batch")
    layout = json.loads(bytes(flat[HEAD.size : HEAD.size + length]))
    at = _aligned(HEAD.size + length)
    found = []
    for sizes in layout:
        parts = []
        for size in sizes:
            parts.append(flat[at : at + size])
            at += _aligned(size)
        found.append(cloudpickle.loads(parts[0], buffers=parts[1:]))
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _rebuild_storage(buffer: Any) -> Any:
    import torch

    if not memoryview(buffer).nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_typed(storage: Any, dtype: Any) -> Any:
    import torch

    of = torch.storage.TypedStorage
    return of(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


_made: list[type] = []


def _pickler() -> Any:
    """The class is made with the first batch: that torch is there is known only then."""
    if _made:
        return _made[0]
    import torch
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Pickles torch's storages as buffers, where torch would copy them into the pickle.

        Classes of the user's script are pickled by Ray's cloudpickle, which gives the script its own class
        back, not a copy of it.
        """

        def __init__(self, target: Any, take: Any) -> None:
            super().__init__(target, protocol=5, buffer_callback=take)
            self._storages: dict[int, Any] = {}

        def reducer_override(self, value: Any) -> Any:
            if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
                if value.layout is torch.strided and not value.is_quantized:
                    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                        value = value.clone()  # a view of more: only what it shows is sent
                    return value.__reduce_ex__(2)
            elif isinstance(value, torch.storage.TypedStorage):
                own = value._untyped_storage
                if own.device.type == "cpu":
                    # Tensors that share memory still do when they arrive.
                    return _rebuild_typed, (self._storages.setdefault(own._cdata, own), value.dtype)
            elif isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
                view = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
                return _rebuild_storage, (pickle.PickleBuffer(view.data),)
            return super().reducer_override(value)

    _made.append(Pickler)
    return Pickler
