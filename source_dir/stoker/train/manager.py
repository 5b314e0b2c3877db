"""Train worker: when to take checkpoints, what they contain, and how to resume from one."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Checkpoint, Content, Retention
from stoker.checkpoints.writer import Writer
from stoker.config.redaction import redact
from stoker.events.summary import finite
from stoker.storage.checkpoint_store import Store, name_of
from stoker.train import train_state as snapshot
from stoker.train.finite import check_scale, check_state
from stoker.train.state import Worker
from stoker.train.stopping import EarlyStopping, monitored, monitors
from stoker.train.train_state import Progress

CALL_TIMEOUT_S = 120.0


class CheckpointManager:
    """Train worker: one per rank; rank 0 writes for all."""

    def __init__(self, worker: Worker, store: Store) -> None:
        self.worker, self.store = worker, store
        config = worker.config
        self.every_steps = config.checkpoint.every_steps
        self.every_s = 60 * config.checkpoint.every_minutes if config.checkpoint.every_minutes else None
        self.early_stopping = EarlyStopping.of(monitors(config)[0])
        self.history: list[dict[str, Any]] = []
        """Epochs (epoch, step, metrics, books), for the summary of a resumed run; one that `train.max_steps`
        has cut short stands there again once it is complete."""
        self.resumed: Checkpoint | None = None
        self.pending: dict[str, Any] | None = None
        """The epoch still to be validated, according to the last checkpoint taken or resumed from."""
        self._completes = False
        """Whether that checkpoint is in this run's folder, so that the outcome can be added to it."""
        self._last: Checkpoint | None = None
        """Rank 0: the last checkpoint written or resumed from."""
        self.writer = Writer(self._note)
        self.shelf = Retention(store, config.checkpoint.keep, config.checkpoint.save_top_k, tell=self._note)
        self._copier = snapshot.Copier()
        self._config = redact(config.model_dump(mode="json"))
        self._saved_at = time.monotonic()
        self._asked = False
        self._position: Any = None

    def after_step(self, progress: Progress) -> None:
        """Between two steps: take a checkpoint if one is due. All ranks decide alike.

        Raises:
            OSError: the last checkpoint could not be written.
        """
        worker = self.worker
        if worker.rank == 0:
            self.writer.check()
            late = self.every_s is not None and time.monotonic() - self._saved_at > self.every_s
            if late and not self._asked:
                # Clocks differ between hosts: the coordinator names one step to all ranks.
                self._asked = True
                worker.coordinator.request_checkpoint.remote(worker.attempt)
        due = self.every_steps is not None and worker.step % self.every_steps == 0
        if due or progress.feed.checkpoint:
            progress.feed.checkpoint = False
            self.take(progress, {})

    def after_epoch(
        self,
        epoch: int,
        metrics: dict[str, float],
        books: list[dict[str, Any]],
        progress: Progress | None = None,
    ) -> str:
        """Add an epoch's metrics to its checkpoint, or take a checkpoint with them. Collective.

        Args:
            epoch: the epoch that was trained and, if there is a split for it, validated.
            metrics: its metrics.
            books: its records by split, as reconciled by the coordinator.
            progress: of an epoch cut short by `train.max_steps`; None: the epoch is complete.

        Returns:
            Why training should stop, or "".
        """
        reason = ""
        if progress is None and self.early_stopping:
            self.early_stopping.update(metrics)
            # Figures such as samples/s differ between ranks: rank 0 decides.
            reason = snapshot.from_rank_0(self.worker, self.early_stopping.reason)
            self.early_stopping.reason = reason
        self.add_epoch(epoch, metrics, books)
        if self.pending is not None and self._completes:
            self.pending = None
            if self.worker.rank == 0:
                self.writer.submit(
                    f"the outcome of step {self.worker.step}", self._complete_later(self._outcome(metrics))
                )
        else:
            self.take(progress or Progress(epoch + 1), metrics)
        return reason

    def add_epoch(self, epoch: int, metrics: dict[str, float], books: list[dict[str, Any]]) -> None:
        """Record an epoch that was trained and validated; later checkpoints include it."""
        entry = {"epoch": epoch, "step": self.worker.step, "metrics": finite(metrics), "books": books}
        self.history.append(entry)

    def take(
        self, progress: Progress, metrics: dict[str, float], pending: dict[str, Any] | None = None
    ) -> None:
        """Take a checkpoint now; the slow part runs in the background. Collective.

        Args:
            progress: of the epoch that continues from this checkpoint, or of the next one.
            metrics: known metrics of the model; if empty, the checkpoint does not compete for best.
            pending: the epoch to validate next: epoch, metrics and books so far, and whether it was trained
                to its end. An interrupted validation then costs no training.

        Raises:
            FloatingPointError: on all ranks: the state is not finite.
        """
        worker, started = self.worker, time.perf_counter()
        check_state(worker, progress)
        check_scale(worker, progress.epoch)
        if worker.rank == 0:
            self.writer.make_room()  # the copies of the previous checkpoint are about to be overwritten
        parts = snapshot.gather(worker, snapshot.rank_part(worker, progress))
        live = snapshot.live_state(worker)
        self._saved_at, self._asked = time.monotonic(), False
        self.pending, self._completes = pending, True
        worker.kept = name_of(worker.step)
        if worker.rank:
            return
        meta = self._meta(progress, metrics)
        content = snapshot.content_of(worker, live, parts, meta, self._copier)
        self._position = self._ask_position(progress, parts)
        paused_s = time.perf_counter() - started
        write = self._write_later(content, self._position, paused_s)
        self.writer.submit(f"the checkpoint of step {worker.step}", write)

    def before_settling(self) -> None:
        """Wait for the data position of the last checkpoint, before the books of its epoch are closed."""
        import ray

        if self._position is not None and not isinstance(self._position, dict):
            ray.wait([self._position], timeout=CALL_TIMEOUT_S)

    def _meta(self, progress: Progress, metrics: dict[str, float]) -> dict[str, Any]:
        worker = self.worker
        return {
            "step": worker.step,
            "samples": worker.samples + progress.samples,
            "epoch": progress.epoch if progress.steps else progress.epoch - 1,
            "next_epoch": progress.epoch,
            "epoch_steps": progress.steps,
            "epoch_samples": progress.samples,
            "workers": worker.world_size,
            "global_batch": worker.global_batch,
            "finite": True,
            **self._outcome(metrics),
            "config": self._config,
            "time": time.time(),
            **(
                {"started": worker.clock[0], "seconds": time.time() - worker.clock[1]} if worker.clock else {}
            ),
        }

    def _outcome(self, metrics: dict[str, float]) -> dict[str, Any]:
        """The part of `meta.json` that validation changes."""
        return {
            "metrics": finite(metrics),
            "monitored": monitored(self.worker.config, metrics) if metrics else None,
            "early_stopping": self.early_stopping.state() if self.early_stopping else None,
            "history": list(self.history),
            "pending": self.pending,
        }

    def _ask_position(self, progress: Progress, parts: list[dict[str, Any]]) -> Any:
        """Ask for the data position; the writer waits for the answer."""
        worker = self.worker
        if progress.feed is None and progress.steps and self.resumed is not None:
            # Nothing was trained since the resume.
            return self.resumed.meta["position"]
        if progress.feed is None:
            # The books of the epoch are closed: the position is the start of the next epoch.
            return worker.coordinator.position.remote(worker.attempt, progress.epoch - 1, 0, 0)
        ids = snapshot.id_sum_of(parts)
        return worker.coordinator.position.remote(worker.attempt, progress.epoch, worker.feed_step, ids)

    def _write_later(self, content: Content, position: Any, paused_s: float) -> Callable[[], None]:
        def write() -> None:
            import ray

            started, meta = time.perf_counter(), content.meta
            known = isinstance(position, dict)
            meta["position"] = position if known else ray.get(position, timeout=CALL_TIMEOUT_S)
            saved = self._keep(checkpoint.save(self.store, content))
            self.worker.log(
                "checkpoint",
                epoch=meta["epoch"],
                step=meta["step"],
                path=saved.path,
                seconds=round(time.perf_counter() - started, 4),
                paused_s=round(paused_s, 4),
            )

        return write

    def _complete_later(self, outcome: dict[str, Any]) -> Callable[[], None]:
        def write() -> None:
            if self._last is not None:
                self._keep(checkpoint.add_outcome(self._last, outcome))

        return write

    def _keep(self, saved: Checkpoint) -> Checkpoint:
        """The writer's thread: a checkpoint is written, or has a new outcome."""
        self._last = saved
        self.worker.coordinator.saved.remote(saved.meta["next_epoch"], saved.position)
        self.shelf.add(saved)
        return saved

    def restore(self, saved: Checkpoint) -> Progress | None:
        """Restore a checkpoint. Rank 0 reads it for all, as only its host may have it. Collective.

        Returns:
            Progress in the interrupted epoch; None if the checkpoint is between two epochs.
        """
        worker, meta = self.worker, saved.meta
        content = checkpoint.load(saved) if worker.rank == 0 else None
        ranks = snapshot.put_back(worker, content)
        progress = snapshot.carried_progress(worker, meta, ranks)
        worker.step, worker.samples = meta["step"], meta["samples"] - meta["epoch_samples"]
        self.history, self.resumed, self._last = list(meta["history"]), saved, saved
        self.pending, worker.kept = saved.pending, saved.name
        self._completes = snapshot.from_rank_0(worker, saved.store.where == self.store.where)
        if self.early_stopping:
            self.early_stopping.restore(meta["early_stopping"])
        if worker.rank == 0 and saved.store.where == self.store.where:
            self.shelf.fill(meta["step"])
        validate = self.pending["epoch"] if self.pending else None
        worker.log("resumed", epoch=meta["next_epoch"], step=worker.step, path=saved.path, validate=validate)
        # Last, because nothing from here to the next step may draw a random number.
        if worker.rank < len(ranks):
            snapshot.set_rng_state(ranks[worker.rank]["rng"], worker.device)
        return progress

    def newest(self) -> Checkpoint | None:
        """Rank 0: the newest valid checkpoint of this run."""
        return checkpoint.newest_valid(self.store, self._note)

    def write_model(self, target: Path) -> None:
        """Rank 0, at the end: save the weights of the best valid checkpoint as the run's model."""
        self.writer.wait()
        whole = (name for name in self.shelf.best() if self._whole(name))
        best = next(whole, None)
        by = self.shelf.monitored[best] if best else {}
        chosen = checkpoint.describe(self.store, best) if best else self.newest() or self.resumed
        if chosen is None:
            raise OSError(f"{self.store.where}: no complete checkpoint to take the model from")
        write_model(self.worker, chosen, target, by)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, however the run ended."""
        with contextlib.suppress(OSError):  # do not hide an earlier error
            self.writer.wait(CALL_TIMEOUT_S)

    def _whole(self, name: str) -> bool:
        problem = checkpoint.problem_of(self.store, name)
        if problem:
            self._note(f"skipping checkpoint {name}: {problem}")
        return problem is None

    def _note(self, text: str) -> None:
        self.worker.log("note", text=text)


def write_model(worker: Worker, chosen: Checkpoint, target: Path, by: dict[str, Any]) -> None:
    """Train worker (rank 0): save a checkpoint's weights, averaged ones if present, as the model.

    Args:
        worker: of the run.
        chosen: the checkpoint.
        target: the model's folder.
        by: the metric, mode and value that chose it; empty: it is the newest.
    """
    target.mkdir(parents=True, exist_ok=True)
    with chosen.store.local(chosen.name) as folder:
        averaged = (folder / checkpoint.EMA).is_file()
        source = folder / (checkpoint.EMA if averaged else checkpoint.WEIGHTS)
        # Not its times and mode, which mounted object storage does not have.
        shutil.copyfile(source, target / checkpoint.WEIGHTS)
    about = {
        "recipe": worker.config.recipe,
        "params": redact(worker.config.params),
        "checkpoint": chosen.name,
        "weights": "ema" if averaged else "model",
        "epoch": chosen.meta["epoch"] + 1,
        **{key: chosen.meta[key] for key in ("step", "samples", "metrics")},
        **({"classes": worker.classes} if worker.classes else {}),
    }
    (target / "model.json").write_text(json.dumps(about, indent=1, default=str))
    source_of = {key: about[key] for key in ("checkpoint", "epoch", "step")}
    whole = chosen.meta["next_epoch"] > chosen.meta["epoch"]
    worker.log("model", path=str(target), **source_of, whole=whole, **by)
