"""Train worker: evaluates batches of the validation split, before training those of its first records."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

from stoker.chain.collating import Collate
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.messages import BlockReport
from stoker.read.sources import drawing
from stoker.recipe import Batch, Recipe
from stoker.train import strategies
from stoker.train.feed import as_one_batch
from stoker.train.micro_batches import MicroBatches
from stoker.train.sample_images import show_predictions
from stoker.train.scores import Scores
from stoker.train.state import Worker, count_records, to_device
from stoker.train.step import autocast, naming_text, single_record_fault
from stoker.train.stopping import known
from stoker.train.train_state import from_rank, rng_state, set_rng_state


class Evaluation:
    """Train worker: one validation of the averaged weights, or of the model.

    Args:
        worker: has the model.
        epoch: the present one, for the report's predictions; None: a trial, which leaves no trace.
    """

    def __init__(self, worker: Worker, epoch: int | None) -> None:
        import torch

        self.worker, self.epoch = worker, epoch
        model = worker.model if worker.ema is None else worker.ema.module
        if epoch is not None:
            strategies.share_buffers(model)
        self.model = strategies.plain(model).eval()
        self.sharded, self.spare = strategies.is_sharded(self.model), dict[str, Any]()
        with self.quietly():
            self.scores, self.micro_batches = Scores(worker), MicroBatches(worker)
        self.sums = torch.zeros(3, dtype=torch.float64)
        """Sum of the losses, records that have one, all records."""

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Without gradients; random states are restored, so that validation does not affect training."""
        import torch

        draws = rng_state(self.worker.device)
        with torch.no_grad():
            yield
        set_rng_state(draws, self.worker.device)

    def take(self, batch: Batch) -> None:
        """Evaluate a batch as it came from the feed; one without records, if other ranks need this one."""
        worker, records = self.worker, count_records(batch)
        if self.sharded and not self.spare:
            self.spare = to_device(strategies.first_record(batch), worker.device)
        if not records:
            if self.sharded:
                # The forward passes of other ranks need this rank's shard of the weights.
                self._step(self.spare)
            return
        self.sums[2] += records
        for batch_part, share in self.micro_batches.of(batch):
            part, result = self._step(batch_part)
            loss = result.get("loss")
            if loss is not None:
                self.sums[0] += float(loss) * records * share if share else 0.0
                self.sums[1] += records * share
            if self.epoch is not None and not self.scores.fed and "preds" in result and "target" in result:
                show_predictions(worker, self.epoch, part, result, self.scores.metrics)
            self.scores.update(result)

    def _step(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        worker = self.worker
        batch = worker.modules["val"](batch)
        with autocast(worker), naming_text(batch):
            result: Any = worker.recipe.validation_step(self.model, batch)
        if not isinstance(result, dict):
            raise UsageError(
                f"recipe: {type(worker.recipe).__name__}.validation_step returned a {type(result).__name__};"
                " return a dict: loss, preds and target, as far as there are"
            )
        return batch, result

    def result(self) -> dict[str, float]:
        """The metrics by conventional name, over all ranks. Collective.

        Raises:
            UsageError: some batches have a loss, others have none.
        """
        import torch
        import torch.distributed as dist

        worker, sums = self.worker, self.sums
        fed = torch.zeros(worker.world_size, dtype=torch.float64)
        fed[worker.rank] = self.scores.fed
        if worker.world_size > 1:
            sums, fed = sums.to(worker.device), fed.to(worker.device)
            dist.all_reduce(sums)
            dist.all_reduce(fed)
        losses, with_loss, records = sums.tolist()
        values = {"val/loss": losses / records} if with_loss else {}
        if with_loss and abs(with_loss - records) > 1e-6 * records:
            raise UsageError(
                f"recipe: {type(worker.recipe).__name__}.validation_step returned a loss for some records"
                f" only ({with_loss:.0f} of {records:.0f}); return one in each batch, or in none"
            )
        ranks = [rank for rank, flag in enumerate(fed.tolist()) if flag]
        with self.quietly():
            if len(ranks) == worker.world_size:
                self.scores.compute(few=self.epoch is None)
            elif ranks:
                # Fewer records than ranks: torchmetrics mixes up the states of ranks of which some have none.
                self.scores.compute(group=dist.new_group(ranks))
                self.scores.take(from_rank(worker, self.scores.found, ranks[0]))
        return values | self.scores.values

    def tell(self) -> None:
        """Log tables, and what is not shown."""
        for table in self.scores.tables:
            self.worker.log("table", epoch=self.epoch, step=self.worker.step, **table)
        tell_once(self.worker, self.scores.notes)


def tell_once(worker: Worker, notes: list[str]) -> None:
    """Train worker: log each note once in this start of the run."""
    for note in notes:
        if note not in worker.noted:
            worker.noted.add(note)
            worker.log("note", text=f"note: {note}")


def carry_extremes(values: dict[str, float], history: list[dict[str, Any]]) -> None:
    """Train worker: let `min` and `max` of torchmetrics' MinMaxMetric cover all epochs of the run.

    Each validation creates its metrics anew, and a resumed run does so in other processes.

    Args:
        values: metrics of this validation; changed in place.
        history: finished epochs, with their `metrics`.
    """
    for name in [name.removesuffix("/raw") for name in values if name.endswith("/raw")]:
        for kind, pick in (("min", min), ("max", max)):
            before = [entry["metrics"].get(f"{name}/{kind}") for entry in history]
            if f"{name}/{kind}" in values:
                found = [values[f"{name}/{kind}"], *(value for value in before if value is not None)]
                values[f"{name}/{kind}"] = pick(found)


def sample_of(config: Config, recipe: Recipe, columns: dict[str, Any], report: BlockReport) -> Batch:
    """Train worker: the first records of a split, as the head made them, as a batch on the CPU."""
    collate = Collate.of(config.recipe, config.params) if recipe.collates else None
    return as_one_batch(collate, copy.deepcopy(columns), report)  # what Ray delivers is read-only


def fails_alone(
    config: Config, recipe: Recipe, workers: int, columns: dict[str, Any], report: BlockReport
) -> str:
    """Head and laptop: why the model cannot train on one record; empty if it can, or cannot be tried here.

    Args:
        config: the job.
        recipe: its recipe.
        workers: number of train workers.
        columns: the first training records, as the head made them.
        report: of them.
    """
    import torch
    from torch.nn import SyncBatchNorm
    from torch.nn.modules.batchnorm import _BatchNorm

    with drawing(f"{config.seed}/recipe"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that weights are not loaded
        try:
            with torch.device("meta"):  # without weights, which may not fit into this host's memory
                if not any(isinstance(part, _BatchNorm) for part in recipe.model().modules()):
                    return ""
        except Exception:
            if config.train.batch_size == 1:
                return ""  # the first step tells, which costs nothing
        try:
            batch = {name: values[:1] for name, values in sample_of(config, recipe, columns, report).items()}
            module = recipe.on_device("train")
            model = recipe.model().train()
            if workers > 1 and any(isinstance(part, SyncBatchNorm) for part in model.modules()):
                return ""  # it counts the records of all train workers
            recipe.training_step(model, module(batch) if module else batch)
        except ValueError as error:
            return single_record_fault(error)
        except Exception:
            return ""  # the train workers report it, or can do it
    return ""


def try_validation(worker: Worker, batch: Batch) -> tuple[dict[str, float], list[str]]:
    """Train worker: evaluate a few records, so that no epoch is lost to a validation that fails. Collective.

    Args:
        worker: before its first step.
        batch: of the validation split, on the CPU.

    Returns:
        (metrics, notes on what is not shown).

    Raises:
        Exception: as the validation of an epoch; a metric to monitor is absent.
    """
    import torch

    evaluation = Evaluation(worker, None)
    # Compiled for a few records, the model would be compiled again for any number of them.
    with torch.compiler.set_stance("force_eager"), evaluation.quietly():
        evaluation.take(to_device(batch, worker.device))
    values = evaluation.result()
    evaluation.scores.note_unfed()
    config = worker.config
    for key, name in (
        ("checkpoint.monitor", config.checkpoint.monitor),
        ("train.early_stopping.monitor", config.train.early_stopping.monitor),
    ):
        later = name is not None and ("_per_class/" in name or name in evaluation.scores.later)
        if name is not None and name.startswith("val/") and not later:
            known(name, values, key)
    return values, evaluation.scores.notes
