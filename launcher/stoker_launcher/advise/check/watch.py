"""Script's process: `python watch.py FOLDER STEPS SCRIPT [arguments]`.

Runs a training script like `python SCRIPT`, records every next() of every loader once torch is imported, and
ends the script after enough steps. STEPS is a number or `auto`. Wraps the iterators that torch's
`DataLoader.__iter__` returns, which subclasses and the loaders of Accelerate and Lightning call, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import runpy
import signal
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
from stoker.hosts.machine import cpus
from stoker_launcher.advise.check.fetching import Fetching, WorkerStart, observe_next_fetcher
from stoker_launcher.advise.check.timeline import Loader, Take, enough, steps_of, training

RESULT = "result.json"
UNTRAINED_S = 30.0
"""Without optimizer steps, a loader counts as the training loader after this time."""
LOOK_S = 0.2


class GpuClock:
    """Timestamps on the current CUDA stream, without synchronising steps.

    An event recorded before next() completes once the GPU has finished all earlier work. The time between it
    and the event after next() is the time that the GPU waited, however far ahead of it the script runs.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        torch.cuda.synchronize()
        self.zero, self.base = time.monotonic(), self.mark()
        self.name = str(torch.cuda.get_device_name())

    def mark(self) -> Any:
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Any, wait: bool) -> float | None:
        """An event on this process's clock; None, unless `wait`, if the GPU has not reached it."""
        if isinstance(moment, float):
            return moment
        if wait:
            moment.synchronize()
        elif not moment.query():
            return None
        return self.zero + float(self.base.elapsed_time(moment)) / 1000


class Watch:
    def __init__(self, folder: Path, wanted: int | None) -> None:
        self.folder, self.wanted = folder, wanted
        self.loaders: list[Loader] = []
        self.takes: list[Take] = []
        self.fetchings: list[Fetching] = []
        """One per loader, for what this process fetches itself."""
        self.clock: GpuClock | None = None
        self.since_step: dict[int, int] = {}
        """Thread that took batches of each loader since the last optimizer step."""
        self.next_look = time.monotonic()
        self.process = os.getpid()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._same: dict[tuple[Any, ...], int] = {}
        self._datasets: list[Any] = []
        """So that their ids are not reused."""
        self._lock = threading.RLock()
        self._thread = threading.local()

    def observe(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import DataLoader

        register_optimizer_step_post_hook(self.stepped)
        watch, original = self, DataLoader.__iter__

        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            if watch.nested():
                return original(loader)
            number = watch.number(loader)
            watch.loaders[number].epochs += 1
            # Before workers start, which need it.
            if getattr(loader, "num_workers", 0):
                with contextlib.suppress(AttributeError):  # of a subclass that has it as a property
                    loader.worker_init_fn = WorkerStart(watch.folder, number, loader.worker_init_fn)
            restore = observe_next_fetcher(watch.fetchings[number])
            try:
                iterator = original(loader)
            finally:
                restore()
            return Observed(iterator, watch, number)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def nested(self) -> bool:
        """Whether this is a loader within a dataset, here or in a forked worker."""
        return getattr(self._thread, "inside", False) or os.getpid() != self.process

    def number(self, loader: Any) -> int:
        """Index of a loader; a loader that is recreated in each epoch keeps its index."""
        with self._lock:
            if loader not in self._numbers:
                places, dataset = user_places(), getattr(loader, "dataset", None)
                key = (tuple(places), id(dataset))
                if key not in self._same:
                    number = self._same[key] = len(self.loaders)
                    self._datasets.append(dataset)
                    self.loaders.append(describe_loader(loader, places))
                    file = self.folder / f"fetch-{number}-{os.getpid()}.json"
                    self.fetchings.append(Fetching(file, number, own_clock))
                self._numbers[loader] = self._same[key]
            return self._numbers[loader]

    def take(self, number: int, following: Callable[[], Any]) -> Any:
        if self.nested():
            return following()
        self.look()
        asked, ended, self._thread.inside = self.now(), True, True
        try:
            data = following()
            ended = False
            return data
        finally:
            self._thread.inside = False
            self.note(number, asked, self.now(), ended)
            if not ended:
                self.size(self.loaders[number], data)

    def note(self, number: int, asked: Any, got: Any, ended: bool) -> None:
        torch: Any = sys.modules["torch"]
        loader = self.loaders[number]
        with self._lock:
            last = next((t for t in reversed(self.takes) if t.loader == number), None)
            place = last.number + 1 if last and last.epoch == loader.epochs else 0
            self.takes.append(Take(number, loader.epochs, place, asked, got, ended))
            if ended:
                return
            loader.batches += 1
            if torch.is_grad_enabled():
                self.since_step[number] = threading.get_ident()

    def stepped(self, *_: Any) -> None:
        """Batches since the last step belong to this one; several optimizers, as in a GAN, count once."""
        for number, thread in self.since_step.items():
            self.loaders[number].trained += thread == threading.get_ident()
        self.since_step.clear()

    def size(self, loader: Loader, data: Any) -> None:
        if not loader.samples:
            loader.samples = loader.batch_size or first_length(data) or 1
            loader.batch_bytes = bytes_of(data)

    def now(self) -> Any:
        """Timestamp, taken on the GPU if there is one, to avoid a synchronisation."""
        torch: Any = sys.modules["torch"]
        if self.clock is None and torch.cuda.is_initialized():
            self.clock = GpuClock(torch)
        return self.clock.mark() if self.clock else time.monotonic()

    def look(self) -> None:
        began = time.monotonic()
        if began < self.next_look:
            return
        if self.seen_enough():
            self.end("enough")
        self.next_look = began + max(LOOK_S, 50 * (time.monotonic() - began))

    def seen_enough(self) -> bool:
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
        for i, take in enumerate(self.takes):
            asked, got = (self.clock.seconds(moment, wait) for moment in (take.asked, take.got))
            if asked is None or got is None:
                return self.takes[:i]
            take.asked, take.got = asked, got
        return self.takes

    def end(self, how: str) -> None:
        """End the script at once: it could catch an exception, and the launcher ends its workers."""
        if os.getpid() == self.process:  # not a forked worker, which has this handler of SIGINT
            self.finish(how)
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)

    def finish(self, how: str, said: str = "") -> None:
        for own in self.fetchings:
            if own.batches > 0:
                own.write()
        found = {
            "ended": how,
            "said": said,
            "loaders": [asdict(loader) for loader in self.loaders],
            "takes": [asdict(take) for take in self.resolved(wait=True)],
            "gpu": self.clock.name if self.clock else None,
            "cpus": cpus(),
        }
        draft = self.folder / f"{RESULT}.draft"
        draft.write_text(json.dumps(found))
        draft.replace(self.folder / RESULT)


class Observed:
    def __init__(self, iterator: Any, watch: Watch, number: int) -> None:
        self._iterator, self._watch, self._number = iterator, watch, number

    def __iter__(self) -> Observed:
        return self

    def __next__(self) -> Any:
        return self._watch.take(self._number, self._iterator.__next__)

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def describe_loader(loader: Any, places: list[str]) -> Loader:
    return Loader(
        place=places[0] if places else "?",
        dataset=type(getattr(loader, "dataset", None)).__name__,
        batch_size=getattr(loader, "batch_size", None),
        num_workers=int(getattr(loader, "num_workers", 0) or 0),
        prefetch=int(getattr(loader, "prefetch_factor", 0) or 0),
        ours=any(kind.__module__.startswith("stoker.") for kind in type(loader).__mro__),
    )


def user_places() -> list[str]:
    own = (Path(__file__).parents[1], Path(stoker.__file__).parent, Path(threading.__file__).parent)
    others = (*map(str, own), "<")
    found = [
        f for f in reversed(traceback.extract_stack()[:-2]) if not f.filename.startswith(others)
    ]
    return [
        f"{Path(f.filename).name}:{f.lineno}" for f in found if "site-packages" not in f.filename
    ]


def own_clock() -> float:
    """CPU seconds of fetching in this process.

    With a GPU, counts all threads, because decoders use several. Without one, counts this thread only:
    threads that train on the CPU spin after each step.
    """
    torch: Any = sys.modules["torch"]
    return time.process_time() if torch.cuda.is_initialized() else time.thread_time()


def first_length(data: Any) -> int | None:
    if hasattr(data, "shape"):
        return int(data.shape[0]) if len(data.shape) else None
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list | tuple):
        return next((n for n in map(first_length, data[:8]) if n is not None), None)
    return None


def bytes_of(data: Any) -> int:
    if hasattr(data, "nbytes"):
        return int(data.nbytes)
    if isinstance(data, str | bytes):
        return len(data)
    if isinstance(data, Mapping):
        data = list(data.values())
    return sum(map(bytes_of, data)) if isinstance(data, list | tuple) else 0


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls a function once `torch` is imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self.then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main(folder: str, steps: str, script: str, *arguments: str) -> int:
    """Run the script; returns its exit code, and does not return after enough steps."""
    watch = Watch(Path(folder), None if steps == "auto" else int(steps))
    # `check` ends the script by SIGINT, which a shell's background jobs inherit as ignored.
    signal.signal(signal.SIGINT, lambda *_: watch.end("interrupted"))
    sys.meta_path.insert(0, AfterTorch(watch.observe))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
        watch.finish("finished")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        watch.finish("failed" if code else "finished", f"exit code {code}" if code else "")
    except BaseException as error:
        # Print the traceback as Python does, without our frames.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != script:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        watch.finish("failed", said.rstrip(": "))
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
