"""Anywhere: configuration of the places: SageMaker, Vertex AI, their rehearsal, and Slurm."""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    StringConstraints,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from stoker.config.values import expanded, members, true_as_number

Folder = Annotated[str, StringConstraints(min_length=1), AfterValidator(expanded)]
"""A path or URI, in which `~` and `$VARIABLES` are expanded."""


def key(default: Any, description: str, **limits: Any) -> Any:
    """A field with a default. `--show-config` prints the description, so write it for the user."""
    return Field(default, description=description, **limits)


def _must_be(choice: str) -> WrapValidator:
    def checked(value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except ValueError:
            raise ValueError(f"must be {choice}") from None

    return WrapValidator(checked)


Remainder = Annotated[
    Literal["drop", "pad"] | PositiveInt, _must_be("drop, pad or a number from 1")
]
Delay = Annotated[
    NonNegativeFloat | Literal["never"], _must_be("a number of seconds from 0, or never")
]


class Section(BaseModel):
    """A frozen section of the configuration that rejects unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        ser_json_bytes="base64",
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_choice(cls, values: Any) -> Any:
        """Where `none` is a choice, null means it, too."""
        if not isinstance(values, dict):
            return values
        choices = {
            name for name, field in cls.model_fields.items() if "none" in get_args(field.annotation)
        }
        return {k: "none" if v is None and k in choices else v for k, v in values.items()}

    @field_validator("*", mode="before")
    @classmethod
    def _says_something(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes true for 1; false passes as 0, because YAML reads `off` as false. An empty text, as of
        `key=$UNSET`, would count as not set."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if true_as_number(value, kind):
            raise ValueError("must be a number")
        if value == "" and str in (kinds := [*members(kind)]):
            raise ValueError("must not be empty" + ("; null for none" if NoneType in kinds else ""))
        return value


class HostsConfig(Section):
    type: str | None = key(None, "instance type, such as ml.g5.2xlarge; null: no such hosts")
    count: int = key(1, "number of instances")


class GpuHostsConfig(Section):
    type: str | list[str] | None = key(
        None,
        "instance type, such as ml.g5.2xlarge, or several to try in order while no capacity comes;"
        " null: no such hosts",
    )
    count: int = key(1, "number of instances")

    @property
    def types(self) -> list[str]:
        if isinstance(self.type, str):
            return [self.type]
        return self.type or []


class GroupConfig(Section):
    name: str = Field(description="instance group name")
    type: str = Field(description="instance type")
    count: int = key(1, "number of instances")


class ChannelConfig(Section):
    uri: str = Field(
        description="s3:// prefix that SageMaker mounts as a folder on the hosts",
        pattern="^s3://[^/]",
    )
    input_mode: Literal["File", "FastFile"] = key(
        "File", "File: copy before the job starts; FastFile: stream"
    )
    groups: list[str] = key([], "instance groups that get it; empty: all groups")


class SageMakerConfig(Section):
    region: str | None = key(None, "AWS region; default: the AWS profile's")
    role: str | None = key(None, "ARN of the job's role (docs/iam/job-role.json)")
    s3_uri: str | None = key(
        None,
        "s3://bucket/prefix for code, checkpoints and models; default: s3://sagemaker-REGION-ACCOUNT/stoker",
        pattern="^s3://[^/]",
    )
    image: str | None = key(None, "training image for every group; default: AWS PyTorch")
    gpu: GpuHostsConfig = key(GpuHostsConfig(), "hosts that train: group `gpu`")
    cpu: HostsConfig = key(HostsConfig(), "hosts that preprocess: group `cpu`")
    groups: list[GroupConfig] = key(
        [], "your own groups, [{name, type, count}], instead of gpu and cpu"
    )
    max_runtime_s: int = key(
        86_400,
        "SageMaker stops the job after this time, which bounds its cost",
        ge=1,
        le=28 * 86_400,
    )
    spot: bool = key(False, "use managed spot instances; the job restarts from the last checkpoint")
    max_wait_s: int | None = key(
        None, "spot: limit for waiting plus running; default: twice max_runtime_s"
    )
    max_retries: int | None = key(
        None, "times that SageMaker restarts the job after an internal error (1 to 30)"
    )
    keep_alive_s: int = key(
        0, "keep instances warm for the next job (one group only); idle time is billed"
    )
    volume_gb: int = key(
        100, "disk size of hosts without NVMe; must hold the data channels", ge=1, le=16_384
    )
    volume_kms_key: str | None = key(None, "KMS key for these disks")
    kms_key: str | None = key(None, "KMS key for code, uploaded data, model and output")
    subnets: list[str] = key([], "VPC subnets; requires security_groups")
    security_groups: list[str] = key(
        [], "VPC security groups; one must allow all TCP traffic from itself"
    )
    encrypt_traffic: bool = key(False, "encrypt traffic between hosts; slower")
    network_isolation: bool = key(
        False, "allow network traffic between hosts only; requires a wheels/ folder and channels"
    )
    environment: dict[str, str] = key({}, "environment variables; do not put secrets here")
    hyperparameters: dict[str, str | int | float | bool] = key(
        {}, "configuration keys exposed as SageMaker hyperparameters, for display and tuning"
    )
    tags: dict[str, str] = key({}, "tags of the job, for cost reports")
    prices: dict[str, Annotated[float, Field(ge=0)]] = key(
        {},
        "your own prices in $/h by instance type, or by group if the type is unknown: {ml.g5.xlarge: 1.2}",
    )
    channels: dict[str, ChannelConfig] = key(
        {}, "input channels, name → {uri, …}; each sets the recipe parameter of that name"
    )
    bucket_owner: str | None = key(
        None,
        "account that must own the bucket of s3_uri, 12 digits; default: the role's",
        pattern=r"^\d{12}$",
    )
    request: dict[str, Any] = key(
        {},
        "members to add to CreateTrainingJob that have no key here, such as a training plan, FSx or a"
        " private registry: {ResourceConfig: {TrainingPlanArn: …}} (docs/console.md)",
    )
    queue: str | None = key(
        None,
        "AWS Batch job queue for SageMaker training, by name or ARN, in which the job waits for its turn",
    )
    queue_request: dict[str, Any] = key(
        {},
        "members to add to SubmitServiceJob, such as {shareIdentifier: vision, schedulingPriority: 10}",
    )
    entry: Literal["container", "script-mode"] = key(
        "container",
        "container: plain entrypoint, any image; script-mode: the toolkit in AWS images",
    )


class VertexHostsConfig(Section):
    machine_type: str | None = key(None, "machine type, such as g2-standard-8; null: no hosts")
    accelerator: str | None = key(
        None, "GPU type, such as NVIDIA_L4; default: the one that is built into the machine type"
    )
    count: int | None = key(None, "GPUs per host; default: all of the machine type")
    replicas: int = key(1, "number of hosts")


class VertexPoolConfig(VertexHostsConfig):
    name: str = Field(description="group name; pools of one name are one group")


class VertexConfig(Section):
    project: str | None = key(None, "Google Cloud project; default: the credentials' project")
    region: str = key("us-central1", "region of the job; use a bucket in the same region")
    gcs_uri: str | None = key(
        None, "gs://bucket/prefix for code, uploaded data, checkpoints and models"
    )
    service_account: str | None = key(
        None, "account that the hosts act as (docs/iam/vertex-job.yaml); default: Vertex AI's own"
    )
    image: str | None = key(
        None, "container image for every host, with Python 3.11 to 3.13 and PyTorch"
    )
    gpu: VertexHostsConfig = key(VertexHostsConfig(), "hosts that train: group `gpu`")
    cpu: VertexHostsConfig = key(VertexHostsConfig(), "hosts that preprocess: group `cpu`")
    pools: list[VertexPoolConfig] = key(
        [], "your own worker pools, [{name, machine_type, …}], instead of gpu and cpu"
    )
    boot_disk_gb: int = key(100, "disk size of every host", ge=100, le=64_000)
    boot_disk_type: str = key("pd-ssd", "disk type: pd-ssd, pd-standard, hyperdisk-balanced …")
    max_runtime_s: int = key(
        86_400, "Vertex AI stops the job after this time, which bounds its cost", ge=1
    )
    spot: bool = key(False, "use Spot VMs; the job restarts from the last checkpoint")
    restart: bool = key(
        True, "restart the job from its last checkpoint when the service restarts one of its hosts"
    )
    persistent_resource: str | None = key(
        None, "id of a persistent resource with machines of these types"
    )
    network: str | None = key(None, "peered VPC network: projects/<number>/global/networks/<name>")
    kms_key: str | None = key(
        None, "key for the job's disks and data: projects/…/cryptoKeys/<name>"
    )
    tensorboard: str | None = key(
        None, "Vertex AI TensorBoard, projects/…/tensorboards/<id>; requires service_account"
    )
    labels: dict[str, str] = key({}, "labels of the job, for cost reports")
    environment: dict[str, str] = key({}, "environment variables; do not put secrets here")
    prices: dict[str, Annotated[float, Field(ge=0)]] = key(
        {}, "your own prices in $/h, by machine type or group: {g2-standard-8: 0.9}"
    )


class CpuHostsConfig(Section):
    min: int = key(0, "CPU hosts to request from the start", ge=0)
    max: int = key(
        0, "Ray clusters with an autoscaler: most CPU hosts to request; 0: request none", ge=0
    )
    target_wait_pct: float = key(
        2.0, "add CPU hosts while training waits longer than this for preprocessing", ge=0, lt=100
    )
    release_after_s: float = key(
        60.0, "let hosts go after they have not been needed for so long", gt=0
    )
    resource: str = key(
        "cpu_host", "custom Ray resource of which each CPU host's node type has 1", min_length=1
    )
    usd_per_hour: float | None = key(None, "price of a CPU host, $/h", ge=0)
    rest_usd_per_hour: float | None = key(
        None, "price of all other hosts of the cluster together, $/h", gt=0
    )

    @model_validator(mode="after")
    def _consistent(self) -> CpuHostsConfig:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is larger than max ({self.max})")
        if (self.usd_per_hour is None) != (self.rest_usd_per_hour is None):
            raise ValueError("set both usd_per_hour and rest_usd_per_hour, or neither")
        return self


class RehearsalConfig(Section):
    like: Literal["sagemaker", "vertex"] = key(
        "sagemaker", "the service whose hosts are emulated; vertex: a Vertex AI custom job"
    )
    hosts: str = key(
        "gpu=1,cpu=2",
        "emulated hosts, group=count[:instance type], in order: algo-1, algo-2, … on SageMaker",
    )
    entry: Literal["toolkit", "container"] = key(
        "toolkit",
        "SageMaker: the training toolkit starts train.py, or (container) train.py is process 1",
    )
    cpus: int = key(2, "CPUs per host that Ray may use", ge=1, le=1024)
    gpus: int = key(
        0,
        "GPUs per host that trains which Ray declares to a Ray script; no device is behind them",
        ge=0,
    )
    link_mbps: float | None = key(
        None, "bandwidth of each host's network link, each way; default: unlimited", gt=0
    )
    shm_mb: int = key(1024, "size of /dev/shm on each host", ge=1)
    join_delay: dict[str, Delay] = key(
        {}, "delay in seconds before a host joins, or never: {algo-3: 30}"
    )
    faults: Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = key(
        [], "faults to inject: kill:algo-3@20s, term:all@formed+5s; see docs/rehearsal.md"
    )
    timeout_s: float = key(3600, "kill the rehearsal after this time", gt=0)


class SlurmNodesConfig(Section):
    partition: str | None = key(None, "partition; null: the cluster's default")
    nodes: int = key(0, "number of nodes", ge=0)
    cpus: int | None = key(None, "CPUs per node; null: whole nodes (--exclusive)", ge=1)
    memory_gb: int | None = key(
        None, "memory per node; null: all of whole nodes, else the cluster's default", ge=1
    )
    constraint: str | None = key(None, "features that the nodes must have, such as a100&nvme")
    qos: str | None = key(None, "quality of service")
    extra: list[str] = key([], "further options of sbatch: [--reservation=spring]")


class SlurmGpuNodesConfig(SlurmNodesConfig):
    nodes: int = key(1, "number of nodes", ge=1)
    gpus: int = key(1, "GPUs per node", ge=1)
    gpu_type: str | None = key(None, "type of GPU as the cluster names it, such as a100")


class SlurmConfig(Section):
    gpu: SlurmGpuNodesConfig = key(SlurmGpuNodesConfig(), "nodes that train: group `gpu`")
    cpu: SlurmNodesConfig = key(SlurmNodesConfig(), "nodes that preprocess: group `cpu`")
    account: str | None = key(None, "account to charge")
    max_runtime_s: int | None = key(
        None, "time limit of each start; null: the partition's, at which Slurm kills the job", ge=1
    )
    stop_before_s: int = key(
        180, "how long before the time limit the run writes a checkpoint and stops", ge=1, le=65_535
    )
    restarts: int = key(
        20,
        "times that the job requeues itself at its time limit, to resume; 0: do not requeue, not even after"
        " a preemption",
        ge=0,
    )
    setup: list[str] = key(
        [],
        "shell lines that activate the job's Python environment on the nodes; empty: the one of this command",
    )
    container: Literal["none", "pyxis", "apptainer"] = key(
        "none", "what runs the image: Pyxis (srun --container-image) or Apptainer"
    )
    image: Folder | None = key(None, "container image with the job's requirements")
    mounts: list[Folder] = key(
        [], "folders that the container sees besides the run directory, /path or /path:/inside"
    )

    @model_validator(mode="after")
    def _container_is_whole(self) -> SlurmConfig:
        if (self.container == "none") != (self.image is None):
            raise ValueError("container and image require each other")
        if self.mounts and self.container == "none":
            raise ValueError("mounts require a container")
        return self
