"""Train worker (rank 0) and head: what a checkpoint holds, and which one is the newest that is whole.

step-00000123/
    model.safetensors    the weights
    ema.safetensors      their moving average, where there is one
    state.pt             optimiser, scheduler, scaler, and per rank: random states, running sums
    meta.json            epoch, step, data position, metrics, configuration, history
    manifest.json        SHA-256 of each of them, written last
    outcome.json         what validation has added since: metrics, history, early stopping

A checkpoint at the end of an epoch is written before the epoch is validated. Until its outcome is there
its `meta.json` says so under `pending`, and a run that goes on from it validates first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stoker.storage.checkpoint_store import FULL, Store, name_of, step_of, verify, write_manifest

WEIGHTS, EMA, STATE, META = "model.safetensors", "ema.safetensors", "state.pt", "meta.json"
OUTCOME = "outcome.json"
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

    @property
    def pending(self) -> dict[str, Any] | None:
        """The epoch that was trained but not validated: epoch, metrics, books, whole; None: there is none."""
        found: dict[str, Any] | None = self.meta.get("pending")
        return found

    @property
    def position(self) -> dict[str, Any]:
        """Where the data goes on: with the validation that is missing, if one is."""
        return {**self.meta["position"], "unvalidated": self.pending and self.pending["epoch"]}


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


def add_outcome(saved: Checkpoint, outcome: dict[str, Any]) -> Checkpoint:
    """Train worker (rank 0, the writer's thread): complete a checkpoint by what validation has found.

    Args:
        saved: it stays as it is, but for one more file.
        outcome: replaces keys of its `meta.json`.

    Raises:
        OSError: the file cannot be written.
    """
    outcome = json.loads(json.dumps(outcome))
    content = {"outcome": outcome, "sha256": _digest(outcome)}
    saved.store.add(saved.name, OUTCOME, json.dumps(content, indent=1))
    return Checkpoint(saved.store, saved.name, {**saved.meta, **outcome})


def awaiting(saved: Checkpoint, max_steps: int | None) -> Checkpoint:
    """Every host: a checkpoint as a run goes on from it.

    Where max_steps ended an epoch early, the epoch was to be validated as it was; if training may now go on,
    it is validated at its end.
    """
    cut_short = saved.pending is not None and not saved.pending["whole"]
    if cut_short and (max_steps is None or saved.meta["step"] < max_steps):
        return Checkpoint(saved.store, saved.name, {**saved.meta, "pending": None})
    return saved


def _digest(outcome: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(outcome).encode()).hexdigest()


def problem_of(store: Store, name: str) -> str | None:
    """Every host: why nothing can go on from a checkpoint; None where it is whole and finite.

    Raises:
        OSError: an S3 place that cannot be reached; that says nothing about the checkpoint.
    """
    problem = verify(store, name)
    if problem is not None or describe(store, name).meta.get("finite"):
        return problem
    # Written by a version that did not look.
    from stoker.checkpoints.tensors import non_finite

    content = load(describe(store, name))
    found = non_finite(content.weights, content.ema, content.state.get("optimizer"))
    return f"its {found} hold NaN or infinity" if found else None


def newest_valid(store: Store, log: Callable[[str], Any] | None = None) -> Checkpoint | None:
    """Every host: the newest checkpoint that is whole and finite; says why others were passed over."""
    for name in store.names():
        problem = problem_of(store, name)
        if problem is None:
            return describe(store, name)
        if log:
            log(f"checkpoint {name} is passed over: {problem}")
    return None


def describe(store: Store, name: str) -> Checkpoint:
    """Every host: a checkpoint with its `meta.json` and its outcome, unchecked.

    Raises:
        OSError: this host does not see it.
    """
    try:
        meta = json.loads(store.read(name, META))
    except FileNotFoundError:
        raise OSError(
            f"{store.where}/{name}: not on this host; with several hosts that train, checkpoint.dir must"
            " be a folder that they share, or s3://"
        ) from None
    # One that is absent or cut short is made again: by validating.
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        added = json.loads(store.read(name, OUTCOME))
        if _digest(added["outcome"]) == added["sha256"]:
            meta |= added["outcome"]
    return Checkpoint(store, name, meta)


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
class Retention:
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
                    self._note(describe(self.store, name))

    def _note(self, saved: Checkpoint) -> None:
        """A metric that is not finite is no metric: nothing compares with it."""
        entry = saved.meta["monitored"] or {}
        self.monitored[saved.name] = entry if math.isfinite(entry.get("value", math.nan)) else {}

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
        """Take in a checkpoint or its outcome, remove what need not stay, note the best for whoever looks."""
        self._note(saved)
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
