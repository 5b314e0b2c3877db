"""Random generators that a dataset, a collate function or a stage holds: seeded anew for each record.

Each process has a copy of them in the same state, so their draws would repeat and depend on which process makes
a record. Seeded from its own state, the pass and the record, a copy draws the same on any host.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import pickle
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ATOMS = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice),
    *(types.CodeType, types.FrameType, types.TracebackType, weakref.ref),
}
"""Types of objects that lead to no generator."""
CONTAINERS = {dict, list, tuple, set}


class HeldGenerators:
    """The generators that some objects hold, in attributes, containers, closures, and in globals that the user's
    own functions name. Those of an iterable dataset, `apart`, are left to its streams.

    They are found before the first record, and after it: a function may create its generator when it is called.
    """

    def __init__(self, *owners: Any, apart: Any = None) -> None:
        self._owners, self._apart = owners, apart
        self._reseeds: list[tuple[Callable[[int], Any], str]] | None = None
        self._known: dict[int, tuple[Any, str]] = {}
        self.settled, self._text = not owners, ""
        """Whether the first record has been made."""

    def find(self, sent: bool = False) -> bool:
        """Whether there are others than before; `sent`: each process has them in this state."""
        own, shared = generators_of(*self._owners)
        apart = {id(each) for found in generators_of(self._apart) for each in found}
        held = [each for each in (*own, *shared) if id(each) not in apart]
        states = {id(each): _state_of(each) for each in own} if sent else {}
        new = any(id(each) not in self._known for each in held)
        for each in held:
            self._known.setdefault(id(each), (each, states.get(id(each), "")))
        self._reseeds = [
            (_reseeding(each), f"{self._known[id(each)][1]}/{number}")
            for number, each in enumerate(held)
        ]
        return new

    def seed(self, text: str) -> None:
        if self._reseeds is None:
            self.find(sent=True)
        self._text = text
        for reseed, own in self._reseeds or ():
            reseed(_number(f"{own}/{text}"))

    def spare(self, value: T) -> T | None:
        """A copy of the first record, which may have to be made again; None for others."""
        try:
            return None if self.settled else copy.deepcopy(value)
        except Exception:
            self.settled = True
            return None

    def created(self) -> bool:
        """Whether making the first record has created generators; they are seeded, and it must be made again."""
        if self.settled:
            return False
        self.settled = True
        if new := self.find():
            self.seed(self._text)
        return new


def generators_of(*owners: Any) -> tuple[list[Any], list[Any]]:
    """Those of the owners themselves, and those of modules and classes, which a process has from before.

    In an order that depends on nothing but their structure.
    """
    import numpy as np

    kinds: tuple[type, ...] = (random.Random, np.random.Generator, np.random.RandomState)
    leaves: tuple[type, ...] = (HeldGenerators, random.SystemRandom)
    globals_: list[Any] = [random.random.__self__, np.random.rand.__self__]  # type: ignore[attr-defined]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        kinds, leaves = (*kinds, torch.Generator), (*leaves, torch.Tensor)
        globals_.append(torch.default_generator)
    seen, beyond = {id(each) for each in globals_}, list[Any]()
    alive: list[Any] = []

    def walk(level: list[Any], beyond: list[Any] | None) -> list[Any]:
        found = []
        while level:
            # At once, because datasets may have millions of them.
            following = gc.get_referents(*(v for v in level if type(v) in CONTAINERS))
            for value in level:
                if type(value) in CONTAINERS or isinstance(value, leaves):
                    continue
                if isinstance(value, kinds):
                    found.append(value)
                    continue
                own, shared = _within(value)
                following += own
                (following if beyond is None else beyond).extend(shared)
            level = [v for v in following if type(v) not in ATOMS and id(v) not in seen]
            level = list({id(value): value for value in level}.values())
            seen.update(map(id, level))
            alive.append(level)  # an object that is gone could leave its id to another
        return found

    own = walk(list(owners), beyond)
    rest = {id(each): each for each in beyond if id(each) not in seen}
    seen.update(rest)
    return own, walk(list(rest.values()), None)


CALLED = {
    *("PreTrainedTokenizerBase", "ProcessorMixin"),
    *("ImageProcessingMixin", "FeatureExtractionMixin"),
}
"""Classes of transformers whose objects are called, and give the same whatever they were called with before."""


def hold_the_same(one: Any, other: Any) -> bool:
    """Whether two objects hold one that can change, in attributes, containers, closures
    or globals that the user's own functions name."""
    return not _held_by(one).keys().isdisjoint(_held_by(other))


def _held_by(owner: Any) -> dict[int, Any]:
    level, seen = [owner], {id(owner): owner}
    while level:
        following = gc.get_referents(*(value for value in level if type(value) in CONTAINERS))
        for value in level:
            if type(value) not in CONTAINERS:
                own, shared = _within(value)
                following += [*own, *shared]
        level = list({id(v): v for v in following if id(v) not in seen and _can_change(v)}.values())
        seen |= {id(value): value for value in level}
    fixed = (tuple, types.FunctionType, types.BuiltinFunctionType)
    return {n: value for n, value in seen.items() if not isinstance(value, fixed)}


def _can_change(value: Any) -> bool:
    empty = type(value) in (dict, tuple) and not value
    if empty or type(value) in ATOMS or isinstance(value, type | types.ModuleType):
        return False
    kinds = (kind for kind in type(value).__mro__ if kind.__module__.startswith("transformers."))
    return not any(kind.__name__ in CALLED for kind in kinds)


def _within(value: Any) -> tuple[Iterable[Any], Iterable[Any]]:
    """What an object holds, and what is shared with others: values of the user's modules and classes."""
    if isinstance(value, types.ModuleType):
        return (), list(vars(value).values()) if is_own(value.__name__) else ()
    if isinstance(value, type):
        return (), [*vars(value).values(), *value.__bases__] if is_own(value.__module__) else ()
    if isinstance(value, types.FunctionType):
        held = [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        return held, _globals_of(value, value.__code__) if is_own(value.__module__) else ()
    return gc.get_referents(value), ()


def _globals_of(function: types.FunctionType, code: types.CodeType) -> list[Any]:
    own = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return own + [value for each in inner for value in _globals_of(function, each)]


class WhenImported(MetaPathFinder):
    """Calls `then` with modules of these names as soon as they have been imported."""

    def __init__(self, wanted: Callable[[str], bool], then: Callable[[Any], None]) -> None:
        self.wanted, self.then = wanted, then

    def follow(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        with suppress(ValueError):  # another thread may have done so
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not self.wanted(name):
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_then(module: Any) -> None:
                load(module)
                self.then(module)

            spec.loader.exec_module = load_then  # type: ignore[method-assign]
        return spec


def is_own(module: str) -> bool:
    """Whether a module is the user's: `__main__`, one that is sent by value, or one that is not installed."""
    loaded = sys.modules.get(module)
    return module == "__main__" or loaded is None or is_own_file(getattr(loaded, "__file__", None))


@cache
def is_own_file(file: str | None) -> bool:
    if file is None:  # built in, or a folder
        return False
    path, known = Path(file).resolve(), sysconfig.get_paths()
    libraries = [known[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [*(Path(each).resolve() for each in libraries), Path(__file__).resolve().parents[1]]
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    return not installed and not {*folders} & {*path.parents}


def _state_of(generator: Any) -> str:
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
    elif hasattr(generator, "bit_generator"):
        state = generator.bit_generator.state
    elif hasattr(generator, "initial_seed"):
        state = generator.get_state().numpy().tobytes()
    else:
        state = generator.get_state(legacy=False)
    return str(_number(pickle.dumps(state, protocol=4).hex()))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _reseeding(generator: Any) -> Callable[[int], Any]:
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator

        def reseed(seed: int) -> None:
            bits.state = type(bits)(seed).state

        return reseed
    if hasattr(generator, "initial_seed"):
        return lambda seed: generator.manual_seed(seed)
    if isinstance(generator, random.Random):
        return lambda seed: generator.seed(seed)
    return lambda seed: generator.seed(seed & 0xFFFFFFFF)
