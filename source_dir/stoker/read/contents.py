"""Head: a digest of an object's content (arrays, numbers, text, and objects made of them), which is the same
in another process and after the data has moved."""

from __future__ import annotations

import contextlib
from hashlib import blake2b
from pathlib import PurePath
from typing import Any

MOST_ITEMS = 20_000
"""Maximum number of items of lists, dicts and objects to hash; longer ones are sampled evenly."""
MOST_OF_A_LIST = 4096
MOST_BYTES = 4 * 2**20
"""Maximum bytes of an array to hash; larger ones are sampled evenly."""
PARTS = 64
DEEPEST = 8
SYSTEM = {"_io", "_thread", "builtins", "io", "logging", "multiprocessing", "threading", "weakref"}
"""Modules whose objects do not describe records."""


def content_of(value: Any) -> str:
    """Head: a digest of an object's content, computed in a fraction of a second."""
    contents = Contents()
    contents.add(value)
    return contents.digest().hex()


class Contents:
    """Head: hashes one object after another.

    Args:
        most_items: maximum number of items in total; None: all items and all bytes.
    """

    def __init__(self, most_items: int | None = MOST_ITEMS) -> None:
        self._hash = blake2b(digest_size=8)
        self._whole = most_items is None
        self._left = most_items or 0
        self._above: list[int] = []
        """Ids of the enclosing objects, to detect reference cycles."""

    def digest(self) -> bytes:
        """Digest of everything added so far."""
        return self._hash.digest()

    def add(self, value: Any) -> None:
        """Hash an object."""
        self._left -= 1
        kind = type(value)
        self._text(kind.__qualname__)
        if value is None or isinstance(value, bool | int | float | complex | range):
            self._text(repr(value))
        elif isinstance(value, str | PurePath):
            self._text(movable(str(value)))
        elif isinstance(value, bytes | bytearray | memoryview):
            self._bytes(memoryview(value).cast("B"))
        elif kind.__module__.partition(".")[0] in SYSTEM and not isinstance(value, dict | list | tuple | set):
            pass
        elif len(self._above) < DEEPEST and id(value) not in self._above:
            self._above.append(id(value))
            self._inside(value)
            self._above.pop()

    def _inside(self, value: Any) -> None:
        if isinstance(value, dict):
            self._items([part for pair in value.items() for part in pair])
        elif isinstance(value, list | tuple):
            self._items(value)
        elif isinstance(value, set | frozenset):
            self._items(sorted(value, key=repr))
        elif hasattr(value, "tobytes") or hasattr(value, "detach"):
            self._array(value)
        elif hasattr(value, "__dict__"):
            # Private attributes that are not containers are internals: handles, counters, times.
            self._items(
                [
                    (name, part)
                    for name, part in vars(value).items()
                    if not name.startswith("_") or (hasattr(part, "__len__") and not isinstance(part, str))
                ]
            )

    def _items(self, items: Any) -> None:
        self._text(str(len(items)))
        step = 1 if self._whole else max(1, -(-len(items) // MOST_OF_A_LIST))
        for at in range(0, len(items), step):
            if not self._whole and self._left <= 0:
                return
            self.add(items[at])

    def _array(self, value: Any) -> None:
        """Hash an array, a tensor or an image."""
        import numpy as np

        if hasattr(value, "detach"):
            import torch

            self._text(f"{value.dtype} {tuple(value.shape)}")
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        array = np.asarray(value)
        self._text(f"{array.dtype} {array.shape}")
        if array.dtype == object:
            self._items(array.ravel().tolist())
        else:
            self._bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _bytes(self, content: memoryview) -> None:
        self._text(str(len(content)))
        if self._whole or len(content) <= MOST_BYTES:
            self._hash.update(content)
            return
        size, step = MOST_BYTES // PARTS, len(content) // PARTS
        for part in range(PARTS):
            self._hash.update(content[part * step : part * step + size])
        self._hash.update(content[-size:])

    def _text(self, text: str) -> None:
        self._hash.update(text.encode(errors="surrogatepass") + b"\0")


def movable(text: str) -> str:
    """Head: a text without the folder of the data: of a long path, the last two parts."""
    if text.startswith("/") or "://" in text[:10]:
        return "/".join(text.rsplit("/", 2)[-2:])
    return text


def as_array(value: Any) -> Any:
    """Every host: how to pickle a tensor as an array; NotImplemented for anything else."""
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "Tensor" and not value.requires_grad:
        with contextlib.suppress(TypeError, RuntimeError):
            import torch

            return torch.from_numpy, (value.numpy(),)
    return NotImplemented
