"""Train worker (rank 0) and head: what a checkpoint holds, and which one is the newest that is whole.

step-00000123/
    model.safetensors    the weights
    ema.safetensors      their moving average, where there is one
    state.pt             optimiser, scheduler, scaler, and per rank: random states, running sums
    meta.json            epoch, step, data position, metrics, configuration, history
    manifest.json        SHA-256 of each of them, written last
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stoker.training.store import FULL, Store, name_of, step_of, verify, write_manifest

WEIGHTS, EMA, STATE, META = "model.safetensors", "ema.safetensors", "state.pt", "meta.json"
BEST = "best.json"


@dataclass(frozen=True)
class Content:
    """Train worker: all of a checkpoint, tensors on the CPU."""

    weights: dict[str, Any]
    state: dict[str, Any]
    """Plain values and tensors only: it is read back with `weights_only`."""
    meta: dict[str, Any]
    """JSON; `step` names the checkpoint."""
    ema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Every host: a whole checkpoint and what it says of itself."""

    store: Store
    name: str
    meta: dict[str, Any]

    @property
    def path(self) -> str:
        """Folder or URI."""
        return f"{self.store.where.rstrip('/')}/{self.name}"


def save(store: Store, content: Content) -> Checkpoint:
    """Train worker (rank 0, the writer's thread): write a checkpoint; it is valid only when it is whole.

    Raises:
        OSError: naming the checkpoint and its disk; earlier checkpoints stay as they are.
    """
    import torch
    from safetensors.torch import save_file

    name = name_of(content.meta["step"])
    draft = None
    try:
        draft = store.draft()
        save_file(content.weights, draft / WEIGHTS)
        if content.ema is not None:
            save_file(content.ema, draft / EMA)
        torch.save(content.state, draft / STATE)
        (draft / META).write_text(json.dumps(content.meta, indent=1))
        write_manifest(draft)
        store.publish(draft, name)
    except Exception as error:
        # What safetensors and torch say of a full disk does not tell: the disk does, with the draft on it.
        cause, disk = " ".join(str(error).split()) or type(error).__name__, store.free_text()
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        parts = [disk, cause] if disk.endswith(FULL) else [cause, disk]
        raise OSError(
            f"cannot write the checkpoint {store.where.rstrip('/')}/{name}: {'; '.join(filter(None, parts))}"
        ) from error
    return Checkpoint(store, name, content.meta)


def newest_valid(store: Store, log: Callable[[str], Any] | None = None) -> Checkpoint | None:
    """Every host: the newest checkpoint whose files are whole; says why others were passed over."""
    for name in store.names():
        problem = verify(store, name)
        if problem is None:
            return describe(store, name)
        if log:
            log(f"checkpoint {name} is passed over: {problem}")
    return None


def describe(store: Store, name: str) -> Checkpoint:
    """Every host: a checkpoint with its `meta.json`, unchecked.

    Raises:
        OSError: this host does not see it.
    """
    try:
        return Checkpoint(store, name, json.loads(store.read(name, META)))
    except FileNotFoundError:
        raise OSError(
            f"{store.where}/{name}: not on this host; with several hosts that train, checkpoint.dir must"
            " be a folder that they share, or s3://"
        ) from None


def read_plain(file: Any, where: str) -> Any:
    """Train worker: what `torch.save` has written of plain values and tensors, on the CPU.

    Args:
        file: a path or an open file.
        where: names it in errors.

    Raises:
        OSError: it holds anything else, which could run code; nothing of it was executed.
    """
    import pickle

    import torch

    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        found = re.search(r"GLOBAL (\w+\.[\w.]+)", str(error))
        raise OSError(
            f"{where}: holds {found[1] if found else 'more'} besides plain values and tensors, which"
            " could run code: it was not loaded. Remove this checkpoint, and check who may write there"
        ) from None


def load(checkpoint: Checkpoint) -> Content:
    """Train worker: a checkpoint's content, on the CPU.

    Raises:
        OSError: its state holds more than plain values and tensors.
    """
    from safetensors.torch import load_file

    with checkpoint.store.local(checkpoint.name) as folder:
        ema = folder / EMA
        return Content(
            load_file(folder / WEIGHTS),
            read_plain(folder / STATE, f"{checkpoint.path}/{STATE}"),
            checkpoint.meta,
            load_file(ema) if ema.is_file() else None,
        )


@dataclass
class Shelf:
    """Train worker (rank 0): the checkpoints of this run, and which of them stay.

    `newest` are kept to continue from, `top_k` for their metric; the best one becomes the model.
    """

    store: Store
    newest: int
    top_k: int
    """As Lightning has it: 0 keeps none for its metric, -1 all that have one."""
    monitored: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Checkpoint → its metric, mode and value; empty for those in the middle of an epoch."""
    tell: Callable[[str], Any] = print
    """Takes what is worth saying."""
    _told: bool = False

    def fill(self, upto: int) -> None:
        """Take in what an earlier start of this run has left.

        Args:
            upto: the step that was continued from. Later checkpoints were found damaged: they are not
                counted, and replaced when their step comes again.
        """
        for name in self.store.names():
            if step_of(name) <= upto:
                with contextlib.suppress(OSError, ValueError):
                    self.monitored[name] = describe(self.store, name).meta["monitored"] or {}

    def best(self) -> list[str]:
        """Those that stay for their metric, the best first; of equals the earlier."""
        having = [name for name, entry in self.monitored.items() if entry]
        if not having:
            return []
        # A run that goes on may watch another metric than before: those values do not compare.
        watched = self.monitored[max(having, key=step_of)]
        sign = -1.0 if watched["mode"] == "max" else 1.0
        ranked = sorted(
            (sign * self.monitored[name]["value"], step_of(name), name)
            for name in having
            if self.monitored[name]["metric"] == watched["metric"]
        )
        names = [name for _, _, name in ranked]
        return names if self.top_k < 0 else names[: self.top_k]

    def add(self, saved: Checkpoint) -> None:
        """Take in a new checkpoint, remove what need not stay, note the best for whoever looks."""
        self.monitored[saved.name] = saved.meta["monitored"] or {}
        best = self.best()
        newest = sorted(self.monitored, key=step_of, reverse=True)[: self.newest]
        for name in [n for n in self.monitored if n not in best and n not in newest]:
            del self.monitored[name]
            self._remove(name)
        if best:
            first = self.monitored[best[0]]
            ranks = {name: self.monitored[name]["value"] for name in best}
            note = {"checkpoint": best[0], **first, "best_k": ranks}
            self.store.write_note(BEST, json.dumps(note, indent=1))

    def _remove(self, name: str) -> None:
        """A checkpoint too many costs room, not the run: said once, as every later one meets the same."""
        try:
            self.store.remove(name)
        except OSError as error:
            if not self._told:
                self._told = True
                cause = " ".join(str(error).split())[:300]
                self.tell(
                    f"the checkpoint {name} in {self.store.where} could not be removed ({cause}); training"
                    " goes on, and old checkpoints stay: allow the job to delete there (on S3:"
                    " s3:DeleteObject, docs/iam), or make room yourself (this is said once)"
                )
