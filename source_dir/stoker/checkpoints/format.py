"""Train worker (rank 0) and head: the contents of a checkpoint, and how to find the newest valid one.

step-00000123/
    model.safetensors    the weights
    ema.safetensors      their moving average, if any
    state.pt             optimiser, scheduler, scaler, and per rank: random states, running sums
    manifest.json        SHA-256 of each of them; `meta`: job, run, epoch, step, data position, metrics, the
                         epochs so far, configuration; and its own SHA-256. Written last

A checkpoint at the end of an epoch is written before the epoch is validated: its `meta` has the epoch under
`pending`, and a run resumed from it validates first. After the validation, the manifest is replaced.

Why not `torch.distributed.checkpoint`: it unpickles its metadata, and so do its safetensors readers for what is
not a tensor (docs/security.md).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.errors import CheckpointError, UsageError
from stoker.storage.checkpoint_store import (
    FULL,
    MANIFEST,
    CheckpointStore,
    Manifest,
    name_of,
    step_of,
    verify,
)

WEIGHTS, EMA, STATE = "model.safetensors", "ema.safetensors", "state.pt"
BEST = "best.json"


@dataclass(frozen=True)
class Content:
    weights: dict[str, Any]
    state: dict[str, Any]
    """Plain values and tensors only, because it is loaded with `weights_only`."""
    meta: dict[str, Any]
    """JSON; `step` names the checkpoint."""
    ema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    store: CheckpointStore
    name: str
    meta: dict[str, Any]

    @property
    def path(self) -> str:
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


def save(store: CheckpointStore, content: Content) -> Checkpoint:
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
        (draft / MANIFEST).write_text(Manifest.of(draft, content.meta).text())
        store.publish(draft, name)
    except Exception as error:
        # safetensors and torch do not report a full disk clearly; measure it while the draft is there.
        cause, disk = " ".join(str(error).split()) or type(error).__name__, store.free_text()
        if draft is not None:
            store.discard(draft)
        parts = [disk, cause] if disk.endswith(FULL) else [cause, disk]
        raise CheckpointError(
            f"cannot write the checkpoint {store.where.rstrip('/')}/{name}: {'; '.join(filter(None, parts))}"
        ) from error
    return Checkpoint(store, name, content.meta)


def replace_meta(saved: Checkpoint, changes: dict[str, Any]) -> Checkpoint:
    """Change what a checkpoint's manifest says, unless another run has replaced the checkpoint."""
    file = f"{saved.name}/{MANIFEST}"
    manifest = Manifest.read(saved.store.content(file))
    if manifest.meta.get("run") == saved.meta.get("run"):
        changed = Manifest(manifest.files, {**saved.meta, **changes})
        saved.store.write_note(file, changed.text())
    return replace(saved, meta={**saved.meta, **changes})


def other_job(saved: Checkpoint, job: str, service_job: str) -> str:
    """The job that wrote a checkpoint, if it is not this one; earlier versions did not record it."""
    name, service = saved.meta.get("job", job), saved.meta.get("service_job", "")
    if (name, service) == (job, service_job):
        return ""
    of = service or "of no service, or of an earlier version"
    return f"{name} ({of})" if service_job else name


def awaiting(saved: Checkpoint, max_steps: int | None) -> Checkpoint:
    """Drops a pending validation of an epoch cut short by max_steps if training may continue now."""
    cut_short = saved.pending is not None and not saved.pending["whole"]
    if cut_short and (max_steps is None or saved.meta["step"] < max_steps):
        return replace(saved, meta={**saved.meta, "pending": None})
    return saved


def newest_valid(
    store: CheckpointStore, log: Callable[[str], Any] | None = None, names: list[str] | None = None
) -> Checkpoint | None:
    """The first of these checkpoints that is complete, of all the newest; logs why others are skipped."""
    for name in store.names() if names is None else names:
        problem = verify(store, name)
        if problem is None:
            return load_meta(store, name)
        if log:
            log(f"skipping checkpoint {name}: {problem}")
    return None


def load_meta(store: CheckpointStore, name: str) -> Checkpoint:
    try:
        manifest = Manifest.read(store.content(f"{name}/{MANIFEST}"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{store.where}/{name}: not on this host; if several hosts train, set checkpoint.dir to"
            " a folder that they share, or s3://"
        ) from None
    return Checkpoint(store, name, {"history": [], **manifest.meta})


def read_plain(file: Any, where: str) -> Any:
    """On the CPU; what is not plain values and tensors could run code: it is an OSError, and not executed."""
    import pickle

    import torch

    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{where}: contains more than plain values and tensors, which could run code; not loaded. Remove"
            " this checkpoint, and check who may write there"
        ) from error


def load_checkpoint(checkpoint: Checkpoint) -> Content:
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
    store: CheckpointStore
    newest: int
    """How many to keep to resume from."""
    top_k: int
    """How many to keep for their metric, as in Lightning: 0 keeps none, -1 all that have one."""
    monitored: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Checkpoint → its metric, mode and value; empty within an epoch."""
    tell: Callable[[str], Any] = print
    _told: bool = False

    def fill(self, upto: int, entries: dict[str, dict[str, Any] | None]) -> None:
        """Add those of earlier starts up to the step resumed from; `entries`: by what epochs compete."""
        for name in self.store.names():
            if step_of(name) <= upto:
                self._note(name, entries.get(name))

    def _note(self, name: str, entry: dict[str, Any] | None) -> None:
        entry = entry or {}
        self.monitored[name] = entry if math.isfinite(entry.get("value", math.nan)) else {}

    def best(self) -> list[str]:
        """The checkpoints kept for their metric, best first; of equals the lower loss, then the earlier."""
        having = [name for name, entry in self.monitored.items() if entry]
        if not having:
            return []
        # A resumed run may monitor another metric; its values do not compare with earlier ones.
        watched = self.monitored[max(having, key=step_of)]
        sign = -1.0 if watched["mode"] == "max" else 1.0

        def rank(name: str) -> tuple[float, float, int]:
            entry = self.monitored[name]
            loss = math.inf if entry.get("loss") is None else entry["loss"]
            return sign * entry["value"], loss, step_of(name)

        alike = [n for n in having if self.monitored[n]["metric"] == watched["metric"]]
        names = sorted(alike, key=rank)
        return names if self.top_k < 0 else names[: self.top_k]

    def add(self, saved: Checkpoint) -> None:
        """Add a checkpoint or its new metadata, remove those no longer kept, and write best.json."""
        self._note(saved.name, saved.meta["monitored"])
        best = self.best()
        newest = sorted(self.monitored, key=step_of, reverse=True)[: self.newest]
        for name in [name for name in self.monitored if name not in (*best, *newest)]:
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


WRITE_S = 1800.0
"""Deadline of a write."""
MEANWHILE_S = 60.0
WORTH_SAYING_S = 0.5
_NICENESS = 10


class Writer:
    """At most one write in flight; its error is raised by the next call."""

    def __init__(self, tell: Callable[[str], Any], where: str = "the disk") -> None:
        self.tell, self.where = tell, where
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.what = ""
        self._told = False

    def submit(self, what: str, write: Callable[[], None]) -> None:
        """Write in the background, after the previous write, unless that one failed."""
        self.what = what
        args = (write, self.thread)
        self.thread = threading.Thread(target=self._run, args=args, name="checkpoint", daemon=True)
        self.thread.start()

    def make_room(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        """Wait until no write is in flight; warn once if checkpoints come too fast."""
        self.check()
        if self.thread is not None and self.thread.is_alive():
            started = time.monotonic()
            self.wait(meanwhile=meanwhile)
            waited = time.monotonic() - started
            if not self._told and waited > WORTH_SAYING_S:
                self._told = True
                self.tell(
                    f"training waited {waited:.1f} s for the previous checkpoint to be written; raise"
                    " checkpoint.every_steps to avoid this (logged once)"
                )

    def check(self) -> None:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def wait(
        self, deadline_s: float = WRITE_S, meanwhile: Callable[[], Any] = lambda: None
    ) -> None:
        """Wait until all is written; calls `meanwhile` every minute."""
        until = time.monotonic() + deadline_s
        while self.thread is not None and self.thread.is_alive():
            self.thread.join(min(MEANWHILE_S, deadline_s))
            if self.thread.is_alive() and time.monotonic() >= until:
                self.thread = None  # nobody waits for it a second time
                raise CheckpointError(
                    f"{self.what}: not written within {deadline_s:.0f} s: {self.where} is stuck or too slow;"
                    " check its disk or connection, then resume from the checkpoint before"
                )
            meanwhile()
        self.thread = None
        self.check()

    def _run(self, write: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
            if self.failure is not None:
                return
        with contextlib.suppress(OSError, AttributeError):
            # On Linux this sets the priority of this thread alone: training comes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            write()
        except (OSError, UsageError) as error:
            self.failure = error
        except BaseException as error:
            self.failure = CheckpointError(f"{self.what}: {type(error).__name__}: {error}")
