"""Keys, types, defaults and descriptions of the configuration; imports neither ray nor torch.

`--show-config` prints the descriptions, so write them for the user.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stoker.config.places import (
    CpuHostsConfig,
    Folder,
    RehearsalConfig,
    Remainder,
    SageMakerConfig,
    Section,
    SlurmConfig,
    VertexConfig,
)

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


def tracking_uri(uri: str) -> str:
    """Anywhere: reject what is no server, and a URI with credentials, which would be in files and logs."""
    if re.match(r"[\w.-]+:\d+(/|$)", uri):
        raise ValueError(f"must be an address: http://{uri}")
    if "@" in uri.partition("://")[2].partition("/")[0]:
        raise ValueError(
            "contains a user name or password; remove them and set MLFLOW_TRACKING_USERNAME and"
            " MLFLOW_TRACKING_PASSWORD in the environment"
        )
    return uri


class DataConfig(Section):
    prepare: str | None = Field(
        None, description="import path of a function that creates the data if it is missing (laptop)"
    )
    shuffle: bool = Field(True, description="reshuffle the training records every epoch")
    order: Literal["any", "exact"] = Field(
        "any", description="any: batches in order of arrival; exact: the same seeded order in every run"
    )
    block_records: int = Field(
        256, ge=1, description="records that a chain worker preprocesses and sends as one block"
    )
    bucket_by: str | None = Field(
        None,
        description="column; sorts rows of similar length together within a block to reduce padding",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="upper bound on rows × padded length per forward pass; larger batches are split and their"
        " gradients accumulated; longer records are quarantined; null: no limit",
    )
    remainder: Remainder = Field(
        "drop",
        description="records left over when an epoch does not divide evenly: drop them, or pad by repeating"
        " some; a number N: also drop a last batch of fewer than N records per train worker",
    )
    bad_record_budget: float = Field(
        0.001, ge=0, le=1, description="fail the run above this fraction of unreadable records"
    )
    preprocess_on: list[str] = Field([], description="instance groups that preprocess; empty: all hosts")
    prefetch_s: float = Field(2.0, gt=0, description="seconds of training to prefetch in each train worker")
    prefetch_mb: int = Field(512, ge=1, description="memory limit for prefetched batches, MB")
    transport: Literal["direct", "ray"] = Field(
        "direct",
        description="direct: train workers fetch rows over sockets from the hosts that produced them; ray:"
        " those hosts answer through Ray, for networks that let only Ray's ports through",
    )
    cache: Literal["none", "memory", "disk"] = Field(
        "none",
        description="cache the output of the stages before the first random one (such as decoded images)"
        " across epochs, in shared memory or on disk",
    )
    cache_gb: float | None = Field(
        None, gt=0, description="cache size per host, GB; null: half of the free space"
    )
    cache_folder: Folder | None = Field(
        None, description="absolute path for cache: disk on each host; null: the temporary folder"
    )
    max_pixels: int = Field(
        100_000_000,
        ge=1,
        description="largest image, width × height; larger images are quarantined without decoding",
    )
    stall_timeout_s: float = Field(
        600, gt=0, description="fail if a train worker waits longer than this for its next batch"
    )

    @model_validator(mode="before")
    @classmethod
    def _share_is_gone(cls, values: Any) -> Any:
        if isinstance(values, dict) and "share" in values:
            raise ValueError("share was removed: each run preprocesses its own blocks; remove the key")
        return values

    @model_validator(mode="after")
    def _cache_is_whole(self) -> DataConfig:
        if self.cache == "none" and self.cache_gb is not None:
            raise ValueError("cache_gb requires cache: memory or cache: disk")
        if self.cache_folder is not None and (self.cache != "disk" or self.cache_folder[:1] != "/"):
            raise ValueError("cache_folder requires cache: disk and an absolute path")
        return self


class EarlyStoppingConfig(Section):
    monitor: str | None = Field(
        None, description="metric to check after each epoch, such as val/loss; null: train all epochs"
    )
    mode: Literal["auto", "min", "max"] = Field(
        "auto", description="whether lower or higher is better; auto: decide by the metric's name"
    )
    min_delta: float = Field(0.0, ge=0, description="an improvement must exceed this")
    patience: int = Field(3, ge=0, description="stop after this many epochs without improvement")
    stopping_threshold: float | None = Field(None, description="stop once the metric is better than this")

    @model_validator(mode="after")
    def _needs_a_metric(self) -> EarlyStoppingConfig:
        rest = {name: value for name, value in self.model_dump().items() if name != "monitor"}
        defaults = {name: type(self).model_fields[name].default for name in rest}
        if self.monitor is None and rest != defaults:
            raise ValueError("monitor is required: the metric to watch, for example val/loss")
        return self


class TrainConfig(Section):
    epochs: int = Field(10, ge=1, description="passes over the training records")
    max_steps: int | None = Field(None, ge=1, description="stop after this many steps")
    batch_size: int = Field(64, ge=1, description="records per train worker and step")
    workers: int | None = Field(
        None, ge=1, description="number of train workers; default: one per GPU, or one without GPUs"
    )
    strategy: str = Field(
        "ddp",
        pattern=r"^(ddp|fsdp|[\w.]+:\w+)$",
        description="ddp: replicate the model; fsdp: shard it; or your own package.module:function",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads per train worker; default: an equal share of the host's cores"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="autocast precision of forward and backward; fp16 uses a gradient scaler"
    )
    accumulate_steps: int = Field(
        1, ge=1, description="batches per optimiser step; their gradients are averaged"
    )
    clip_grad_norm: float | None = Field(
        None, gt=0, description="clip the global gradient norm to this value"
    )
    channels_last: bool = Field(
        False, description="use channels-last memory format for images and convolutions"
    )
    compile: bool = Field(
        False, description="torch.compile the model: faster steps after minutes of compilation"
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of an exponential moving average of the weights, used to validate and export",
    )
    optimizer: str = Field("sgd", description="timm optimiser: sgd, adamw, lamb, …")
    lr: float = Field(0.01, gt=0, description="learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum, if the optimiser has it")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    layer_decay: float | None = Field(
        None,
        gt=0,
        le=1,
        description="layer-wise decay: each layer's learning rate as a fraction of the next layer's",
    )
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale lr by train workers × accumulate_steps, or by the square root of that"
    )
    scheduler: Literal["none", "cosine", "step", "linear"] = Field(
        "none", description="learning rate schedule, per step"
    )
    warmup_epochs: float = Field(
        0, ge=0, description="epochs of linear warm-up; with scale_lr, from lr to the scaled rate"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of each target spread over all classes"
    )
    mixup: float = Field(0.0, ge=0, description="mixup alpha, on the device; 0: off; 0.2 is common")
    cutmix: float = Field(
        0.0, ge=0, description="CutMix alpha, on the device; 0: off; with mixup, each batch uses one of them"
    )
    max_failures: int = Field(
        0, ge=0, description="times to restart from the last checkpoint after a train worker dies"
    )
    early_stopping: EarlyStoppingConfig = Field(
        EarlyStoppingConfig(), description="stop when a metric no longer improves"
    )


class ClusterConfig(Section):
    gpu_group: str | None = Field(
        None, description="instance group that trains; default: the group with GPUs"
    )
    join_timeout_s: float = Field(
        600,
        gt=0,
        description="how long the head waits for other hosts: one that never joins costs the GPU hosts this"
        " time, one that is lost while it joins a minute",
    )
    min_cpu_hosts: int | None = Field(
        None,
        ge=0,
        description="CPU hosts to start with after join_timeout_s, or if the others are lost; default: all",
    )
    cpu_hosts: CpuHostsConfig = Field(
        CpuHostsConfig(), description="CPU hosts that the cluster's autoscaler adds and removes"
    )
    port: int = Field(6379, ge=1024, le=65535, description="port of the Ray head")
    cpus: int | None = Field(None, ge=1, description="local runs: CPUs to use; default: all it may use")
    object_store_mb: int | None = Field(
        None, ge=80, description="size of the Ray object store per host; default: as much as /dev/shm allows"
    )
    dashboard: bool = Field(
        False, description="local runs: start Ray's dashboard on 127.0.0.1; it asks for the run's token"
    )


class CheckpointConfig(Section):
    dir: Folder | None = Field(
        None,
        description="folder, s3:// or gs:// prefix for checkpoints; default: checkpoints/ of the run",
    )
    resume: Folder = Field(
        "auto",
        description="auto: the newest complete checkpoint in dir; never; or a path, s3:// or gs:// prefix",
    )
    every_steps: int | None = Field(
        None, ge=1, description="also write a checkpoint every N steps within an epoch"
    )
    every_minutes: float | None = Field(
        None, gt=0, description="also write a checkpoint every N minutes within an epoch"
    )
    keep: int = Field(2, ge=1, description="number of most recent checkpoints to keep for resuming")
    save_top_k: int = Field(
        1,
        ge=-1,
        description="also keep the best K checkpoints by `monitor`; 0: none; -1: all with the metric",
    )
    monitor: str = Field(
        "auto",
        description="metric that selects the best; auto: that of early stopping, or else val/acc1, val/loss"
        " or train/loss",
    )
    mode: Literal["auto", "min", "max"] = Field(
        "auto", description="whether lower or higher is better; auto: decide by the metric's name"
    )


class MlflowConfig(Section):
    uri: Annotated[str, AfterValidator(tracking_uri)] | None = Field(
        None, description="MLflow tracking server: http(s)://…, databricks, an ARN; null: MLflow is off"
    )
    experiment: str | None = Field(None, description="experiment name; default: the job's name")
    run_name: str | None = Field(None, description="run name; default: the run directory's name")
    registered_model: str | None = Field(
        None, description="register the final model under this name, exported with torch_export"
    )
    system_metrics: bool = Field(True, description="log the CPU utilisation of every host")
    tags: dict[str, str] = Field({}, description="tags of the run")
    timeout_s: int = Field(10, ge=1, description="timeout of a request; training never waits for it")
    close_timeout_s: float = Field(
        120, gt=0, description="how long to wait at the end of a run for pending MLflow requests"
    )


class TrackingConfig(Section):
    tensorboard: bool = Field(True, description="write TensorBoard event files")
    mlflow: MlflowConfig = Field(MlflowConfig(), description="MLflow")
    sinks: list[Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]] = Field(
        [], description="additional event sinks, package.module:Class"
    )
    log_every_steps: int = Field(10, ge=1, description="log training metrics every N steps")
    record_ids: bool = Field(
        False, description="write the ids of all records read, trained and left over (large)"
    )


class Config(Section):
    """Anywhere: one job. Frozen; created by `stoker.config.loading.load`."""

    name: Name = Field(
        "job",
        description="name of the job and prefix of its run directory: up to 63 letters, digits, - _ and .,"
        " beginning with a letter or digit",
    )
    output_dir: Folder = Field("runs", description="parent folder of run directories")
    seed: int = Field(0, ge=0, description="seed of weights, order and augmentation")
    recipe: str = Field(
        "stoker.image_classification:ImageClassification",
        description="import path of the recipe, package.module:Class",
    )
    script: Folder | None = Field(
        None,
        description="your own training script, run unchanged on every train worker instead of a recipe",
    )
    args: list[str] = Field([], description="arguments of the script; on the command line, after --")
    params: dict[str, Any] = Field(
        {}, description="parameters of the recipe (submit.py CONFIG --show-config lists them)"
    )
    data: DataConfig = Field(DataConfig(), description="reading and preprocessing")
    train: TrainConfig = Field(TrainConfig(), description="the training loop")
    cluster: ClusterConfig = Field(ClusterConfig(), description="forming the Ray cluster")
    checkpoint: CheckpointConfig = Field(
        CheckpointConfig(), description="writing, keeping and resuming from checkpoints"
    )
    tracking: TrackingConfig = Field(TrackingConfig(), description="metrics and logs")
    export: list[Literal["safetensors", "torch_export", "onnx", "torchscript"]] = Field(
        ["safetensors"],
        description="formats of the final model; each is written, loaded back and compared",
    )
    sagemaker: SageMakerConfig = Field(SageMakerConfig(), description="--on sagemaker")
    vertex: VertexConfig = Field(VertexConfig(), description="--on vertex")
    rehearsal: RehearsalConfig = Field(RehearsalConfig(), description="--on rehearsal")
    slurm: SlurmConfig = Field(SlurmConfig(), description="--on slurm")

    @field_validator("args")
    @classmethod
    def _of_a_script(cls, args: list[str], info: ValidationInfo) -> list[str]:
        if args and not info.data.get("script"):
            raise ValueError("args require a script; name it with script=train.py")
        return args


SCRIPT_KEYS = {
    "data": ("prepare",),
    "train": ("workers", "max_failures", "threads"),
    "checkpoint": ("dir", "resume"),
    "tracking": ("tensorboard", "mlflow", "sinks"),
    **dict.fromkeys(("recipe", "seed", "export"), ()),
}
"""Keys of recipe-specific sections that also apply to script jobs."""


def for_scripts(section: str, key: str) -> bool:
    """Anywhere: whether a key of a section (or, without one, the section itself) applies to script jobs."""
    return section not in SCRIPT_KEYS or key in SCRIPT_KEYS[section]
