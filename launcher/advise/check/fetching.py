"""Loader's workers and script's process: measures CPU seconds per batch, by transform.

Times torch's fetcher (`__getitem__` of every index, then `collate_fn`) and, within it, the dataset's
transforms and well-known decoders. Sums go to one file per process, because workers may be killed any time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

WRITE_S = 0.5
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
DRAWS = ("random", "jitter", "augment", "trivial", "augmix", "erasing", "elastic", "mixup", "cutmix", "noise")
"""Words in the names of random transforms."""
_now = threading.local()


class Fetching:
    """Loader's worker: the cost of one loader's batches in this process."""

    def __init__(self, file: Path, loader: int, clock: Callable[[], float]) -> None:
        self.file, self.loader, self.clock = file, loader, clock
        self.calls = 0
        self.first: dict[str, Any] = {}
        self.sums = dict.fromkeys(("fetches", "samples", "cpu_s", "wall_s", "delay_s"), 0.0)
        self.stages: dict[str, float] = {}
        self.pending: dict[str, float] = {}
        self.inner = 0.0
        self.written = 0.0

    def fetch(self, original: Callable[[Any], Any], index: Any) -> Any:
        """Time a batch; the first one is counted separately, because it imports modules and opens files."""
        if self.calls < 2:
            time_decoders()
        self.pending, self.inner = {}, 0.0
        started = time.monotonic(), self.clock(), queued_s()
        _now.fetching = self
        try:
            data = original(index)
        finally:
            _now.fetching = None
        wall, cpu, delay = time.monotonic() - started[0], self.clock() - started[1], queued_s() - started[2]
        self.pending["__getitem__"] = max(cpu - self.inner, 0.0)
        counted: dict[str, float] = {"fetches": 1, "samples": rows(index, data)}
        counted |= {"cpu_s": cpu, "wall_s": wall, "delay_s": min(delay, max(wall - cpu, 0.0))}
        self.calls += 1
        if self.calls == 1:
            self.first = {**counted, "stages": self.pending}
        else:
            self.sums = {name: self.sums[name] + counted[name] for name in self.sums}
            for name, spent in self.pending.items():
                self.stages[name] = self.stages.get(name, 0.0) + spent
        if self.calls < 3 or time.monotonic() - self.written > WRITE_S:
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
            self.pending[name] = self.pending.get(name, 0.0) + max(spent - self.inner, 0.0)
            self.inner = outer + spent

    def write(self) -> None:
        """Write atomically, because the file may be read at any time."""
        self.written = time.monotonic()
        running = self.sums["fetches"] > 0
        sums = {**self.sums, "stages": self.stages} if running else {**self.first, "first": True}
        draft = self.file.with_suffix(".draft")
        try:
            draft.write_text(json.dumps({"loader": self.loader, **sums}))
            draft.replace(self.file)
        except OSError:
            return  # The check has ended and removed its folder.


torch_loop: Callable[..., None] | None = None
"""torch's worker loop, once replaced in this process or in its parent before a fork."""


def worker_loop(folder: str, loader: int, *args: Any, **kwargs: Any) -> None:
    """Loader's worker: run torch's worker loop with observed fetchers, forked or spawned."""
    from torch.utils.data._utils.worker import _worker_loop
    from torch.utils.data.dataloader import _DatasetKind

    fetching = Fetching(Path(folder) / f"fetch-{loader}-{os.getpid()}.json", loader, time.process_time)
    observe_fetchers(_DatasetKind, lambda: fetching)
    try:
        (torch_loop or _worker_loop)(*args, **kwargs)
    finally:
        if fetching.calls:
            fetching.write()


def observe_fetchers(kinds: Any, current: Callable[[], Fetching | None]) -> None:
    """Loader's worker and script's process: time every fetcher that torch creates from now on.

    Args:
        kinds: torch's `_DatasetKind`.
        current: returns the counter for the next fetcher.
    """
    original = getattr(kinds.create_fetcher, "__wrapped__", kinds.create_fetcher)

    @functools.wraps(original)
    def create_fetcher(kind: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        # A loader within a dataset is part of the cost of the batch.
        creating = getattr(_now, "creating", False)
        fetching = None if creating or getattr(_now, "fetching", None) else current()
        if fetching is not None:
            time_transforms(dataset)
        _now.creating = True
        try:
            fetcher = original(kind, dataset, *args, **kwargs)
        finally:
            _now.creating = creating
        if fetching is not None:
            fetcher.collate_fn = timed("collate", fetcher.collate_fn)
            fetcher.fetch = functools.partial(fetching.fetch, fetcher.fetch)
        return fetcher

    kinds.create_fetcher = staticmethod(create_fetcher)


def timed(name: str, function: Callable[..., Any], names: dict[int, str] | None = None) -> Any:
    """Loader's worker: wrap a function to time it as a stage during a fetch.

    Args:
        name: name of the stage.
        function: function to wrap; returned unchanged if already timed.
        names: names of the objects by id, if `function` is the `__call__` of their class.
    """
    if getattr(function, "stoker_timed", False):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        fetching: Fetching | None = getattr(_now, "fetching", None)
        if fetching is None:
            return function(*args, **kwargs)
        return fetching.stage(names.get(id(args[0]), name) if names else name, function, args, kwargs)

    functools.update_wrapper(call, function, updated=())
    call.stoker_timed = True  # type: ignore[attr-defined]
    return call


_names: dict[int, str] = {}
_kept: list[Any] = []
"""References to the named transforms, so that their ids are not reused."""


def time_transforms(dataset: Any) -> None:
    """Loader's worker: find and time the transforms of a dataset and its wrapped datasets."""
    alike: Counter[type] = Counter()
    for holder, key, stage in list(stages_of(dataset)):
        cls = type(stage)
        if cls.__module__ in ("builtins", "functools"):
            wrapped = timed(function_name(stage), stage)
            if isinstance(holder, list):
                holder[key] = wrapped
            else:
                setattr(holder, key, wrapped)
            continue
        alike[cls] += 1
        if id(stage) not in _names:
            _kept.append(stage)
            _names[id(stage)] = f"{cls.__name__} {alike[cls]}" if alike[cls] > 1 else cls.__name__
        with contextlib.suppress(TypeError):  # a class written in C cannot be patched
            cls.__call__ = timed(cls.__name__, cls.__call__, _names)


def stages_of(dataset: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Loader's worker: yield (holder, attribute or index, transform)."""
    seen: set[int] = set()
    dataset_class = sys.modules["torch.utils.data.dataset"].Dataset

    def visit(holder: Any, inside: bool, depth: int) -> Iterator[tuple[Any, Any, Any]]:
        if id(holder) in seen or depth > DEPTH or not hasattr(holder, "__dict__"):
            return
        seen.add(id(holder))
        for key, value in {**vars(holder), **(vars(holder).get("_modules") or {})}.items():
            if (key in WRAPPED or isinstance(value, dataset_class)) and not inside:
                for one in value if isinstance(value, list | tuple) else [value]:
                    yield from visit(one, False, depth + 1)
            elif isinstance(value, list) and (inside or is_transform(key, value)):
                for number, one in enumerate(value):
                    if callable(one) and not isinstance(one, type):
                        yield value, number, one
                        yield from visit(one, True, depth + 1)
            elif callable(value) and is_transform(key, value) and not isinstance(value, type):
                yield holder, key, value
                yield from visit(value, True, depth + 1)

    yield from visit(dataset, False, 0)


def is_transform(key: str, value: Any) -> bool:
    """Loader's worker: whether an attribute is a transform, by its name or its module."""
    made_by = type(value).__module__
    return (
        "transform" in key.lower()
        or "augment" in key.lower()
        or made_by.startswith(("torchvision.transforms", "albumentations"))
    )


def function_name(function: Any) -> str:
    """Loader's worker: `resize`, or `lambda (train.py:12)`."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if name == "<lambda>" and code is not None:
        return f"lambda ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return str(name)


def time_decoders() -> None:
    """Loader's worker: time the decoders of the imported libraries."""
    for module, paths in DECODERS.items():
        if (holder := sys.modules.get(module)) is None:
            continue
        for path in paths:
            *outer, name = path.split(".")
            owner = functools.reduce(getattr, outer, holder)
            if hasattr(owner, name):
                setattr(owner, name, timed("decode", getattr(owner, name)))


def draws(stage: str) -> bool:
    """Anywhere: guess from its name whether a transform is random."""
    return any(word in stage.lower() for word in (*DRAWS, "lambda", "dropout", "gaussianblur"))


def rows(index: Any, data: Any) -> int:
    """Loader's worker: number of samples of a fetch: its indices, or the rows of its result."""
    return len(index) if isinstance(index, list | tuple) else first_length(data) or 1


def first_length(data: Any) -> int | None:
    """Script's process: first dimension of the first tensor or array in a batch."""
    if hasattr(data, "shape"):
        return int(data.shape[0]) if len(data.shape) else None
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list | tuple):
        return next((n for n in map(first_length, data[:8]) if n is not None), None)
    return None


def queued_s() -> float:
    """Loader's worker: seconds that this thread waited for a CPU; 0 if unknown."""
    try:
        with open("/proc/thread-self/schedstat") as file:  # noqa: PTH123 - read for every batch
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
