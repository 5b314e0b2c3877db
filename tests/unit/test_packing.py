"""Whatever a dataset and a collate function may give arrives as it was."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import pathlib
import weakref
from typing import Any, NamedTuple

import attr
import numpy as np
import pytest
import torch
from alike import same
from torch.utils.data._utils.collate import default_collate, default_collate_fn_map

from stoker import DataLoader
from stoker.serve.blocks.packing import PAGE, Room, pack, unpack


@dataclasses.dataclass
class Batch:
    images: torch.Tensor
    names: list[str]


class Pair(NamedTuple):
    first: Any
    second: Any


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    a: int
    b: list[int] = dataclasses.field(default_factory=list)


class Private:
    __slots__ = ("__y", "x")

    def __init__(self, x: int) -> None:
        self.x, self.__y = x, 2 * x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Private) and (self.x, self.__y) == (other.x, other.__y)


class Mixed(Private):
    z = 3


@attr.s(slots=True, auto_attribs=True)
class Attrs:
    x: int


BASE = torch.arange(12.0).reshape(3, 4)
NEW = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES: dict[str, Any] = {
    "scalar tensor": torch.tensor(3),
    "matrix": BASE,
    "transposed": BASE.t(),
    "view of more": BASE[:, :2],
    "stepped": BASE[::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.randn(5).bfloat16(),
    "half": torch.randn(5).half(),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(2, dtype=torch.complex64),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "imaginary part of a conjugate": torch.tensor([1 + 2j]).conj().imag,
    "uint8 image": torch.randint(0, 255, (3, 8, 8), dtype=torch.uint8),
    **{str(dtype): torch.arange(4).to(dtype) for dtype in NEW},
    "sparse": torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True),
    "requires grad": torch.ones(3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "array": np.arange(6.0).reshape(2, 3),
    "fortran array": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "sliced array": np.arange(12).reshape(3, 4)[:, ::2],
    "text array": np.array(["a", "bc"]),
    "object array": np.array([{"a": 1}, None], dtype=object),
    "structured array": np.zeros(2, dtype=[("x", "f4"), ("y", "i8")]),
    "numpy scalar": np.float32(1.5),
    "text": "grüße",
    "bytes": b"\x00abc",
    "None": None,
    "nested": {"a": [torch.ones(2), {"b": ("s", 1.5)}], "c": [[1, 2], [3]]},
    "dataclass": Batch(BASE, ["x"]),
    "named tuple": Pair(torch.ones(1), [np.ones(2)]),
    "ordered": collections.OrderedDict(b=1, a=torch.zeros(1)),
    "set and path": ({1, 2}, pathlib.PurePosixPath("a/b"), datetime.date(2020, 1, 1), Colour.RED),
    "slots": [Slots(3, [4]), Private(5), Mixed(6), Attrs(7), Pair(Slots(8), None)],
    "ragged list": [torch.ones(n) for n in range(5)],
}


def itself(record: Any) -> Any:
    return record


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("loader_in_this_process")
def test_an_object_arrives_as_it_was(workers: int) -> None:
    loader = DataLoader([*SHAPES.values()], None, num_workers=workers, collate_fn=itself)
    found = zip(SHAPES.items(), loader, strict=True)
    assert [name for (name, sent), arrived in found if not same(sent, arrived)] == []


def test_attributes_of_a_tensor_arrive() -> None:
    tensor = torch.ones(2)
    tensor.weight = 0.5  # type: ignore[attr-defined]
    (found,) = unpack(pack([tensor]))
    assert same(found, torch.ones(2)) and found.weight == 0.5


def test_strides_of_dense_tensors_stay() -> None:
    for name in ("transposed", "channels last"):
        assert unpack(pack([SHAPES[name]]))[0].stride() == SHAPES[name].stride()


def test_what_arrives_can_be_written_and_shares_memory_where_it_did() -> None:
    whole = torch.zeros(4)
    first, second, same_again = unpack(pack([(whole, whole, whole.view(2, 2))]))[0]
    first[0] = 7
    assert second[0] == 7 and same_again[0, 0] == 7 and whole[0] == 0


def test_only_what_a_view_shows_is_sent() -> None:
    assert pack([torch.zeros(1000, 1000)[0]]).size < 3 * PAGE


def collated(room: Room, first: int, size: int = 20_000) -> tuple[Any, np.ndarray[Any, Any]]:
    with room.group():
        batch = default_collate([{"x": torch.full((size,), first + n), "y": n} for n in range(4)])
        return batch, pack([batch], room)


def arrives(pages: np.ndarray[Any, Any], first: int) -> bool:
    (found,) = unpack(pages.copy())
    return found["x"][:, 0].tolist() == [first + n for n in range(4)] and found["y"].tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_memory_of_a_batch_that_is_gone_takes_the_next_and_the_batch_is_not_copied() -> None:
    room, places = Room(), set()
    for number in range(12):
        batch, pages = collated(room, 10 * number)
        assert arrives(pages, 10 * number)
        places.add(pages.ctypes.data)
        inside = pages.ctypes.data <= batch["x"].data_ptr() < pages.ctypes.data + pages.nbytes
        assert inside == (number > 0)
        del batch, pages
    assert len(places) == 1


def test_neither_pages_on_their_way_nor_a_batch_that_somebody_keeps_are_written_again() -> None:
    room = Room()
    kept = [collated(room, 10 * number, 20_000 + 5_000 * (number % 3)) for number in range(12)]
    for number, (batch, pages) in enumerate(kept):
        assert arrives(pages, 10 * number) and batch["x"][3, -1] == 10 * number + 3


def test_what_two_batches_of_a_group_share_does_not_reach_the_script_as_shared() -> None:
    room = Room()
    for _ in range(3):
        with room.group():
            batch = default_collate([torch.zeros(100), torch.ones(100)])
            first, second = unpack(pack([batch, batch], room).copy())
        first += 5
        assert second.unique().tolist() == [0, 1]


def test_a_collate_function_that_fails_leaves_torchs_own_in_place() -> None:
    before = dict(default_collate_fn_map)
    with pytest.raises(RuntimeError, match="equal size"), Room().group():
        default_collate([torch.zeros(2), torch.zeros(3)])
    assert default_collate_fn_map == before


def test_a_script_that_keeps_labels_does_not_keep_the_images_of_their_batch() -> None:
    pages = pack([{"x": torch.zeros(2_000_000), "y": torch.arange(4)}]).copy()
    gone = weakref.ref(pages)
    ((images, labels),) = (each.values() for each in unpack(pages, apart=True))
    del pages
    assert gone() is not None and len(images) == 2_000_000
    del images
    assert gone() is None and labels.tolist() == [0, 1, 2, 3]
