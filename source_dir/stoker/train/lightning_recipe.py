"""Train an unchanged LightningModule on Stoker's data, with
`recipe: stoker.train.lightning_recipe:LightningRecipe`.

params:
  data: .data/flowers                 # as for ImageClassification
  module: my_models:LitClassifier     # the LightningModule
  init: {hidden: 64}                  # its arguments

The module defines optimisers, schedulers, callbacks and `self.log`; the job defines epochs, batch size,
checkpoints and everything else. Requires the extra `lightning`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from stoker.config.loading import Resolved
from stoker.errors import UsageError
from stoker.image_classification import ImageClassification
from stoker.recipe import SOURCE_FOLDER, load_object

STEERED = {
    "max_epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "accelerator": "the cluster",
    "devices": "the cluster",
    "num_nodes": "the cluster",
    "strategy": "train.strategy",
    "plugins": "the cluster",
    "callbacks": "the module's configure_callbacks()",
    "default_root_dir": "output_dir",
    "use_distributed_sampler": "the data, which is already sharded",
    "limit_train_batches": "train.max_steps",
    "limit_val_batches": "the data: validation sees every record",
    "val_check_interval": "the data: validation follows each epoch",
    "check_val_every_n_epoch": "the data: validation follows each epoch",
    "num_sanity_val_steps": "the data: validation follows each epoch",
    "overfit_batches": "the data",
    "fast_dev_run": "train.max_steps",
    "enable_checkpointing": "the section checkpoint",
    "log_every_n_steps": "tracking.log_every_steps",
}
"""Arguments of lightning.Trainer that the job sets, and where."""

UNUSED = (
    "strategy",
    "optimizer",
    "lr",
    "momentum",
    "weight_decay",
    "scheduler",
    "warmup_epochs",
    "precision",
    "accumulate_steps",
    "clip_grad_norm",
    "channels_last",
    "compile",
    "ema_decay",
    "layer_decay",
    "label_smoothing",
    "mixup",
    "cutmix",
    "scale_lr",
)
"""Keys of `train` that a LightningModule or `params.trainer` replace."""


class LightningRecipe(ImageClassification):
    """Every host: trains a LightningModule; override `read`, `preprocess` and `on_device` for other data."""

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())
    own_loop: ClassVar[str] = "stoker.train.lightning_loop"

    module: str = Field(description="import path of the LightningModule, package.module:Class")
    init: dict[str, Any] = Field({}, description="arguments of the LightningModule")
    columns: list[str] | None = Field(
        ["image", "label"],
        description="columns of the batch, a tuple in this order; null: a dict of all columns",
    )
    trainer: dict[str, Any] = Field(
        {}, description="additional arguments of lightning.Trainer: precision, gradient_clip_val, …"
    )

    def check(self, resolved: Resolved) -> None:
        try:
            import lightning.pytorch as pl
        except ImportError:
            raise UsageError(
                "recipe: LightningRecipe requires lightning; run pip install 'stoker[lightning]', or add"
                " lightning to requirements.txt"
            ) from None
        import inspect

        problems = [
            f"params.trainer.{key}: is set by {STEERED[key]}; leave it out"
            for key in self.trainer
            if key in STEERED
        ]
        known = inspect.signature(pl.Trainer).parameters
        problems += [
            f"params.trainer.{key}: lightning.Trainer has no such argument"
            for key in self.trainer
            if key not in known
        ]
        problems += [
            f"{key}: not with LightningRecipe, which cannot resume; leave it out, or train the module in a"
            " script with stoker.DataLoader (docs/migrate.md)"
            for key in ("checkpoint.every_steps", "checkpoint.every_minutes", "train.max_failures")
            if key in resolved.origins
        ]
        problems += [
            f"train.{key}: has no effect with LightningRecipe, which uses DDP and the module's own"
            " optimisers; set it in the module or in params.trainer"
            for key in UNUSED
            if f"train.{key}" in resolved.origins
        ]
        cls = load_object(self.module, SOURCE_FOLDER, "params.module")
        if not (inspect.isclass(cls) and issubclass(cls, pl.LightningModule)):
            problems.append(f"params.module: {self.module} is not a LightningModule class")
        if "params.model" in resolved.origins:
            problems.append("params.model: LightningRecipe takes params.module instead")
        if problems:
            raise UsageError(*problems)

    def model(self) -> Any:
        cls = load_object(self.module, SOURCE_FOLDER, "params.module")
        try:
            return cls(**self.init)
        except TypeError as error:
            raise UsageError(f"params.init: cannot create {self.module}: {error}") from None

    def wanted(self) -> list[str] | None:
        return self.columns

    def batch_of(self, columns: dict[str, Any]) -> Any:
        """Train worker: the batch passed to the module's `training_step` and `validation_step`.

        Args:
            columns: tensors by name, on the device, after `on_device`.
        """
        if self.columns is None:
            return columns
        absent = [name for name in self.columns if name not in columns]
        if absent:
            raise UsageError(
                f"params.columns: no column {', '.join(absent)}; available: {', '.join(columns)}"
            )
        return tuple(columns[name] for name in self.columns)

    def loggers(self) -> list[Any]:
        """Train worker (rank 0): additional loggers for lightning.Trainer."""
        return []
