"""What a script has set in its own modules, in the environment and in libraries, sent with each pass.

A chain worker imports the script's modules afresh. Plain values that differ become the script's: in place in
lists, dicts and objects, because others may refer to them. Several loaders share a process, so the values of one
are taken back before another works.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib
import io
import os
import pickle
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stoker.read.generators import WhenImported, is_own_file
from stoker.serve.blocks.packing import content_of

LARGEST = 1 << 24
"""Bytes of a value that travels; a larger one is compared."""
DTYPE = "default_dtype"
Settings = dict[tuple[str, str], Any]
"""Values by module and name; those of the environment by its name."""
USUAL: Settings = {
    ("torch", DTYPE): "torch.float32",
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"): False,
    ("PIL.Image", "MAX_IMAGE_PIXELS"): 1024**3 // 4 // 3,
}
ENVIRONMENT = "os.environ"
OF_HOSTS = ("RAY_", "STOKER_", "CUDA_", "LD_")
"""Variables that each process has for itself."""
OF_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "PMI_RANK"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_RANK"),
)
OF_JOB = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "PMI_SIZE"),
    *("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)
"""Variables by which launchers tell a process its rank, and how many there are."""
ABSENT = object()
HEAP_TYPE = 1 << 9
"""The flag of classes that Python code has made."""


class Value(NamedTuple):
    """A value, pickled; without content, it did not travel, and processes only compare its kind or digest."""

    kind: str
    digest: str = ""
    content: bytes = b""


@dataclass
class ScriptState:
    settings: Settings = field(default_factory=dict)
    modules: dict[str, dict[str, Value]] = field(default_factory=dict)
    """By module and qualified name."""
    unsent: list[str] = field(default_factory=list)
    """Chain worker: what the script has set and could not send."""
    _set: list[tuple[Any, str, Any]] = field(default_factory=list)
    """Owner, name, and the value of the other side: the script's while another state is active."""
    _seen: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context with the state of the script; its modules' values stay until another one is active."""
        global _active
        if _active is not self:
            if _active is not None:
                _active._swap()
            _active = self
            self._swap()
        for module in self.modules.keys() - self._seen:
            self.loaded(module)
        with set_as(self.settings):
            yield

    def loaded(self, name: str) -> None:
        """Give a module that is loaded here the values that differ."""
        module = sys.modules.get(name)
        if module is None or name in self._seen:
            return
        self._seen.add(name)
        for path, value in self.modules[name].items():
            *owners, last = path.split(".")
            owner: Any = module
            for each in owners:
                owner = getattr(owner, each, None)
            if isinstance(owner, type | types.ModuleType):
                self._give(owner, last, value, f"{name}.{path}")

    def _give(self, owner: Any, name: str, value: Value, path: str) -> None:
        now = vars(owner).get(name, ABSENT)
        here = None if now is ABSENT else value_of(now) or Value(_kind(now))
        if here is not None and (here.kind, value.digest or here.digest) == (
            value.kind,
            here.digest,
        ):
            return
        try:
            self._set.append(_swapped(owner, name, pickle.loads(value.content)))  # noqa: S301 - of the script
        except Exception:  # there is no content, or none that can be loaded here
            self.unsent.append(f"{path} ({value.kind})")

    def _swap(self) -> None:
        self._set = [_swapped(*each) for each in self._set]


_active: ScriptState | None = None


def _swapped(owner: Any, name: str, other: Any) -> tuple[Any, str, Any]:
    """Set what `other` is; returns what was there."""
    now = vars(owner).get(name, ABSENT)
    if type(now) is type(other) and (content := _fill(other)) is not None:
        _fill(other, _fill(now, content))
        return owner, name, other
    if other is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, other)
    return owner, name, now


def _fill(value: Any, content: Any = None) -> Any:
    """The content of a list, set, dict or object, which gets another; None: it cannot be changed in place."""
    kind, parts = type(value), []
    base: Any = next((base for base in (list, dict, set) if isinstance(value, base)), object)
    own = [each for each in kind.__mro__ if each not in (base, object)]
    usual = all(
        getattr(kind, name) is getattr(base, name) for name in ("__reduce__", "__reduce_ex__")
    )
    if not usual or not all(each.__flags__ & HEAP_TYPE for each in own):
        return None
    attributes = getattr(value, "__dict__", {})
    if content_of(value).keys() != attributes.keys() or (not own and base is object):
        return None
    if base is not object:
        parts.append(base.copy(value))
        if content is not None:
            base.clear(value)
            (base.extend if base is list else base.update)(value, content[0])
    if own:
        parts.append(dict(attributes))
        if content is not None:
            attributes.clear()
            attributes.update(content[-1])
    return parts


def _is_set(module: str) -> bool:
    return _active is not None and module in _active.modules


def _set_loaded(module: Any) -> None:
    if _active is not None and _is_set(module.__name__):
        _active.loaded(module.__name__)


follow_imports = WhenImported(_is_set, _set_loaded).follow
"""Gives modules that are imported later the values of the active state."""


def state_of_script() -> ScriptState:
    """Script, as a pass begins."""
    found = {place: _setting(*place) for place in USUAL if place[0] in sys.modules}
    settings = {place: value for place, value in found.items() if value != USUAL[place]}
    settings["sys", "argv"] = list(sys.argv)
    modules = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
        if name not in ("__main__", "__mp_main__") and is_own_file(file):
            modules[name] = dict(_values(module, module.__name__, ""))
    return ScriptState(
        settings | _environment(), {n: values for n, values in modules.items() if values}
    )


def _values(owner: Any, module: str, prefix: str) -> Iterator[tuple[str, Value]]:
    for name, value in list(vars(owner).items()):
        if name.startswith("__") or isinstance(value, types.ModuleType):
            continue
        if _is_own_definition(value, module, f"{prefix}{name}"):
            if isinstance(value, type) and not issubclass(value, enum.Enum):
                yield from _values(value, module, f"{prefix}{name}.")
        elif (found := value_of(value)) is not None:
            yield f"{prefix}{name}", found
        elif not hasattr(type(value), "__get__"):
            yield f"{prefix}{name}", Value(_kind(value))


def _is_own_definition(value: Any, module: str, path: str) -> bool:
    named = isinstance(value, type | types.FunctionType)
    return named and (value.__module__, value.__qualname__) == (module, path)


def value_of(value: Any) -> Value | None:
    """A plain value, pickled; None: it cannot travel."""
    try:
        if not is_plain(value, set()):
            return None
        content = pickle.dumps(value)
        if b"__main__" in content:  # what the script's own file defines is sent along
            from ray import cloudpickle

            content = cloudpickle.dumps(value)
    except Exception:
        return None
    digest = hashlib.sha256(content).hexdigest()
    return Value(_kind(value), digest, content if len(content) <= LARGEST else b"")


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


SIMPLE = {type(None), bool, int, float, str, bytes}
ATOMS = (*SIMPLE, complex, bytearray, range, slice, Path, enum.Enum)


def is_plain(value: Any, seen: set[int]) -> bool:
    """Numbers, text, arrays, functions and classes with a name, and containers and objects of these."""
    torch = sys.modules.get("torch")
    if isinstance(value, (*ATOMS, np.generic, np.dtype)) or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if torch is not None and isinstance(value, (torch.Tensor, torch.dtype, torch.device)):
        tensor = type(value) is torch.Tensor
        return not isinstance(value, torch.Tensor) or bool(
            tensor and value.device.type == "cpu" and not value.requires_grad
        )
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        found: Any = sys.modules.get(value.__module__)
        for name in value.__qualname__.split("."):
            found = getattr(found, name, None)
        return found is value or value.__module__ == "__main__"
    if isinstance(value, (io.IOBase, types.ModuleType)) or hasattr(type(value), "__get__"):
        return False
    parts = list(content_of(value).values())
    if isinstance(value, dict):
        parts += [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts += value
    elif not any({"__dict__", "__slots__"} & vars(kind).keys() for kind in type(value).__mro__):
        return False  # made by other than Python code
    if {*map(type, parts)} <= SIMPLE:
        return True
    return all(is_plain(part, seen) for part in parts)


def _at_start() -> dict[str, str]:
    """The environment that this process began with."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # another system
        return {}
    pairs = [os.fsdecode(entry).partition("=") for entry in entries if entry]
    return {name: value for name, equals, value in pairs if equals}


def _environment() -> Settings:
    start = _at_start()
    changed: dict[str, Any] = {n: v for n, v in os.environ.items() if start.get(n) != v}
    changed |= dict.fromkeys(start.keys() - os.environ.keys())
    for name in (*OF_RANK, *OF_JOB):  # sent apart: blocks of one rank may be those of others
        changed.pop(name, None)
    return {(ENVIRONMENT, n): v for n, v in sorted(changed.items()) if not n.startswith(OF_HOSTS)}


@contextlib.contextmanager
def set_as(script: Settings) -> Iterator[None]:
    """A context with the settings of a script: others share this process."""
    before = {place: _setting(*place) for place in script}
    for place, value in script.items():
        _set(*place, value)
    try:
        yield
    finally:
        for place, value in script.items():
            if _setting(*place) == value:  # a module that was loaded here may have set another
                _set(*place, before[place])


def _setting(module: str, name: str) -> Any:
    if module == ENVIRONMENT:
        return os.environ.get(name)
    found: Any = importlib.import_module(module)
    return str(found.get_default_dtype()) if name == DTYPE else getattr(found, name)


def _set(module: str, name: str, value: Any) -> None:
    if module == ENVIRONMENT:
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})
        return
    found: Any = importlib.import_module(module)
    if name == DTYPE:
        found.set_default_dtype(getattr(found, value[6:]))
    else:
        setattr(found, name, value)
