"""Whatever a dataset and a collate function may give arrives as it was."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from stoker.loader.packing import PAGE, pack, unpack


@dataclasses.dataclass
class Batch:
    images: torch.Tensor
    names: list[str]


class Pair(NamedTuple):
    first: Any
    second: Any


class Colour(enum.Enum):
    RED = 1


BASE = torch.arange(12.0).reshape(3, 4)
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
    "uint8 image": torch.randint(0, 255, (3, 8, 8), dtype=torch.uint8),
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
    "ragged list": [torch.ones(n) for n in range(5)],
}


def same(a: Any, b: Any) -> bool:
    """Equal in type, shape, strides where dense, and content."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.layout != torch.strided:
            return same(a.to_dense(), b.to_dense())
        return (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad) and torch.equal(
            a, b
        )
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and bool(np.all(a == b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    return bool(a == b)


@pytest.mark.parametrize("name", SHAPES)
def test_an_object_arrives_as_it_was(name: str) -> None:
    (found,) = unpack(pack([SHAPES[name]]))
    assert same(SHAPES[name], found)


def test_all_of_them_at_once_and_in_order() -> None:
    found = unpack(pack(list(SHAPES.values())))
    assert all(map(same, SHAPES.values(), found))


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


def test_pages_are_rows_of_one_width() -> None:
    pages = pack([torch.zeros(5000)])
    assert pages.shape[1] == PAGE and pages.dtype == np.uint8
