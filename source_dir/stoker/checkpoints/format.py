"""Train worker (rank 0) and head: the contents of a checkpoint, and how to find the newest valid one.

step-00000123/
    model.safetensors    the weights
    ema.safetensors      their moving average, if any
    state.pt             optimiser, scheduler, scaler, and per rank: random states, running sums
    meta.json            epoch, step, data position, metrics, configuration, history
    manifest.json        SHA-256 of each of them, written last
    outcome.json         added by validation: metrics, history, early stopping

A checkpoint at the end of an epoch is written before the epoch is validated. Until its outcome is added,
its `meta.json` has the epoch under `pending`, and a run resumed from it validates first.
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
    """Train worker: a checkpoint's content, tensors on the CPU."""

    weights: dict[str, Any]
    state: dict[str, Any]
    """Plain values and tensors only, because it is loaded with `weights_only`."""
    meta: dict[str, Any]
    """JSON; `step` names the checkpoint."""
    ema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Every host: a complete checkpoint and its metadata."""

    store: Store
    name: str
    meta: dict[str, Any]

    @property
    def path(self) -> str:
        """Folder or URI."""
        return f"{self.store.where.rstrip('/')}/{self.name}"

    @property
    def pending(self) -> dict[str, Any] | None:
        """The epoch trained but not validated (epoch, metrics, books, whole), or None."""
        found: dict[str, Any] | None = self.meta.get("pending")
        return found

    @property
    def position(self) -> dict[str, Any]:
        """Where the data continues: with the missing validation, if any."""
        return {**self.meta["position"], "unvalidated": self.pending and self.pending["epoch"]}


def save(store: Store, content: Content) -> Checkpoint:
    """Train worker (rank 0, the writer's thread): write a checkpoint; it is valid only when complete.

    Raises:
        OSError: names the checkpoint and its disk; earlier checkpoints are untouched.
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
        # safetensors and torch do not report a full disk clearly; measure it while the draft is there.
        cause, disk = " ".join(str(error).split()) or type(error).__name__, store.free_text()
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        parts = [disk, cause] if disk.endswith(FULL) else [cause, disk]
        raise OSError(
            f"cannot write the checkpoint {store.where.rstrip('/')}/{name}: {'; '.join(filter(None, parts))}"
        ) from error
    return Checkpoint(store, name, content.meta)


def add_outcome(saved: Checkpoint, outcome: dict[str, Any]) -> Checkpoint:
    """Train worker (rank 0, the writer's thread): add the results of validation to a checkpoint.

    Args:
        saved: the checkpoint; it gets one more file and is otherwise unchanged.
        outcome: replaces keys of its `meta.json`.

    Raises:
        OSError: the file cannot be written.
    """
    outcome = json.loads(json.dumps(outcome))
    content = {"outcome": outcome, "sha256": _digest(outcome)}
    saved.store.add(saved.name, OUTCOME, json.dumps(content, indent=1))
    return Checkpoint(saved.store, saved.name, {**saved.meta, **outcome})


def awaiting(saved: Checkpoint, max_steps: int | None) -> Checkpoint:
    """Every host: adapt a checkpoint to the run that resumes from it.

    An epoch cut short by max_steps is pending validation as it is. If training may continue now, that
    validation is dropped, and the epoch is validated at its end.
    """
    cut_short = saved.pending is not None and not saved.pending["whole"]
    if cut_short and (max_steps is None or saved.meta["step"] < max_steps):
        return Checkpoint(saved.store, saved.name, {**saved.meta, "pending": None})
    return saved


def _digest(outcome: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(outcome).encode()).hexdigest()


def problem_of(store: Store, name: str) -> str | None:
    """Every host: why a checkpoint cannot be resumed from; None if it is complete and finite.

    Raises:
        OSError: S3 cannot be reached; this says nothing about the checkpoint.
    """
    problem = verify(store, name)
    if problem is not None or describe(store, name).meta.get("finite"):
        return problem
    # Written by a version that did not check.
    from stoker.checkpoints.tensors import non_finite

    content = load(describe(store, name))
    found = non_finite(content.weights, content.ema, content.state.get("optimizer"))
    return f"its {found} hold NaN or infinity" if found else None


def newest_valid(store: Store, log: Callable[[str], Any] | None = None) -> Checkpoint | None:
    """Every host: the newest checkpoint that is complete and finite; logs why others are skipped."""
    for name in store.names():
        problem = problem_of(store, name)
        if problem is None:
            return describe(store, name)
        if log:
            log(f"skipping checkpoint {name}: {problem}")
    return None


def describe(store: Store, name: str) -> Checkpoint:
    """Every host: a checkpoint with its `meta.json` and its outcome, unchecked.

    Raises:
        OSError: the checkpoint is not visible on this host.
    """
    try:
        meta = json.loads(store.read(name, META))
    except FileNotFoundError:
        raise OSError(
            f"{store.where}/{name}: not on this host; if several hosts train, set checkpoint.dir to"
            " a folder that they share, or s3://"
        ) from None
    # If the outcome is absent or truncated, validation runs again.
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        added = json.loads(store.read(name, OUTCOME))
        if _digest(added["outcome"]) == added["sha256"]:
            meta |= added["outcome"]
    return Checkpoint(store, name, meta)


def read_plain(file: Any, where: str) -> Any:
    """Train worker: load plain values and tensors written by `torch.save`, on the CPU.

    Args:
        file: a path or an open file.
        where: its name in errors.

    Raises:
        OSError: it contains anything else, which could run code; nothing was executed.
    """
    import pickle

    import torch

    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        found = re.search(r"GLOBAL (\w+\.[\w.]+)", str(error))
        raise OSError(
            f"{where}: contains {found[1] if found else 'more'} besides plain values and tensors, which"
            " could run code; not loaded. Remove this checkpoint, and check who may write there"
        ) from None


def load(checkpoint: Checkpoint) -> Content:
    """Train worker: a checkpoint's content, on the CPU.

    Raises:
        OSError: its state contains more than plain values and tensors.
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
    """Train worker (rank 0): the checkpoints of this run, and which of them to keep.

    `newest` checkpoints are kept to resume from, `top_k` for their metric; the best becomes the model.
    """

    store: Store
    newest: int
    top_k: int
    """As in Lightning: 0 keeps none for its metric, -1 all that have one."""
    monitored: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Checkpoint → its metric, mode and value; empty within an epoch."""
    tell: Callable[[str], Any] = print
    """Receives remarks for the user."""
    _told: bool = False

    def fill(self, upto: int) -> None:
        """Add the checkpoints of an earlier start of this run.

        Args:
            upto: the step resumed from. Later checkpoints were found damaged; they do not count and are
                replaced when their step comes again.
        """
        for name in self.store.names():
            if step_of(name) <= upto:
                with contextlib.suppress(OSError, ValueError):
                    self._note(describe(self.store, name))

    def _note(self, saved: Checkpoint) -> None:
        """Add a checkpoint; a metric that is not finite counts as none."""
        entry = saved.meta["monitored"] or {}
        self.monitored[saved.name] = entry if math.isfinite(entry.get("value", math.nan)) else {}

    def best(self) -> list[str]:
        """The checkpoints kept for their metric, best first; of equals the lower loss, then the earlier."""
        having = [name for name, entry in self.monitored.items() if entry]
        if not having:
            return []
        # A resumed run may monitor another metric; its values do not compare with earlier ones.
        watched = self.monitored[max(having, key=step_of)]
        sign = -1.0 if watched["mode"] == "max" else 1.0
        ranked = sorted(
            (
                sign * entry["value"],
                math.inf if (loss := entry.get("loss")) is None else loss,
                step_of(name),
                name,
            )
            for name in having
            if (entry := self.monitored[name])["metric"] == watched["metric"]
        )
        names = [name for *_, name in ranked]
        return names if self.top_k < 0 else names[: self.top_k]

    def add(self, saved: Checkpoint) -> None:
        """Add a checkpoint or its outcome, remove those no longer kept, and write best.json."""
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
        """Remove a checkpoint; failure costs only disk space, so warn once and continue."""
        try:
            self.store.remove(name)
        except OSError as error:
            if not self._told:
                self._told = True
                cause = " ".join(str(error).split())[:300]
                self.tell(
                    f"cannot remove checkpoint {name} in {self.store.where} ({cause}); training continues,"
                    " and old checkpoints stay: allow the job to delete there (on S3: s3:DeleteObject,"
                    " docs/iam), or remove them yourself (logged once)"
                )
