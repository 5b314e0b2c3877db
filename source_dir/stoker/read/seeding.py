"""Every host: seeds the global random generators, so that draws in users' code depend only on (seed, epoch,
record): not on the process or on what it did before."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from itertools import chain, repeat
from typing import Any, TypeVar

from stoker.read.base import record_id

T = TypeVar("T")


def seed_globals(text: str) -> int:
    """Every host: seed the generators of `random`, NumPy and torch; returns the seed.

    Takes seven microseconds. If torch is not loaded, it is seeded when it is.

    Args:
        text: what the draws depend on.
    """
    import numpy as np

    seed = record_id(text)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    seed_torch(seed)
    return seed


def seed_torch(seed: int) -> None:
    """Every host: seed torch's global generator, now or as soon as torch is loaded."""
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    if generator is not None:
        generator.manual_seed(seed)
    else:
        _when_loaded.seed = seed
        if _when_loaded not in sys.meta_path:
            sys.meta_path.insert(0, _when_loaded)


class _WhenLoaded(MetaPathFinder):
    """Seeds torch when users' code is the first to import it."""

    seed = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Called by Python's import system."""
        if name != "torch":
            return None
        _forget_torch()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_seed(module: Any) -> None:
                load(module)
                module.default_generator.manual_seed(self.seed)

            spec.loader.exec_module = load_and_seed  # type: ignore[method-assign]
        return spec


_when_loaded = _WhenLoaded()


def _forget_torch() -> None:
    with suppress(ValueError):  # another thread may have done so
        sys.meta_path.remove(_when_loaded)


def seeded(records: Iterable[T], keys: Iterable[str] | None, text: str) -> Iterator[T]:
    """Chain worker: the items of a reader, with the global generators seeded before each item is made.

    Args:
        records: a generator that makes one item at a time.
        keys: of these items, if known in advance; None: identify items by their number.
        text: seed and epoch; if `keys` is None, also the shard.
    """
    reader = iter(records)
    names = map(str, range(sys.maxsize)) if keys is None else chain(keys, repeat("end"))
    for name in names:
        seed_globals(f"{text}/{name}")
        try:
            item = next(reader)
        except StopIteration:
            return
        yield item


@contextmanager
def drawing(text: str) -> Iterator[None]:
    """Head: seed the global generators for users' code that runs here, and restore them afterwards."""
    before = states()
    seed_globals(text)
    try:
        yield
    finally:
        _forget_torch()
        put_back(before)


def states() -> dict[str, Any]:
    """Every host: the states of the global generators as plain types; torch's only if it is loaded."""
    import numpy as np

    state: Any = np.random.get_state()
    name, words, *rest = state
    found: dict[str, Any] = {"random": random.getstate(), "numpy": (name, words.tobytes(), *rest)}
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


def put_back(found: dict[str, Any]) -> None:
    """Every host: restore the global generators to a result of `states`."""
    import numpy as np

    random.setstate(found["random"])
    name, words, *rest = found["numpy"]
    np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))
    if "torch" in found:
        torch = sys.modules["torch"]
        torch.set_rng_state(torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8))
