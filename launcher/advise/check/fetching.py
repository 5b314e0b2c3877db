"""Loader's workers and script's process: measures CPU seconds per batch, by transform.

Times torch's fetcher (`__getitem__` of every index, then `collate_fn`) and, within it, the dataset's
transforms and well-known decoders; in workers, from their `worker_init_fn` on. Sums go to one file per
process, because workers may be killed any time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

WRITE_S = 0.2
DEPTH = 8
"""Depth to which nested datasets and transforms are followed."""
WRAPPED = ("dataset", "datasets", "source", "data")
"""Attributes that hold wrapped datasets."""
DECODERS = {
    "PIL.ImageFile": ("ImageFile.load",),
    "cv2": ("imread", "imdecode"),
    "torchvision.io.image": ("decode_image", "decode_jpeg", "decode_png", "decode_webp", "decode_gif"),
    "simplejpeg": ("decode_jpeg",),
    "soundfile": ("read",),
    "torchaudio": ("load",),
}
_thread = threading.local()


class Fetching:
    """The cost of one loader's batches in this process."""

    def __init__(self, file: Path, loader: int, clock: Callable[[], float]) -> None:
        self.file, self.loader, self.clock = file, loader, clock
        self.batches = 0
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.stages: defaultdict[str, float] = defaultdict(float)
        self.pending: defaultdict[str, float] = defaultdict(float)
        self.inner = self.written = 0.0

    def fetch(self, original: Callable[[Any], Any], index: Any) -> Any:
        """Time a batch; the first one is counted separately, because it imports modules and opens files."""
        if self.batches < 2:
            time_decoders()
        self.pending.clear()
        self.inner = 0.0
        started = time.monotonic(), self.clock(), queued_s()
        _thread.fetching = self
        try:
            data = original(index)
        finally:
            _thread.fetching = None
        wall, cpu, queued = time.monotonic() - started[0], self.clock() - started[1], queued_s() - started[2]
        self.pending["__getitem__"] = max(cpu - self.inner, 0.0)
        if self.batches == 1:
            self.sums.clear()
            self.stages.clear()
        self.batches += 1
        rows = len(index) if isinstance(index, list | tuple) else first_length(data) or 1
        counted: dict[str, float] = {"fetches": 1, "samples": rows, "cpu_s": cpu, "wall_s": wall}
        counted["delay_s"] = min(queued, max(wall - cpu, 0.0))
        for sums, added in ((self.sums, counted), (self.stages, self.pending)):
            for name, spent in added.items():
                sums[name] += spent
        if self.batches < 3 or time.monotonic() - self.written > WRITE_S:
            self.write()
        return data

    def stage(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Time a stage, excluding the stages inside it."""
        outer, self.inner = self.inner, 0.0
        started = self.clock()
        try:
            return function(*args, **kwargs)
        finally:
            spent = self.clock() - started
            self.pending[name] += max(spent - self.inner, 0.0)
            self.inner = outer + spent

    def write(self) -> None:
        """Write atomically, because the file may be read at any time."""
        self.written = time.monotonic()
        found = {"loader": self.loader, **self.sums, "stages": self.stages, "first": self.batches == 1}
        draft = self.file.with_suffix(".draft")
        with contextlib.suppress(OSError):  # the check has ended and removed its folder
            draft.write_text(json.dumps(found))
            draft.replace(self.file)


def fetching_now() -> Fetching | None:
    """What counts the batch that this thread fetches."""
    return getattr(_thread, "fetching", None)


class WorkerStart:
    """A loader's `worker_init_fn` that also starts to observe its workers, forked or spawned."""

    def __init__(self, folder: Path, loader: int, given: Callable[[int], None] | None) -> None:
        self.folder, self.loader = folder, loader
        # A loader made from another one has that one's function.
        self.given: Callable[[int], None] | None = given.given if isinstance(given, WorkerStart) else given

    def __call__(self, worker: int) -> None:
        if self.given is not None:
            self.given(worker)
        file = self.folder / f"fetch-{self.loader}-{os.getpid()}.json"
        fetching = Fetching(file, self.loader, time.process_time)
        observe_fetchers(lambda: fetching)


def observe_fetchers(current: Callable[[], Fetching | None]) -> None:
    """Time every fetcher that torch creates from now on in this process by the counter of that moment."""
    kinds = sys.modules["torch.utils.data.dataloader"]._DatasetKind
    original = getattr(kinds.create_fetcher, "__wrapped__", kinds.create_fetcher)

    @functools.wraps(original)
    def create_fetcher(kind: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        # A loader within a dataset is part of the cost of the batch.
        creating = getattr(_thread, "creating", False)
        fetching = None if creating or fetching_now() else current()
        if fetching is not None:
            time_transforms(dataset)
        _thread.creating = True
        try:
            fetcher = original(kind, dataset, *args, **kwargs)
        finally:
            _thread.creating = creating
        if fetching is not None:
            fetcher.collate_fn = timed("collate", fetcher.collate_fn)
            fetcher.fetch = functools.partial(fetching.fetch, fetcher.fetch)
        return fetcher

    kinds.create_fetcher = staticmethod(create_fetcher)


def time_transforms(dataset: Any) -> None:
    """Time the transforms of a dataset and of the datasets within."""
    alike: Counter[type] = Counter()
    for holder, key, stage in list(stages_of(dataset)):
        kind = type(stage)
        if kind.__module__ in ("builtins", "functools"):
            wrapped = timed(function_name(stage), stage)
            if isinstance(holder, list):
                holder[key] = wrapped
            else:
                setattr(holder, key, wrapped)
            continue
        alike[kind] += 1
        _names.setdefault(id(stage), (f"{kind.__name__} {alike[kind]}".removesuffix(" 1"), stage))
        with contextlib.suppress(TypeError):  # a class written in C cannot be patched
            kind.__call__ = timed("", kind.__call__)


_names: dict[int, tuple[str, Any]] = {}
"""By id: the name of a transform, and itself, so that its id is not reused."""


def timed(name: str, function: Callable[..., Any]) -> Any:
    """Wrap a function to time it as a stage during a fetch.

    Args:
        name: of the stage; empty if `function` is the `__call__` of a class, whose objects have names.
        function: returned unchanged if already timed.
    """
    if hasattr(function, "stoker_timed"):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if (fetching := fetching_now()) is None:
            return function(*args, **kwargs)
        own = name or _names.get(id(args[0]), (type(args[0]).__name__,))[0]
        return fetching.stage(own, function, args, kwargs)

    functools.update_wrapper(call, function, updated=())
    call.stoker_timed = True  # type: ignore[attr-defined]
    return call


def stages_of(
    holder: Any, inside: bool = False, depth: int = 0, seen: set[int] | None = None
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (holder, attribute or index, transform) of a dataset, or of a transform if `inside`."""
    seen = set() if seen is None else seen
    if id(holder) in seen or depth > DEPTH or not hasattr(holder, "__dict__"):
        return
    seen.add(id(holder))
    dataset_class = sys.modules["torch.utils.data.dataset"].Dataset
    for key, value in {**vars(holder), **(vars(holder).get("_modules") or {})}.items():
        if not inside and (key in WRAPPED or isinstance(value, dataset_class)):
            for one in value if isinstance(value, list | tuple) else [value]:
                yield from stages_of(one, False, depth + 1, seen)
        elif is_transform(key, value) or (inside and isinstance(value, list)):
            places = enumerate(value) if isinstance(value, list) else [(key, value)]
            for at, one in list(places):
                if callable(one) and not isinstance(one, type):
                    yield value if isinstance(value, list) else holder, at, one
                    yield from stages_of(one, True, depth + 1, seen)


def is_transform(key: str, value: Any) -> bool:
    """Whether an attribute is a transform, by its name or its module."""
    made_by = type(value).__module__
    named = "transform" in key.lower() or "augment" in key.lower()
    return named or made_by.startswith(("torchvision.transforms", "albumentations"))


def function_name(function: Any) -> str:
    """`resize`, or `lambda (train.py:12)`."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if name == "<lambda>" and code is not None:
        return f"lambda ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return str(name)


def time_decoders() -> None:
    """Time the decoders of the imported libraries."""
    for module, paths in DECODERS.items():
        for path in paths if module in sys.modules else ():
            *outer, name = path.split(".")
            owner = functools.reduce(getattr, outer, sys.modules[module])
            if hasattr(owner, name):
                setattr(owner, name, timed("decode", getattr(owner, name)))


def first_length(data: Any) -> int | None:
    """First dimension of the first tensor or array in a batch."""
    if hasattr(data, "shape"):
        return int(data.shape[0]) if len(data.shape) else None
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list | tuple):
        return next((n for n in map(first_length, data[:8]) if n is not None), None)
    return None


def queued_s() -> float:
    """Seconds that this thread waited for a CPU; 0 if unknown."""
    try:
        with open("/proc/thread-self/schedstat") as file:  # noqa: PTH123 - read for every batch
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
