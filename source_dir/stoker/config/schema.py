"""Anywhere: the configuration's keys, and the packages that only some jobs need; imports none of them."""

from __future__ import annotations

import importlib.util
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
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
    key,
)
from stoker.errors import UsageError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


def tracking_uri(uri: str) -> str:
    """Rejects what is not a server URI, and URIs with credentials, which would end up in logs."""
    if re.match(r"[\w.-]+:\d+(/|$)", uri):
        raise ValueError(f"must be an address: http://{uri}")
    if "@" in uri.partition("://")[2].partition("/")[0]:
        raise ValueError(
            "contains a user name or password; remove them and set MLFLOW_TRACKING_USERNAME and"
            " MLFLOW_TRACKING_PASSWORD in the environment"
        )
    return uri


class DataConfig(Section):
    prepare: str | None = key(
        None, "import path of a function that creates the data if it is missing (laptop)"
    )
    shuffle: bool = key(True, "reshuffle the training records every epoch")
    order: Literal["any", "exact"] = key(
        "any", "any: batches in order of arrival; exact: the same seeded order in every run"
    )
    block_records: int = key(
        256, "records that a chain worker preprocesses and sends as one block", ge=1
    )
    bucket_by: str | None = key(
        None, "column; sorts rows of similar length together within a block to reduce padding"
    )
    remainder: Remainder = key(
        "drop",
        "records left over when an epoch does not divide evenly: drop them, or pad by repeating some; a"
        " number N: also drop a last batch of fewer than N records per train worker",
    )
    bad_record_budget: float = key(
        0.001, "fail the run above this fraction of unreadable records", ge=0, le=1
    )
    preprocess_on: list[str] = key([], "instance groups that preprocess; empty: all hosts")
    prefetch_s: float = key(2.0, "seconds of training to prefetch in each train worker", gt=0)
    prefetch_mb: int = key(512, "memory limit for prefetched batches, MB", ge=1)
    transport: Literal["direct", "ray"] = key(
        "direct",
        "direct: train workers fetch rows over sockets from the hosts that produced them; ray: those hosts"
        " answer through Ray, for networks that let only Ray's ports through",
    )
    cache: Literal["none", "memory", "disk"] = key(
        "none",
        "cache the output of the stages before the first random one (such as decoded images) across epochs,"
        " in shared memory or on disk",
    )
    cache_gb: float | None = key(
        None, "cache size per host, GB; null: half of the free space", gt=0
    )
    cache_share: float | None = key(
        None,
        "share of the records to cache, chosen by key; null: what fits on the hosts present at the start",
        gt=0,
        le=1,
    )
    cache_folder: Folder | None = key(
        None, "absolute path for cache: disk on each host; null: the temporary folder"
    )
    max_pixels: int = key(
        100_000_000,
        "largest image, width × height; larger images are quarantined without decoding",
        ge=1,
    )
    stall_timeout_s: float = key(
        600, "fail if a train worker waits longer than this for its next batch", gt=0
    )

    @model_validator(mode="after")
    def _cache_is_whole(self) -> DataConfig:
        for name in ("cache_gb", "cache_share"):
            if self.cache == "none" and getattr(self, name) is not None:
                raise ValueError(f"{name} requires cache: memory or cache: disk")
        if self.cache_folder is not None and (self.cache != "disk" or self.cache_folder[:1] != "/"):
            raise ValueError("cache_folder requires cache: disk and an absolute path")
        return self


class EarlyStoppingConfig(Section):
    monitor: str | None = key(
        None, "metric to check after each epoch, such as val/loss; null: train all epochs"
    )
    mode: Literal["auto", "min", "max"] = key(
        "auto",
        "whether lower or higher is better; auto: as the torchmetrics metric says, min for a name that ends in"
        " loss; any other metric needs min or max",
    )
    min_delta: float = key(0.0, "an improvement must exceed this", ge=0)
    patience: int = key(3, "stop after this many epochs without improvement", ge=0)
    stopping_threshold: float | None = key(None, "stop once the metric is better than this")

    @model_validator(mode="after")
    def _needs_a_metric(self) -> EarlyStoppingConfig:
        rest = {name: value for name, value in self.model_dump().items() if name != "monitor"}
        defaults = {name: type(self).model_fields[name].default for name in rest}
        if self.monitor is None and rest != defaults:
            raise ValueError("monitor is required: the metric to watch, for example val/loss")
        return self


class TrainConfig(Section):
    epochs: int = key(10, "passes over the training records", ge=1)
    max_steps: int | None = key(None, "stop after this many steps", ge=1)
    batch_size: int = key(64, "records per train worker and step", ge=1)
    workers: int | None = key(
        None, "number of train workers; default: one per GPU, or one without GPUs", ge=1
    )
    strategy: str = key(
        "ddp",
        "ddp: replicate the model; fsdp: shard it; or your own package.module:function",
        pattern=r"^(ddp|fsdp|[\w.]+:\w+)$",
    )
    threads: int | None = key(
        None, "CPU threads per train worker; default: an equal share of the host's cores", ge=1
    )
    precision: Literal["fp32", "bf16", "fp16"] = key(
        "fp32", "autocast precision of forward and backward; fp16 uses a gradient scaler"
    )
    accumulate_steps: int = key(1, "batches per optimiser step; their gradients are averaged", ge=1)
    clip_grad_norm: float | None = key(None, "clip the global gradient norm to this value", gt=0)
    channels_last: bool = key(False, "use channels-last memory format for images and convolutions")
    compile: bool = key(False, "torch.compile the model: faster steps after minutes of compilation")
    ema_decay: float | None = key(
        None,
        "decay of an exponential moving average of the weights, used to validate and export",
        gt=0,
        lt=1,
    )
    optimizer: str = key("sgd", "timm optimiser: sgd, adamw, lamb, …")
    lr: float = key(0.01, "learning rate", gt=0)
    momentum: float = key(0.9, "momentum, if the optimiser has it", ge=0, lt=1)
    weight_decay: float = key(0.0, "weight decay", ge=0)
    layer_decay: float | None = key(
        None,
        "layer-wise decay: each layer's learning rate as a fraction of the next layer's",
        gt=0,
        le=1,
    )
    scale_lr: Literal["none", "linear", "sqrt"] = key(
        "none", "scale lr by train workers × accumulate_steps, or by the square root of that"
    )
    scheduler: Literal["none", "cosine", "step", "linear"] = key(
        "none", "learning rate schedule, per step"
    )
    warmup_epochs: float = key(
        0, "epochs of linear warm-up; with scale_lr, from lr to the scaled rate", ge=0
    )
    label_smoothing: float = key(0.0, "share of each target spread over all classes", ge=0, lt=1)
    mixup: float = key(0.0, "mixup alpha, on the device; 0: off; 0.2 is common", ge=0)
    cutmix: float = key(
        0.0, "CutMix alpha, on the device; 0: off; with mixup, each batch uses one of them", ge=0
    )
    max_failures: int = key(
        0, "times to restart from the last checkpoint after a train worker dies", ge=0
    )
    early_stopping: EarlyStoppingConfig = key(
        EarlyStoppingConfig(), "stop when a metric no longer improves"
    )


class ClusterConfig(Section):
    gpu_group: str | None = key(None, "instance group that trains; default: the group with GPUs")
    join_timeout_s: float = key(
        600,
        "how long the head waits for other hosts: one that never joins costs the GPU hosts this time, one"
        " that is lost while it joins a minute",
        gt=0,
    )
    min_cpu_hosts: int | None = key(
        None,
        "CPU hosts to start with after join_timeout_s, or if the others are lost; default: all",
        ge=0,
    )
    cpu_hosts: CpuHostsConfig = key(
        CpuHostsConfig(), "CPU hosts that the cluster's autoscaler adds and removes"
    )
    port: int = key(6379, "port of the Ray head", ge=1024, le=65535)
    cpus: int | None = key(None, "local runs: CPUs to use; default: all it may use", ge=1)
    object_store_mb: int | None = key(
        None, "size of the Ray object store per host; default: as much as /dev/shm allows", ge=80
    )
    dashboard: bool = key(
        False,
        "local, sagemaker: Ray's dashboard on the head's 127.0.0.1; it asks for the run's token",
    )


class CheckpointConfig(Section):
    dir: Folder | None = key(
        None, "folder, s3:// or gs:// prefix for checkpoints; default: checkpoints/ of the run"
    )
    resume: Folder | None = key(
        None,
        "default: the newest complete checkpoint of this job in dir; auto: that of any job; never;"
        " or a path, s3:// or gs:// prefix",
    )
    every_steps: int | None = key(
        None, "also write a checkpoint every N steps within an epoch", ge=1
    )
    keep: int = key(2, "number of most recent checkpoints to keep for resuming", ge=1)
    save_top_k: int = key(
        1, "also keep the best K checkpoints by `monitor`; 0: none; -1: all with the metric", ge=-1
    )
    monitor: str = key(
        "auto",
        "metric that selects the best; auto: that of early stopping, or else val/acc1, val/loss or"
        " train/loss",
    )
    mode: Literal["auto", "min", "max"] = key(
        "auto",
        "whether lower or higher is better; auto: as the torchmetrics metric says, min for a name that ends in"
        " loss; any other metric needs min or max",
    )


class MlflowConfig(Section):
    uri: Annotated[str, AfterValidator(tracking_uri)] | None = key(
        None, "MLflow tracking server: http(s)://…, databricks, an ARN; null: MLflow is off"
    )
    experiment: str | None = key(None, "experiment name; default: the job's name")
    run_name: str | None = key(None, "run name; default: the run directory's name")
    registered_model: str | None = key(
        None, "register the final model under this name, exported with torch_export"
    )
    system_metrics: bool = key(True, "log the CPU utilisation of every host")
    tags: dict[str, str] = key({}, "tags of the run")
    timeout_s: int = key(10, "timeout of a request; training never waits for it", ge=1)
    close_timeout_s: float = key(
        120, "how long to wait at the end of a run for pending MLflow requests", gt=0
    )


class TrackingConfig(Section):
    tensorboard: bool = key(True, "write TensorBoard event files")
    mlflow: MlflowConfig = key(MlflowConfig(), "MLflow")
    sinks: list[Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]] = key(
        [], "additional event sinks, package.module:Class"
    )
    log_every_steps: int = key(10, "log training metrics every N steps", ge=1)
    record_ids: bool = key(
        False, "write the ids of all records read, trained and left over (large)"
    )


class Config(Section):
    """One job. Frozen; created by `stoker.config.loading.load`."""

    name: Name = key(
        "job",
        "name of the job and prefix of its run directory: up to 63 letters, digits, - _ and ., beginning"
        " with a letter or digit",
    )
    output_dir: Folder = key("runs", "parent folder of run directories")
    seed: int = key(0, "seed of weights, order and augmentation", ge=0)
    recipe: str = key(
        "stoker.image_classification:ImageClassification",
        "import path of the recipe, package.module:Class",
    )
    script: Folder | None = key(
        None, "your own training script, run unchanged on every train worker instead of a recipe"
    )
    driver: bool = key(
        False,
        "the script is a Ray driver (its own ray.data and TorchTrainer): start it once, on the head, with the"
        " whole cluster free for it, instead of once per GPU",
    )
    args: list[str] = key([], "arguments of the script; on the command line, after --")
    params: dict[str, Any] = key(
        {}, "parameters of the recipe (submit.py CONFIG --show-config lists them)"
    )
    data: DataConfig = key(DataConfig(), "reading and preprocessing")
    train: TrainConfig = key(TrainConfig(), "the training loop")
    cluster: ClusterConfig = key(ClusterConfig(), "forming the Ray cluster")
    checkpoint: CheckpointConfig = key(
        CheckpointConfig(), "writing, keeping and resuming from checkpoints"
    )
    tracking: TrackingConfig = key(TrackingConfig(), "metrics and logs")
    export: list[Literal["safetensors", "torch_export", "onnx", "torchscript"]] = key(
        ["safetensors"], "formats of the final model; each is written, loaded back and compared"
    )
    sagemaker: SageMakerConfig = key(SageMakerConfig(), "--on sagemaker")
    vertex: VertexConfig = key(VertexConfig(), "--on vertex")
    rehearsal: RehearsalConfig = key(RehearsalConfig(), "--on rehearsal")
    slurm: SlurmConfig = key(SlurmConfig(), "--on slurm")

    @field_validator("args", "driver")
    @classmethod
    def _of_a_script(cls, given: Any, info: ValidationInfo) -> Any:
        if given and not info.data.get("script"):
            raise ValueError("requires a script; name it with script=train.py")
        return given

    @field_validator("rehearsal")
    @classmethod
    def _of_a_driver(cls, rehearsal: RehearsalConfig, info: ValidationInfo) -> RehearsalConfig:
        if rehearsal.gpus and not info.data.get("driver"):
            raise ValueError("gpus requires a Ray script (driver: true): no device is behind them")
        return rehearsal


SCRIPT_KEYS = {
    "data": ("prepare",),
    "train": ("workers", "max_failures", "threads"),
    "checkpoint": ("dir", "resume"),
    "tracking": ("tensorboard", "mlflow", "sinks"),
    **dict.fromkeys(("recipe", "seed", "export"), ()),
}


NOT_FOR_DRIVERS = ("train.workers", "train.threads", "cluster.cpu_hosts")


def for_scripts(section: str, key: str, driver: bool = False) -> bool:
    if driver and f"{section}.{key}" in NOT_FOR_DRIVERS:
        return False
    return section not in SCRIPT_KEYS or key in SCRIPT_KEYS[section]


ONNX = {"onnx": "onnx>=1.19", "onnxscript": "onnxscript>=0.5", "onnxruntime": "onnxruntime>=1.22"}
MLFLOW = {"mlflow": "mlflow-skinny>=3"}
MANAGED = {"sagemaker_mlflow": "sagemaker-mlflow>=0.2"}
DATABASE = {"mlflow": "mlflow>=3", "sqlalchemy": "mlflow>=3"}
DASHBOARD = dict.fromkeys(("aiohttp_cors", "opencensus", "prometheus_client"), "ray[default]")


def _needed(config: Config) -> dict[str, dict[str, str]]:
    """The packages beyond `requirements.txt`: key that asks for them → module → line of that file."""
    uri = config.tracking.mlflow.uri
    beyond_skinny = {"sqlite": DATABASE, "arn": MANAGED}.get((uri or "").partition(":")[0], {})
    wanted = {
        "export: onnx": ONNX if "onnx" in config.export else {},
        "tracking.mlflow.uri": MLFLOW | beyond_skinny if uri else {},
        "cluster.dashboard": DASHBOARD if config.cluster.dashboard else {},
    }
    return {asked: modules for asked, modules in wanted.items() if modules}


def requirement_lines(config: Config) -> list[str]:
    lines = (line for modules in _needed(config).values() for line in modules.values())
    return list(dict.fromkeys(lines))


def refuse_missing(config: Config) -> None:
    problems = []
    for asked, modules in _needed(config).items():
        absent = [
            line for module, line in modules.items() if importlib.util.find_spec(module) is None
        ]
        if absent:
            words = " ".join(f"'{line}'" for line in dict.fromkeys(absent))
            problems.append(
                f"{asked} needs packages that are not installed here: pip install {words}"
            )
    if problems:
        raise UsageError(*problems)
