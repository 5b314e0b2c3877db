"""Laptop: statistics of a column at one point of a chain, updated value by value."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from stoker.figures import size

MOST_DISTINCT = 200
"""Stop counting distinct values here."""
IGNORED_CLASS = 255
"""Conventional mask value of pixels to ignore."""


@dataclass
class Column:
    """Laptop: statistics of one column over the examined records."""

    values: int = 0
    nulls: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """NumPy dtype name, or text, bytes or the Python class."""
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Shapes of arrays; lengths of text and bytes."""
    low: float = math.inf
    high: float = -math.inf
    highest_class: int = 0
    """Of integer arrays with two dimensions, which may be masks: the highest number but IGNORED_CLASS."""
    nans: int = 0
    """Number of values that contain NaN or infinity."""
    flat: int = 0
    """Number of arrays with a single constant value."""
    distinct: Counter[Any] = field(default_factory=Counter)
    """Digests of large values; text and numbers verbatim."""

    def take(self, value: Any) -> None:
        """Add the value of one record."""
        import numpy as np

        self.values += 1
        if value is None:
            self.nulls += 1
            return
        if isinstance(value, bytes | str):
            self.kinds["text" if isinstance(value, str) else "bytes"] += 1
            self.shapes[(len(value),)] += 1
            self._count(value if isinstance(value, str) else digest(value))
            return
        array = as_array(value)
        if array is None or array.dtype == object:
            self.kinds[type(value).__name__] += 1
            self._count(digest(repr(value).encode()))
            return
        self.kinds[array.dtype.name] += 1
        self.shapes[array.shape] += 1
        self._count(array.item() if array.ndim == 0 else digest(np.ascontiguousarray(array)))
        if array.ndim == 2 and array.dtype.kind in "iu":
            classes = array[array != IGNORED_CLASS]
            self.highest_class = max(self.highest_class, int(classes.max(initial=0)))
        if array.size and array.dtype.kind in "biuf":
            finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
            self.nans += finite.size < array.size
            if finite.size:
                low, high = float(finite.min()), float(finite.max())
                self.low, self.high = min(self.low, low), max(self.high, high)
                self.flat += array.size > 1 and low == high and finite.size == array.size

    def _count(self, value: Any) -> None:
        if value in self.distinct or len(self.distinct) < MOST_DISTINCT:
            self.distinct[value] += 1

    @property
    def numeric(self) -> bool:
        return self.low <= self.high

    @property
    def constant(self) -> bool:
        """Whether all values are equal; needs at least two."""
        return self.values - self.nulls > 1 and len(self.distinct) == 1

    @property
    def ragged(self) -> bool:
        """Whether only the first dimension varies, as in padded columns."""
        return len(self.shapes) > 1 and len({(len(s), *s[1:]) for s in self.shapes}) == 1

    def type_text(self) -> str:
        return " | ".join(self.kinds) or "NULL"

    def shape_text(self) -> str:
        """`32×32×3`, a range of lengths such as `3…41`, or the number of distinct shapes."""
        if not self.shapes or set(self.shapes) == {()}:
            return ""
        kind = next(iter(self.kinds))
        if len(self.shapes) == 1:
            only = next(iter(self.shapes))
            return size(only[0]) if kind == "bytes" else f"{only[0]} chars" if kind == "text" else times(only)
        if not self.ragged:
            return f"{len(self.shapes)} shapes, {times(min(self.shapes))} … {times(max(self.shapes))}"
        low, high = min(s[0] for s in self.shapes), max(s[0] for s in self.shapes)
        if kind == "bytes":
            return f"{size(low)} … {size(high)}"
        rest = "".join(f"×{number}" for number in next(iter(self.shapes))[1:])
        return f"{low} … {high}{' chars' if kind == 'text' else rest}"

    def range_text(self) -> str:
        """Minimum and maximum of numbers; distinct count of other values, or the text itself if short."""
        if self.numeric:
            bounds = f"{self.low:.4g} … {self.high:.4g}" if self.low < self.high else f"{self.low:.4g}"
            return f"{bounds}, {self.nans} with NaN/inf" if self.nans else bounds
        if self.nans:
            return f"{self.nans} with NaN/inf"
        if self.constant and isinstance(only := next(iter(self.distinct)), str):
            return f"always {only[:30]!r}"
        return f"{len(self.distinct)} different" if len(self.distinct) < MOST_DISTINCT else ""


def times(shape: tuple[int, ...]) -> str:
    """Laptop: format a shape."""
    return "×".join(map(str, shape)) or "number"


def digest(content: Any) -> bytes:
    """Laptop: digest of a large value."""
    return hashlib.blake2b(content, digest_size=8).digest()


def as_array(value: Any) -> Any:
    """Laptop: convert numbers, arrays, tensors and lists of numbers to an array; else None."""
    import numpy as np

    if hasattr(value, "numpy") and hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        return value.numpy()
    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        return np.asarray(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
        return np.asarray(value)
    return None
