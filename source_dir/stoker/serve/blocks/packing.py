"""Chain worker and script: pack Python objects into pages of bytes, tensors and arrays as raw buffers.

    object  →  pickle (protocol 5)  +  buffers of its tensors and arrays  →  uint8 rows of PAGE bytes

A block is made of pages, so a batch travels like the images of a recipe. The layout follows the buffers, its
length comes last. The receiver copies no large buffers: tensors and arrays are views of the received memory.
Nor does the sender copy what was collated in its `Room`: of CPU time, that saves 0.01 ms per image of 224² as
uint8, and 0.3 ms as float32.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

from stoker.protocol import Column, Schema
from stoker.ray_compat import name_classes, with_slots
from stoker.serve.blocks.batches import BufferPool

if TYPE_CHECKING:
    import numpy as np

PAGE = 4096
PAGES = "pages"
SCHEMA = Schema({PAGES: Column("uint8", (PAGE,))})
TAIL = struct.Struct("<Q")
"""The last bytes: length of the layout before them."""
ENTRY = 48
"""Largest number of bytes that a part takes in the layout."""
ALIGNED = 64
"""Alignment of buffers in bytes, for vector instructions."""
NAMED, OWN = (FunctionType, type), {__name__, "stoker.loader.work"}
"""What is pickled by its name, and modules that the receiver has, too."""
LARGEST = 64 << 20
"""Bytes; a larger group gets memory that is not pooled."""
SMALL, LARGE = 64 << 10, 1 << 20
"""Bytes of buffers that are copied out of pages, and of these."""
Parts = list[Any]
"""Of one object: its pickle, and the buffers of its tensors and arrays."""


class Room:
    """Buffers of a chain worker, in which batches are collated and from which they are sent.

    torch's worker processes collate a batch directly into shared memory to avoid a copy; this does the same.
    """

    def __init__(self) -> None:
        self._pool = BufferPool(pinned=False)
        self._size = 0
        self._flat: np.ndarray[Any, Any] | None = None
        self._end = 0
        self._parts: dict[int, tuple[int, int, weakref.ref[Any]]] = {}
        """Address → offset, size and user of the parts of this group that are here already."""

    @contextmanager
    def group(self) -> Iterator[None]:
        """Context in which torch's `default_collate` stacks tensors in this buffer, not in shared memory."""
        import torch
        from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

        self._flat = self._empty(self._size) if self._size else None

        def stack(batch: Sequence[Any], **others: Any) -> Any:
            first, part = batch[0], None
            plain = type(first) is torch.Tensor and first.layout is torch.strided
            special = first.is_nested or first.is_quantized
            if plain and not special and first.device.type == "cpu" and _alike(batch):
                part = self._part(len(batch) * first.numel() * first.element_size())
            if part is None:
                return collate_tensor_fn(batch, **others)
            storage = torch.frombuffer(part.data, dtype=torch.uint8).untyped_storage()
            out = torch.empty(0, dtype=first.dtype).set_(storage).resize_(len(batch), *first.shape)
            return torch.stack(list(batch), 0, out=out)

        # Not if the user has another.
        if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
            default_collate_fn_map[torch.Tensor] = stack
        try:
            yield
        finally:
            if default_collate_fn_map.get(torch.Tensor) is stack:
                default_collate_fn_map[torch.Tensor] = collate_tensor_fn
            self._flat, self._end, self._parts = None, 0, {}  # so that the buffer can be reused

    def place(
        self, parts: Sequence[Any], spare: int
    ) -> tuple[np.ndarray[Any, Any], list[int], int]:
        """Place parts in one buffer, of which those that were collated in it are there already.

        Returns the buffer, with `spare` free bytes after the last part; the offset of each; the last end.
        """
        import numpy as np

        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        given = dict(self._parts)
        places = [self._given(given, array) for array in arrays]
        absent = [array for array, at in zip(arrays, places, strict=True) if at is None]
        size = sum(aligned(len(array)) for array in absent)
        if self._flat is None or self._end + size + spare > len(self._flat):
            places = [None] * len(arrays)
            size = sum(aligned(len(array)) for array in arrays) + spare
            if self._size < size <= LARGEST:
                self._size = size + size // 8
                # Drops the smaller buffers once they are unused.
                self._pool = BufferPool(pinned=False)
            flat, end = self._empty(size), 0
        else:
            flat, end = self._flat, self._end
        found = []
        for array, place in zip(arrays, places, strict=True):
            if place is None:
                place, end = end, aligned(end + len(array))
                flat[place : place + len(array)] = array
                flat[place + len(array) : end] = 0  # so that equal objects have equal pages
            found.append(place)
        return flat, found, end

    def hold(self, parts: Parts) -> None:
        """Copy the buffers that a dataset or a collate function still has: it may fill them again.

        The caller has nothing else of the object.
        """
        import numpy as np

        for number in range(1, len(parts)):
            array = np.frombuffer(parts[number], np.uint8)
            place, size, user = self._parts.get(array.ctypes.data, (0, -1, None))
            if size == len(array):
                parts[number] = array = self._flat[place : place + size]  # type: ignore[index]
                if user is not None and user() is None:
                    continue
            own = self._part(len(array)) if len(array) > PAGE else None
            parts[number] = np.empty_like(array) if own is None else own
            parts[number][:] = array

    def _part(self, size: int) -> np.ndarray[Any, Any] | None:
        if self._flat is None or not size or self._end + size > len(self._flat):
            return None
        part = self._flat[self._end : self._end + size]
        self._parts[part.ctypes.data] = (self._end, size, weakref.ref(part))
        self._end = aligned(self._end + size)
        return part

    def _given(
        self, given: dict[int, tuple[int, int, Any]], array: np.ndarray[Any, Any]
    ) -> int | None:
        place, size, _ = given.get(array.ctypes.data, (0, -1, None))
        if size != len(array):
            return None
        del given[array.ctypes.data]  # memory shared by two objects is sent twice
        return place

    def _empty(self, size: int) -> np.ndarray[Any, Any]:
        import numpy as np

        if size > LARGEST:
            return np.empty(size, np.uint8)
        pooled: np.ndarray[Any, Any] = self._pool.empty((max(size, self._size),), np.uint8)
        return pooled


def _alike(batch: Sequence[Any]) -> bool:
    """Whether tensors have one type and shape; torch promotes the types of others, or refuses them."""
    first = batch[0]
    kind, dtype, shape = type(first), first.dtype, first.shape
    return all(
        type(each) is kind
        and each.dtype == dtype
        and each.shape == shape
        and not each.requires_grad
        for each in batch
    )


def content_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, also those in its slots."""
    content = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = [k for k, member in vars(kind).items() if isinstance(member, MemberDescriptorType)]
        content |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return content


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def collates_anew(collate: Any) -> bool:
    """Whether nobody else has the memory of its batches: it is torch's own, and so is all that it calls."""
    from torch.utils.data._utils import collate as torchs

    called = {each.__module__ for each in torchs.default_collate_fn_map.values()}
    return collate is torchs.default_collate and called <= {torchs.__name__, __name__}


def pack(objects: Iterable[Any], room: Room | None = None) -> np.ndarray[Any, Any]:
    """Objects → pages: uint8 of shape (rows, PAGE). Memory shared by two of them is sent twice."""
    return pages_of([*map(parts_of, objects)], room)


def parts_of(packed: Any) -> Parts:
    buffers: list[pickle.PickleBuffer] = []
    target = io.BytesIO()
    _pickler()(target, buffers.append).dump(packed)
    return [target.getbuffer(), *(buffer.raw() for buffer in buffers)]


def pack_named(packed: Any) -> np.ndarray[Any, Any]:
    """As `pack`, with the same bytes in each process that packs the same: see `name_classes`."""
    pickled, *buffers = parts_of(packed)
    return pages_of([[memoryview(name_classes(bytes(pickled), buffers)), *buffers]])


def pages_of(parts: Sequence[Parts], room: Room | None = None) -> np.ndarray[Any, Any]:
    flattened = [part for own in parts for part in own]
    spare = ENTRY * (len(flattened) + len(parts) + 1) + TAIL.size + PAGE
    flat, places, end = (room or Room()).place(flattened, spare)
    place = iter(places)
    layout = json.dumps([[(next(place), part.nbytes) for part in own] for own in parts]).encode()
    size = -(-(end + len(layout) + TAIL.size) // PAGE) * PAGE
    flat[end:size] = 0
    flat.data[size - TAIL.size - len(layout) : size] = layout + TAIL.pack(len(layout))
    return flat[:size].reshape(-1, PAGE)


def unpack(pages: np.ndarray[Any, Any], apart: bool = False) -> list[Any]:
    """The objects of `pack`, which own the memory of `pages` from now on and write into it.

    `apart`: copy small buffers of large pages, because a script that keeps labels would keep all images.
    """
    from ray import cloudpickle

    flat = memoryview(pages.reshape(-1).data)
    layout_end = len(flat) - TAIL.size
    (length,) = TAIL.unpack(flat[layout_end:])
    if length > layout_end:
        raise ValueError("not pages of a batch")
    found = []
    for own in json.loads(bytes(flat[layout_end - length : layout_end])):
        parts: list[Any] = [flat[place : place + size] for place, size in own]
        if apart and len(flat) > LARGE:
            parts = [bytearray(part) if len(part) < SMALL else part for part in parts]
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


def _rebuild_tensor(storage: Any, dtype: str, offset: int, size: Any, stride: Any) -> Any:
    import torch

    return torch.empty(0, dtype=getattr(torch, dtype[6:])).set_(storage, offset, size, stride)


def _is_special(tensor: Any) -> bool:
    """Whether a dense tensor is more than its storage, type, offset, size and stride."""
    lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_nested
    return bool(lazy or tensor.__dict__ or any(getattr(tensor, "names", ())))


@cache
def _pickler() -> Any:
    """The class is made on first use, because it needs torch."""
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
            if type(value) in NAMED and value.__module__ in OWN and "<" not in value.__qualname__:
                return NotImplemented  # by name, which cloudpickle takes long to find out
            if (
                type(value) is torch.Tensor
                and value.device.type == "cpu"
                and not value.requires_grad
            ):
                if value.layout is torch.strided and not value.is_quantized:
                    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                        value = value.clone()  # send only the visible part of a larger storage
                    # torch's own way takes three times as long, and reads new types from files alone.
                    if value.dtype in torch.storage._new_dtypes() or not _is_special(value):
                        own = value.untyped_storage()
                        own = self._storages.setdefault(own._cdata, own)
                        about = value.storage_offset(), tuple(value.size()), value.stride()
                        return _rebuild_tensor, (own, str(value.dtype), *about)
                    return value.__reduce_ex__(2)
            elif isinstance(value, torch.storage.TypedStorage):
                own = value._untyped_storage
                if own.device.type == "cpu":
                    # Keep memory shared between tensors of one object.
                    return _rebuild_typed, (self._storages.setdefault(own._cdata, own), value.dtype)
            elif isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
                view = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
                return _rebuild_storage, (pickle.PickleBuffer(view.data),)
            reduced = super().reducer_override(value)
            return with_slots(value, reduced) if isinstance(value, type) else reduced

    return Pickler
