"""Train worker: when to take checkpoints, what they contain, and how to resume from one."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import (
    Checkpoint,
    Content,
    Retention,
    Writer,
    awaiting,
    load_meta,
    other_job,
)
from stoker.config.redaction import learn_job, redact, scrubbed
from stoker.errors import CheckpointError, UsageError
from stoker.events.kinds import CheckpointWritten, ModelWritten, Note, Resumed
from stoker.events.summary import finite
from stoker.serve.accounting import ID_MODULUS
from stoker.storage.checkpoint_store import CheckpointStore, name_of, open_store, step_of
from stoker.train import strategies
from stoker.train.export import FILES
from stoker.train.state import (
    Progress,
    Worker,
    carried_progress,
    checkpoint_content,
    gather,
    live_state,
    not_finite,
    rank_part,
    reached,
    restore_state,
    set_rng_state,
)
from stoker.train.stopping import EarlyStopping, monitored, monitors

CALL_TIMEOUT_S = 120.0


class CheckpointManager:
    """One per rank; rank 0 writes for all."""

    def __init__(self, worker: Worker, store: CheckpointStore, service_job: str = "") -> None:
        self.worker, self.store, self.service_job = worker, store, service_job
        config = worker.config
        self.early_stopping = EarlyStopping.of(monitors(config)[0])
        self.history: list[dict[str, Any]] = []
        """Epochs (epoch, step, metrics, monitored, books), for a resumed run; one that `train.max_steps` has
        cut short stands there again once it is complete. `elsewhere`: trained by the run whose checkpoint this
        one started from."""
        self.resumed: Checkpoint | None = None
        self.pending: dict[str, Any] | None = None
        """The epoch still to be validated, according to the last checkpoint taken or resumed from."""
        self._own = False
        """Whether that checkpoint is in this run's folder, so that its metadata can be changed."""
        self._last: Checkpoint | None = None
        self.writer = Writer(self._note, store.where)
        keep = config.checkpoint.keep, config.checkpoint.save_top_k
        self.shelf = Retention(store, *keep, tell=self._note)
        self._copier = strategies.Copier()
        self.run = secrets.token_hex(8)
        """Stands in its checkpoints, and stays through all its starts."""
        learn_job(config.model_dump(mode="json"))

    @cached_property
    def _config(self) -> Any:
        return redact(self.worker.config.model_dump(mode="json"))

    def after_step(self, progress: Progress) -> None:
        """Between two steps: take a checkpoint if one is due. All ranks decide alike."""
        if self.worker.rank == 0:
            self.writer.check()
        every_steps = self.worker.config.checkpoint.every_steps
        if every_steps is not None and self.worker.step % every_steps == 0:
            self.take(progress, {})

    def after_epoch(
        self,
        epoch: int,
        metrics: dict[str, float],
        books: list[dict[str, Any]],
        progress: Progress | None = None,
    ) -> str:
        """Add an epoch's metrics to its checkpoint, or take one; returns why to stop training. Collective."""
        reason = ""
        if progress is None and self.early_stopping:
            self.early_stopping.update(metrics)
            # Figures such as samples/s differ between ranks: rank 0 decides.
            reason = strategies.from_rank(self.early_stopping.reason)
            self.early_stopping.reason = reason
        about = {"epoch": epoch, "step": self.worker.step, "books": books}
        by = monitored(self.worker.config, metrics)
        self.history.append({**about, "metrics": finite(metrics), "monitored": by})
        self.take(progress or Progress(epoch + 1), metrics)
        return reason

    def take(
        self, progress: Progress, metrics: dict[str, float], pending: dict[str, Any] | None = None
    ) -> None:
        """Take a checkpoint now; the slow part runs in the background. Collective.

        Without metrics it does not compete for best; `pending`: the epoch to validate next. If this step's
        checkpoint is there, as after a validation, it stays, and only its metadata change.
        """
        worker, started = self.worker, time.perf_counter()
        check_state(worker, progress)
        check_scale(worker, progress.epoch)
        again = self._own and worker.kept == name_of(worker.step)
        validated = again and self.pending is not None
        if not again:
            self._make_room()  # the copies of the previous checkpoint are about to be overwritten
        parts = gather(worker, rank_part(worker, progress))
        live = {} if again else live_state(worker)
        self.pending, self._own = pending, True
        worker.kept = name_of(worker.step)
        if worker.rank:
            return
        meta = self._meta(progress, metrics)
        if not validated:
            meta["position"] = self._position(progress, parts)
        if again:
            write = partial(self._change, meta)
        else:
            content = checkpoint_content(live, parts, meta, self._copier)
            write = partial(self._write, content, time.perf_counter() - started)
        self.writer.submit(f"the checkpoint of step {worker.step}", write)

    def _make_room(self) -> None:
        """Collective. The wait may last longer than a collective call, so all ranks make one every minute."""
        if self.worker.rank == 0:
            self.writer.make_room(meanwhile=lambda: strategies.from_rank(True))
        while strategies.from_rank(False):
            pass

    def _meta(self, progress: Progress, metrics: dict[str, float]) -> dict[str, Any]:
        worker, clock = self.worker, self.worker.clock
        return {
            "job": worker.config.name,
            "service_job": self.service_job,
            "run": self.run,
            "step": worker.step,
            "samples": worker.samples + progress.samples,
            "epoch": progress.epoch if progress.steps else progress.epoch - 1,
            "next_epoch": progress.epoch,
            "epoch_steps": progress.steps,
            "epoch_samples": progress.samples,
            "workers": worker.world_size,
            "global_batch": worker.global_batch,
            "metrics": finite(metrics),
            "monitored": monitored(worker.config, metrics) if metrics else None,
            "early_stopping": asdict(self.early_stopping) if self.early_stopping else None,
            "history": list(self.history),
            "pending": self.pending,
            "config": self._config,
            "time": time.time(),
            **({"started": clock[0], "seconds": time.time() - clock[1]} if clock else {}),
        }

    def _position(self, progress: Progress, parts: list[dict[str, Any]]) -> Any:
        """Where the data continues; why records were bad are texts of exceptions, which may quote secrets."""
        worker, at = self.worker, (progress.epoch, self.worker.feed_step)
        if progress.feed is None and progress.steps and self.resumed is not None:
            # Nothing was trained since the resume.
            return self.resumed.meta["position"]
        if progress.feed is None:
            # The books of the epoch are closed: the position is the start of the next epoch.
            at = progress.epoch - 1, 0
        ids = sum(int(part["id_sum"]) for part in parts) % ID_MODULUS
        call = worker.coordinator.position.remote(worker.attempt, *at, ids)
        position = ray.get(call, timeout=CALL_TIMEOUT_S)
        reasons = {
            shard: {name: scrubbed(reason) for name, reason in those.items()}
            for shard, those in position.get("quarantined", {}).items()
        }
        return {**position, "quarantined": reasons}

    def _write(self, content: Content, paused_s: float) -> None:
        started, meta = time.perf_counter(), content.meta
        saved = self._keep(checkpoint.save(self.store, content))
        self.worker.log(
            CheckpointWritten(
                epoch=meta["epoch"],
                step=meta["step"],
                path=saved.path,
                seconds=round(time.perf_counter() - started, 4),
                paused_s=round(paused_s, 4),
                run=self.run,
            )
        )

    def _change(self, changes: dict[str, Any]) -> None:
        if self._last is not None:
            self._keep(checkpoint.replace_meta(self._last, changes))

    def _keep(self, saved: Checkpoint) -> Checkpoint:
        """The writer's thread: a checkpoint is written, or its metadata have changed."""
        self._last = saved
        self.worker.coordinator.saved.remote(saved.meta["next_epoch"], saved.position)
        self.shelf.add(saved)
        return saved

    def restore(self, saved: Checkpoint) -> Progress | None:
        """Returns the progress in an epoch that it interrupts. Collective: rank 0 reads it for all."""
        worker, meta = self.worker, saved.meta
        content = checkpoint.load_checkpoint(saved) if worker.rank == 0 else None
        asked = rates(worker.optimizer)
        ranks = restore_state(worker, content)
        if worker.schedule is None and asked != (kept := rates(worker.optimizer)):
            self._note(
                f"the rate of the recipe's optimizer(), {asked}, has no effect; the optimiser keeps {kept} of"
                f" {saved.name}"
            )
        progress = carried_progress(worker, meta, ranks)
        worker.step, worker.samples = meta["step"], meta["samples"] - meta["epoch_samples"]
        self.resumed, self._last = saved, saved
        self.pending, worker.kept = saved.pending, saved.name
        self._own = own = strategies.from_rank(saved.store.where == self.store.where)
        self.history = [entry if own else {**entry, "elsewhere": True} for entry in meta["history"]]
        # Absent in those of earlier versions.
        self.run = meta.get("run", self.run) if own else self.run
        if self.early_stopping and own:
            self.early_stopping.restore(meta["early_stopping"])
        if worker.rank == 0 and own:
            of_this_run = [entry for entry in self.history if not entry.get("elsewhere")]
            entries = {name_of(entry["step"]): self._entry(entry) for entry in of_this_run}
            self.shelf.fill(meta["step"], entries)
        validate = self.pending["epoch"] if self.pending else None
        event = Resumed(
            epoch=meta["next_epoch"], step=worker.step, path=saved.path, validate=validate
        )
        worker.log(event)
        # Last, because nothing from here to the next step may draw a random number.
        if worker.rank < len(ranks):
            set_rng_state(ranks[worker.rank]["rng"], worker.device)
        return progress

    def _entry(self, epoch: dict[str, Any]) -> dict[str, Any] | None:
        """By what the checkpoint of an epoch competes now, if it has that metric."""
        before: dict[str, Any] | None = epoch.get("monitored")
        with contextlib.suppress(UsageError):
            if before or "monitored" not in epoch:  # earlier checkpoints have it in manifests alone
                return monitored(self.worker.config, epoch["metrics"])
        return before

    def _is_own(self, meta: dict[str, Any]) -> bool:
        return bool(meta.get("run", self.run) == self.run)

    def newest(self) -> Checkpoint | None:
        return checkpoint.newest_valid(self.store, self._note)

    def refuse_other_job(self, saved: Checkpoint) -> None:
        if writer := other_job(saved, self.worker.config.name, self.service_job):
            raise CheckpointError(
                f"{saved.path}: another job, {writer}, has written this checkpoint during this run; give"
                " each job a checkpoint.dir of its own"
            )

    def write_model(self, target: Path) -> None:
        """In the writer's thread, with its deadline."""
        self.writer.submit(f"the model in {target}", partial(self._write_model, target))
        self.writer.wait()

    def _write_model(self, target: Path) -> None:
        worker, names = self.worker, self.shelf.best()
        best = checkpoint.newest_valid(self.store, self._note, names)
        chosen = best or self.newest() or self.resumed
        if chosen is None:
            raise CheckpointError(
                f"{self.store.where}: no complete checkpoint to take the model from"
            )
        if chosen is not self.resumed and not self._is_own(chosen.meta):
            raise CheckpointError(
                f"{chosen.path}: another run has written this checkpoint; its weights are not exported. Give"
                " each run a checkpoint.dir of its own"
            )
        if names and chosen.name != names[0]:
            self._note(
                f"the best checkpoint, {names[0]}, cannot be read: the model is that of {chosen.name}"
            )
        target.mkdir(parents=True, exist_ok=True)
        with chosen.store.local(chosen.name) as folder:
            averaged = (folder / checkpoint.EMA).is_file()
            source = folder / (checkpoint.EMA if averaged else checkpoint.WEIGHTS)
            for file in FILES.values():  # of an earlier start
                for each in (file, f"{file}.data"):
                    (target / each).unlink(missing_ok=True)
            # Not its times and mode, which mounted object storage does not have.
            shutil.copyfile(source, target / checkpoint.WEIGHTS)
        where = {
            "checkpoint": chosen.name,
            "epoch": chosen.meta["epoch"] + 1,
            "step": chosen.meta["step"],
        }
        about = {
            "recipe": worker.config.recipe,
            "params": redact(worker.config.model_dump(mode="json")["params"]),
            "weights": "ema" if averaged else "model",
            **where,
            **{key: chosen.meta[key] for key in ("samples", "metrics")},
            **({"classes": worker.classes} if worker.classes else {}),
        }
        (target / "model.json").write_text(json.dumps(about, indent=1, default=str))
        whole = chosen.meta["next_epoch"] > chosen.meta["epoch"]
        by = self.shelf.monitored[best.name] if best else {}
        worker.log(ModelWritten(path=str(target), **where, whole=whole, **by))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # do not hide an earlier error
            self.writer.wait()

    def _note(self, text: str) -> None:
        self.worker.log(Note(text=text))


def rates(optimizer: Any) -> str:
    return ", ".join({f"{float(group['lr']):g}": 0 for group in optimizer.param_groups})


SMALLEST_SCALE = 2.0**-20
"""The scale of fp16 gradients starts at 2**16 and halves with every overflow. Below this, the last steps were
all skipped, and all further ones will be."""


def check_state(worker: Worker, progress: Progress) -> None:
    """Raise on all ranks if the state of any rank is not finite, with one reduction. Collective."""
    names, sound = _verdicts(worker, progress)
    whole = sound.all().float()
    if worker.world_size > 1:
        dist.all_reduce(whole, op=dist.ReduceOp.MIN)
    if float(whole):
        return
    broken = [name for name, flag in zip(names, sound.tolist(), strict=True) if not flag]
    own = f"{broken[0]} holds NaN or infinity" if broken else ""
    if broken[:1] == [LOSSES]:
        own = f"{LOSSES} is {float(progress.loss_sum)}"
    found = [own] * worker.world_size
    if worker.world_size > 1:
        dist.all_gather_object(found, own)
    raise not_finite(
        next(filter(None, found), "the state of a train worker"), worker, progress.epoch
    )


def check_scale(worker: Worker, epoch: int) -> None:
    """Raise if fp16 skips every step, so nothing is learned; single skips are normal."""
    if worker.scaler is not None and worker.scaler.get_scale() < SMALLEST_SCALE:
        raise not_finite(
            "fp16: the gradient of every step", worker, epoch, "use train.precision=bf16"
        )


LOSSES = "the sum of the epoch's losses"


def _verdicts(worker: Worker, progress: Progress) -> tuple[list[str], Any]:
    """What must be finite on this rank, and whether it is; reads nothing from the device."""
    loss = torch.zeros(()) if progress.loss_sum is None else progress.loss_sum
    strict, buffers = [(LOSSES, loss)], list[Named]()
    models = {"weight": worker.model, "averaged weight": worker.ema and worker.ema.module}
    for kind, model in models.items():
        if model is not None:
            plain = strategies.plain(model)
            strict += [(f"{kind} {name}", p) for name, p in plain.named_parameters()]
            buffers += [(f"buffer {name}", b) for name, b in plain.named_buffers()]
    if worker.optimizer is not None:
        leaves = tree_flatten_with_path([*worker.optimizer.state.values()])[0]
        strict += [(f"optimiser state {keystr(path[1:])}", leaf) for path, leaf in leaves]
    largest = partial(torch.linalg.vector_norm, ord=math.inf)
    found = [(name, largest(tensor).isfinite()) for name, tensor in _floats(strict)]
    # Attention masks are buffers of -inf.
    found += [(name, tensor.max() < math.inf) for name, tensor in _floats(buffers)]
    names, sound = zip(*found, strict=True)
    return [*names], torch.stack([flag.to(worker.device) for flag in sound])


Named = tuple[str, Any]


def _floats(named: Iterable[Named]) -> Iterator[Named]:
    for name, value in named:
        local = value.to_local() if hasattr(value, "to_local") else value
        if isinstance(local, torch.Tensor) and local.is_floating_point() and local.numel():
            yield name, local.detach()


def begin(
    worker: Worker, keeper: CheckpointManager, chosen: tuple[str, bool, str] | None
) -> Checkpoint | None:
    """Agree on the attempt and the checkpoint to resume from, if any, then start the data. Collective."""
    found: Checkpoint | None = None
    if worker.rank == 0:
        worker.attempt = ray.get(worker.coordinator.new_attempt.remote())
        if worker.attempt:
            found = keeper.newest()
            own = chosen is not None and chosen[0] == keeper.store.where
            start = f"{chosen[0].rstrip('/')}/{chosen[2]}" if chosen is not None and own else ""
            refuse_earlier(ray.get(worker.coordinator.published.remote()) or start, found)
            if found and found.path != start:
                keeper.refuse_other_job(found)
        if found is None and chosen is not None:
            found = load_meta(open_store(*chosen[:2]), chosen[2])
        if found is not None:
            found = awaiting(found, worker.config.train.max_steps)
        first, position = (found.meta["next_epoch"], found.position) if found else (0, None)
        call = worker.coordinator.begin.remote(
            worker.coordinator, worker.attempt, worker.world_size, first, position
        )
        ray.get(call)
    # The other ranks wait for this; by then the data has started.
    agreed = (worker.attempt, found and found.name, found and found.meta)
    worker.attempt, name, meta = strategies.from_rank(agreed)
    return Checkpoint(keeper.store, name, meta) if worker.rank and name else found


def refuse_earlier(published: str, found: Checkpoint | None) -> None:
    last = published.rpartition("/")[2]
    if not last or (found is not None and step_of(found.name) >= step_of(last)):
        return
    instead = f"it has only {found.name}" if found else "it has no checkpoint"
    raise CheckpointError(
        f"{published}, the last checkpoint of this run, is absent or damaged on {platform.node()}, where"
        f" training restarts ({instead}); an earlier one would silently lose training. With several hosts"
        " that train, checkpoint.dir must be s3:// or a folder that they share"
    )


def nothing_left(worker: Worker, keeper: CheckpointManager, first_epoch: int) -> str:
    config = worker.config.train
    if keeper.early_stopping and keeper.early_stopping.reason:
        return keeper.early_stopping.reason
    if keeper.resumed and reached(worker):
        return f"train.max_steps ({config.max_steps}) was reached before"
    if keeper.resumed and first_epoch >= config.epochs:
        return f"all {config.epochs} epochs (train.epochs) were trained before"
    return ""
