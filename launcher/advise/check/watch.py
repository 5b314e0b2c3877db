"""Script's process: records every next() of every loader, and ends the script after enough steps.

Patches torch's `DataLoader.__iter__` and iterators in this process, not the script. Subclasses and the
loaders of Accelerate and Lightning use these, too; any other iterator is wrapped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import stoker
from launcher.advise.check import fetching
from launcher.advise.check.fetching import Fetching, first_length, observe_fetchers
from launcher.advise.check.gpu_clock import GpuClock
from launcher.advise.check.timeline import Loader, Take, enough, steps_of, training
from stoker.hosts.machine import cpu_times, cpus

RESULT = "result.json"
SIZED = 20
"""Number of batches whose samples and bytes are counted."""
UNTRAINED_S = 30.0
"""Without optimizer steps, a loader counts as the training loader after this time."""
LOOK_S = 0.2
IGNORED = 3
"""How often a script may swallow the exception that ends it."""


class Enough(BaseException):
    """Script's process: ends the script; a BaseException, so that `except Exception` does not catch it."""


class Watch:
    """Script's process: observations of its loaders."""

    def __init__(self, folder: Path, wanted: int | None) -> None:
        self.folder, self.wanted = folder, wanted
        self.loaders: list[Loader] = []
        self.takes: list[Take] = []
        self.clock: GpuClock | None = None
        self.since_step: set[int] = set()
        self.threads: dict[int, int] = {}
        self.rounds = 0
        self.begun: dict[int, int] = {}
        """Round in which the first batch of each loader was trained."""
        self.hooked = self.over = False
        self.next_look = time.monotonic()
        self.own_s = 0.0
        """Overhead of observing, excluded from steps."""
        self.process = os.getpid()
        self.raised = 0
        self.cpu: list[tuple[float, float]] = []
        self.fetchings: list[Fetching] = []
        self.fetching: Fetching | None = None
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._same: dict[tuple[Any, ...], int] = {}
        self._datasets: list[Any] = []
        self._lock = threading.RLock()
        self._thread = threading.local()

    @property
    def _inside(self) -> bool:
        """Whether this thread is already in a next()."""
        return getattr(self._thread, "inside", False)

    @_inside.setter
    def _inside(self, inside: bool) -> None:
        self._thread.inside = inside

    def observe(self, module: Any) -> None:
        """Patch the newly imported `torch.utils.data.dataloader`."""
        watch, base = self, module._BaseDataLoaderIter
        original_init, original_next = base.__init__, base.__next__
        original_iter = module.DataLoader.__iter__
        fetching.torch_loop = module._utils.worker._worker_loop

        @functools.wraps(original_init)
        def init(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            number = watch.number(loader)
            iterator.stoker_loader = number
            file = watch.folder / f"fetch-{number}-{os.getpid()}.json"
            watch.fetching = next((f for f in watch.fetchings if f.loader == number), None)
            if watch.fetching is None:
                watch.fetching = Fetching(file, number, own_clock)
                watch.fetchings.append(watch.fetching)
            # Set before the constructors of subclasses start workers, which need it.
            worker_loop = functools.partial(fetching.worker_loop, str(watch.folder), number)
            module._utils.worker._worker_loop = worker_loop
            original_init(iterator, loader, *args, **kwargs)

        @functools.wraps(original_next)
        def take(iterator: Any) -> Any:
            return watch.take(getattr(iterator, "stoker_loader", None), lambda: original_next(iterator))

        @functools.wraps(original_iter)
        def iterate(loader: Any) -> Any:
            number, started = watch.number(loader), time.monotonic()
            iterator = original_iter(loader)
            watch.loaders[number].starts.append(time.monotonic() - started)
            return iterator if isinstance(iterator, base) else Observed(iterator, watch, number)

        base.__init__, base.__next__, module.DataLoader.__iter__ = init, take, iterate
        # For fetchers in this process only; workers set it in their loop.
        observe_fetchers(module._DatasetKind, lambda: watch.fetching)

    def number(self, loader: Any) -> int:
        """Index of a loader; a loader that is recreated in each epoch keeps its index."""
        with self._lock:
            if loader in self._numbers:
                return self._numbers[loader]
            places = user_places()
            dataset = getattr(loader, "dataset", None)
            key = (tuple(places), id(dataset))
            if key not in self._same:
                self._same[key] = len(self.loaders)
                self._datasets.append(dataset)  # so that its id is not reused
                self.loaders.append(about(loader, dataset, places))
            self._numbers[loader] = self._same[key]
            return self._same[key]

    def take(self, number: int | None, following: Callable[[], Any]) -> Any:
        """Time a next()."""
        if number is None or self._inside or os.getpid() != self.process:
            return following()  # a nested loader, or one in a worker
        began = time.monotonic()
        self.look()
        self.own_s += time.monotonic() - began
        loader = self.loaders[number]
        asked, ended, self._inside = self.now(), True, True
        try:
            data = following()
            ended = False
            return data
        finally:
            self._inside = False
            got, began = self.now(), time.monotonic()
            self.note(number, asked, got, ended)
            if not ended:
                self.size(loader, data)
            self.own_s += time.monotonic() - began

    def note(self, number: int, asked: Any, got: Any, ended: bool) -> None:
        """Record a take with its index in the epoch."""
        loader = self.loaders[number]
        epoch = max(len(loader.starts) - 1, 0)
        with self._lock:
            last = next((t for t in reversed(self.takes) if t.loader == number), None)
            place = last.number + 1 if last and last.epoch == epoch else 0
            self.takes.append(Take(number, epoch, place, asked, got, ended))
            if ended:
                return
            loader.batches += 1
            torch: Any = sys.modules["torch"]
            loader.with_grad += torch.is_grad_enabled()
            self.threads[number] = threading.get_ident()
            if torch.is_grad_enabled():
                self.since_step.add(number)
            if not self.hooked:
                from torch.optim.optimizer import register_optimizer_step_post_hook

                register_optimizer_step_post_hook(self.stepped)
                self.hooked = True
                self.cpu.append(cpu_times())

    def stepped(self, *_: Any) -> None:
        """Attribute the batches since the last optimizer step to this one.

        Several optimizers on the same batches, as in a GAN, count once.
        """
        if not self.since_step:
            return
        self.rounds += 1
        for number in self.since_step:
            loader = self.loaders[number]
            self.begun.setdefault(number, self.rounds)
            loader.trained += 1
            loader.optimizer_steps = self.rounds - self.begun[number] + 1
            loader.in_thread |= self.threads.get(number, threading.get_ident()) != threading.get_ident()
        self.since_step.clear()

    def size(self, loader: Loader, data: Any) -> None:
        """Count samples and bytes of the first few batches."""
        if loader.sized_batches < SIZED:
            loader.sized_batches += 1
            loader.samples += loader.batch_size or first_length(data) or 1
            loader.batch_bytes += bytes_of(data)

    def now(self) -> Any:
        """Timestamp, taken on the GPU if there is one, to avoid a synchronisation."""
        torch: Any = sys.modules["torch"]
        if self.clock is None and torch.cuda.is_initialized():
            self.clock = GpuClock(torch)
        return self.clock.mark() if self.clock else time.monotonic() - self.own_s

    def look(self) -> None:
        """Check periodically whether there are enough steps."""
        if self.over:
            self.raised += 1
            if self.raised > IGNORED:
                os._exit(0)
            raise Enough
        began = time.monotonic()
        if began < self.next_look:
            return
        seen = self.seen_enough()
        took = time.monotonic() - began
        self.next_look = began + max(LOOK_S, 50 * took)
        if seen:
            self.over, self.raised = True, 1
            self.finish("enough")
            if threading.current_thread() is not threading.main_thread():
                os._exit(0)  # an exception would end this thread only
            raise Enough

    def seen_enough(self) -> bool:
        """Whether the training loader has enough steps."""
        of = training(self.loaders)
        if of is None:
            return False
        loader, steps = self.loaders[of], steps_of(self.resolved(wait=False), self.loaders, of)
        if not loader.trains and sum(step.whole for step in steps) < UNTRAINED_S:
            return False
        return loader.ours or enough(steps, loader, self.wanted)

    def resolved(self, wait: bool) -> list[Take]:
        """The takes with timestamps in seconds; unless `wait`, only those that the GPU has reached."""
        if self.clock is None:
            return self.takes
        done = self.clock.resolve([m for t in self.takes for m in (t.asked, t.got)], wait)
        found = []
        for i, take in enumerate(self.takes):
            asked, got = done[2 * i : 2 * i + 2]
            if asked is None or got is None:
                break
            take.asked, take.got = asked, got
            found.append(take)
        return found

    def finish(self, how: str, said: str = "") -> None:
        """Write the observations for the launcher."""
        for own in self.fetchings:
            if own.calls:
                own.write()
        self.cpu.append(cpu_times())
        busy, total = (end - start for start, end in zip(self.cpu[0], self.cpu[-1], strict=True))
        found = {
            "ended": how,
            "said": said,
            "loaders": [asdict(loader) for loader in self.loaders],
            "takes": [asdict(take) for take in self.resolved(wait=True)],
            "gpu": self.clock.name if self.clock else None,
            "cpus": cpus(),
            "idle": 1 - busy / total if total > 0 else None,
        }
        draft = self.folder / f"{RESULT}.draft"
        draft.write_text(json.dumps(found))
        draft.replace(self.folder / RESULT)


class Observed:
    """Script's process: wraps a foreign iterator to observe its next()."""

    def __init__(self, iterator: Any, watch: Watch, number: int) -> None:
        self._iterator, self._watch, self._number = iterator, watch, number

    def __iter__(self) -> Observed:
        return self

    def __next__(self) -> Any:
        return self._watch.take(self._number, self._iterator.__next__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def about(loader: Any, dataset: Any, places: list[str]) -> Loader:
    """Script's process: describe a loader by its attributes, some of which a subclass may lack."""
    length = None
    # Calling len() makes torch warn if an IterableDataset yields more.
    if not isinstance(dataset, sys.modules["torch.utils.data.dataset"].IterableDataset):
        with contextlib.suppress(Exception):  # a user's __len__ may raise
            length = len(loader)
    return Loader(
        place=places[0] if places else "?",
        dataset=type(dataset).__name__,
        batch_size=getattr(loader, "batch_size", None),
        num_workers=int(getattr(loader, "num_workers", 0) or 0),
        prefetch=int(getattr(loader, "prefetch_factor", 0) or 0),
        persistent=bool(getattr(loader, "persistent_workers", False)),
        length=length,
        ours=any(kind.__module__.startswith("stoker.") for kind in type(loader).__mro__),
    )


def user_places() -> list[str]:
    """Script's process: the script's lines on the stack, innermost first."""
    frames = traceback.extract_stack()[:-2]
    own = (Path(__file__).parents[1], Path(stoker.__file__).parent, Path(threading.__file__).parent)
    others = (*map(str, own), "<")
    found = [f for f in reversed(frames) if not f.filename.startswith(others)]
    return [f"{Path(f.filename).name}:{f.lineno}" for f in found if "site-packages" not in f.filename]


def own_clock() -> float:
    """Script's process: CPU seconds of fetching in this process.

    With a GPU, counts all threads, because decoders use several. Without one, counts this thread only:
    threads that train on the CPU spin after each step.
    """
    torch: Any = sys.modules["torch"]
    return time.process_time() if torch.cuda.is_initialized() else time.thread_time()


def bytes_of(data: Any) -> int:
    """Script's process: total bytes of tensors, arrays and strings in a batch."""
    if hasattr(data, "nbytes"):
        return int(data.nbytes)
    if isinstance(data, str | bytes):
        return len(data)
    if isinstance(data, Mapping):
        return sum(map(bytes_of, data.values()))
    return sum(map(bytes_of, data)) if isinstance(data, list | tuple) else 0
