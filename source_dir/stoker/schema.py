"""The configuration's keys, types, defaults and meanings; loads neither ray nor torch.

Every description is what `--show-config` prints, so it is written for the user.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stoker.schema_places import RehearsalConfig, SageMakerConfig, Section

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


def without_password(uri: str) -> str:
    """Anywhere: refuse an address that carries credentials: it is written to files and logs."""
    if "@" in uri.partition("://")[2].partition("/")[0]:
        raise ValueError(
            "holds a user name or password; leave them out and set MLFLOW_TRACKING_USERNAME and"
            " MLFLOW_TRACKING_PASSWORD in the environment"
        )
    return uri


class DataConfig(Section):
    prepare: str | None = Field(
        None, description="import path of a function that writes the data where it is absent (laptop)"
    )
    shuffle: bool = Field(True, description="permute the training records anew in every epoch")
    order: Literal["any", "exact"] = Field(
        "any", description="any: whatever is ready first; exact: the seeded order, always the same"
    )
    block_records: int = Field(
        256, ge=1, description="records that one chain worker preprocesses and sends together"
    )
    bucket_by: str | None = Field(
        None,
        description="padded column: rows of similar length follow each other within a block, so that batches"
        " need less padding",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="most rows × padded length that a train worker computes at once: it divides a larger"
        " batch and adds up the gradients; a longer record is quarantined; null: no limit",
    )
    remainder: Literal["drop", "pad"] = Field(
        "drop", description="the last few records that cannot be shared evenly: drop or repeat some"
    )
    bad_record_budget: float = Field(
        0.001, ge=0, le=1, description="largest fraction of unreadable records before the run fails"
    )
    preprocess_on: list[str] = Field([], description="host groups that may preprocess; empty: every host")
    prefetch_s: float = Field(
        2.0, gt=0, description="seconds of training for which batches are kept ready in each train worker"
    )
    prefetch_mb: int = Field(512, ge=1, description="most memory that these batches take")
    transport: Literal["direct", "ray"] = Field(
        "direct",
        description="direct: train workers fetch rows from the hosts that made them; ray: whole blocks come"
        " through Ray's object store",
    )
    cache: Literal["none", "memory", "disk"] = Field(
        "none",
        description="where hosts keep, across epochs, what the chain makes of a record before its first"
        " random stage (decoded images, say): shared memory or a disk",
    )
    cache_gb: float | None = Field(
        None, gt=0, description="most gigabytes kept on each host; null: half of what is free there"
    )
    cache_folder: str | None = Field(
        None, description="with cache: disk, an absolute folder on each host; null: where Ray keeps its files"
    )
    max_pixels: int = Field(
        100_000_000,
        ge=1,
        description="largest image, width × height; a larger one is quarantined before it is decoded",
    )
    stall_timeout_s: float = Field(
        600, gt=0, description="fail when a train worker waits longer than this for its next batch"
    )

    @model_validator(mode="after")
    def _cache_is_whole(self) -> DataConfig:
        if self.cache == "none" and self.cache_gb is not None:
            raise ValueError("cache_gb needs cache, too: memory or disk")
        if self.cache_folder is not None and (self.cache != "disk" or self.cache_folder[:1] != "/"):
            raise ValueError("cache_folder needs cache: disk, and must be absolute")
        return self


class EarlyStoppingConfig(Section):
    monitor: str | None = Field(
        None, description="metric to watch after each epoch, val/loss say; null: train all epochs"
    )
    mode: Literal["auto", "min", "max"] = Field(
        "auto", description="whether less or more of it is better; auto: by the metric's name"
    )
    min_delta: float = Field(0.0, ge=0, description="an improvement must be larger than this")
    patience: int = Field(3, ge=0, description="epochs without improvement before the run stops")
    stopping_threshold: float | None = Field(
        None, description="stop as soon as the metric is better than this"
    )

    @model_validator(mode="after")
    def _needs_a_metric(self) -> EarlyStoppingConfig:
        rest = {name: value for name, value in self.model_dump().items() if name != "monitor"}
        defaults = {name: type(self).model_fields[name].default for name in rest}
        if self.monitor is None and rest != defaults:
            raise ValueError("monitor is needed, too: the metric to watch, for example val/loss")
        return self


class TrainConfig(Section):
    epochs: int = Field(10, ge=1, description="passes over the training records")
    max_steps: int | None = Field(None, ge=1, description="stop after this many steps, whatever the epoch")
    batch_size: int = Field(64, ge=1, description="records per train worker and step")
    workers: int | None = Field(
        None, ge=1, description="train workers; default: one per GPU, or one where there is no GPU"
    )
    strategy: str = Field(
        "ddp",
        pattern=r"^(ddp|fsdp|[\w.]+:\w+)$",
        description="ddp: each train worker holds the whole model; fsdp: a shard; package.module:function",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of a train worker; default: the host's cores, shared"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="arithmetic of forward and backward (autocast); fp16 with a gradient scaler"
    )
    accumulate_steps: int = Field(
        1, ge=1, description="batches per optimiser step: their gradients are averaged"
    )
    clip_grad_norm: float | None = Field(None, gt=0, description="largest norm of the whole gradient")
    channels_last: bool = Field(False, description="images and convolutions in channels-last memory order")
    compile: bool = Field(False, description="torch.compile the model; minutes of start for faster steps")
    ema_decay: float | None = Field(
        None, gt=0, lt=1, description="average the weights over steps; validate and export the average"
    )
    optimizer: str = Field("sgd", description="a timm optimiser: sgd, adamw, lamb, …")
    lr: float = Field(0.01, gt=0, description="learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum, where the optimiser has one")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    layer_decay: float | None = Field(
        None, gt=0, le=1, description="learning rate of a layer, as a fraction of the next layer's"
    )
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="multiply lr by train workers × accumulate_steps, or by its square root"
    )
    scheduler: Literal["none", "cosine", "step", "linear"] = Field(
        "none", description="learning rate schedule, per step"
    )
    warmup_epochs: float = Field(
        0, ge=0, description="epochs of linear warm-up; with scale_lr from lr to the scaled rate"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of each target given to all classes")
    mixup: float = Field(0.0, ge=0, description="alpha of mixup on the device; 0: none; 0.2 is usual")
    cutmix: float = Field(
        0.0, ge=0, description="alpha of CutMix on the device; 0: none; with mixup, one of both per batch"
    )
    max_failures: int = Field(
        0, ge=0, description="restarts from the last checkpoint after a train worker has died"
    )
    early_stopping: EarlyStoppingConfig = Field(
        EarlyStoppingConfig(), description="end before the last epoch where nothing improves any more"
    )


class ClusterConfig(Section):
    gpu_group: str | None = Field(
        None, description="instance group that trains; default: the one whose type has GPUs"
    )
    join_timeout_s: float = Field(600, gt=0, description="how long the head waits for the other hosts")
    min_cpu_hosts: int | None = Field(
        None, ge=0, description="start with at least this many CPU hosts; default: wait for all"
    )
    port: int = Field(6379, ge=1024, le=65535, description="port of the Ray head")
    cpus: int | None = Field(
        None, ge=1, description="local runs: CPUs to use; default: every core of this machine"
    )
    object_store_mb: int | None = Field(
        None, ge=80, description="Ray object store per host; default: what /dev/shm allows"
    )
    dashboard: bool = Field(
        False, description="local runs: Ray's dashboard on 127.0.0.1, entered with the run's token"
    )


class CheckpointConfig(Section):
    dir: str | None = Field(
        None, description="folder or s3:// prefix for checkpoints; default: checkpoints/ of the run"
    )
    resume: str = Field(
        "auto",
        description="auto: go on from the newest whole checkpoint in dir; never; or a path, s3:// prefix",
    )
    every_steps: int | None = Field(
        None, ge=1, description="also within an epoch: one checkpoint each so many steps"
    )
    every_minutes: float | None = Field(
        None, gt=0, description="also within an epoch: one checkpoint each so many minutes"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints kept, to go on from")
    save_top_k: int = Field(
        1, ge=-1, description="best checkpoints by `monitor` kept besides; 0: none, -1: all that have it"
    )
    monitor: str = Field(
        "auto", description="metric that chooses the best; auto: val/acc1, val/loss or train/loss"
    )
    mode: Literal["auto", "min", "max"] = Field(
        "auto", description="whether less or more of the monitored metric is better"
    )


class MlflowConfig(Section):
    uri: Annotated[str, AfterValidator(without_password)] | None = Field(
        None, description="MLflow tracking server: http(s)://…, databricks, an ARN; null: MLflow is off"
    )
    experiment: str | None = Field(None, description="experiment; default: the job's name")
    run_name: str | None = Field(None, description="name of the run; default: the run directory's")
    registered_model: str | None = Field(
        None, description="register the final model under this name; it is exported with torch_export"
    )
    system_metrics: bool = Field(True, description="send the CPU use of every host")
    tags: dict[str, str] = Field({}, description="tags of the run")
    timeout_s: int = Field(10, ge=1, description="deadline of one request; training never waits for it")
    close_timeout_s: float = Field(
        120, gt=0, description="how long the end of a run waits for MLflow to take what is left"
    )


class TrackingConfig(Section):
    tensorboard: bool = Field(True, description="write TensorBoard event files")
    mlflow: MlflowConfig = Field(MlflowConfig(), description="MLflow")
    sinks: list[str] = Field([], description="further places for a run's events, package.module:Class")
    log_every_steps: int = Field(10, ge=1, description="steps between two logged training metrics")
    record_ids: bool = Field(
        False, description="write the ids of all read, trained and remaining records (large)"
    )


class Config(Section):
    """Anywhere: one job. Frozen; made by `stoker.config.load`."""

    name: Name = Field("job", description="names the job and its run directory")
    output_dir: str = Field("runs", description="where run directories are made")
    seed: int = Field(0, ge=0, description="seeds weights, order and augmentation")
    recipe: str = Field(
        "stoker.image_classification:ImageClassification",
        description="import path of the recipe, package.module:Class",
    )
    script: str | None = Field(
        None, description="a training script of your own, run as it is on every train worker; no recipe then"
    )
    args: list[str] = Field([], description="the script's arguments; on the command line after --")
    params: dict[str, Any] = Field(
        {}, description="the recipe's own parameters (submit.py CONFIG --show-config lists them)"
    )
    data: DataConfig = Field(DataConfig(), description="reading and preprocessing")
    train: TrainConfig = Field(TrainConfig(), description="the training loop")
    cluster: ClusterConfig = Field(ClusterConfig(), description="forming the Ray cluster")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="what is kept")
    tracking: TrackingConfig = Field(TrackingConfig(), description="metrics and logs")
    export: list[Literal["safetensors", "torch_export", "onnx", "torchscript"]] = Field(
        ["safetensors"],
        description="forms in which the final model is written, loaded again and compared",
    )
    sagemaker: SageMakerConfig = Field(SageMakerConfig(), description="--on sagemaker")
    rehearsal: RehearsalConfig = Field(RehearsalConfig(), description="--on rehearsal")

    @field_validator("args")
    @classmethod
    def _of_a_script(cls, args: list[str], info: ValidationInfo) -> list[str]:
        if args and not info.data.get("script"):
            raise ValueError("only a script takes arguments; name it: script=train.py")
        return args
