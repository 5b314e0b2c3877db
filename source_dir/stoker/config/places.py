"""Configuration of the places: SageMaker, Vertex AI, their rehearsal, and Slurm."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from stoker.config.values import expanded

Folder = Annotated[str, StringConstraints(min_length=1), AfterValidator(expanded)]
"""A path or URI, in which `~` and `$VARIABLES` are expanded."""


def _one_error(value: Any, validate: Any) -> Any:
    try:
        return validate(value)
    except ValueError:
        raise ValueError("must be drop, pad or a number of records from 1") from None


Remainder = Annotated[Literal["drop", "pad"] | Annotated[int, Field(ge=1)], WrapValidator(_one_error)]


class Section(BaseModel):
    """Anywhere: a frozen section of the configuration that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_choice(cls, values: Any) -> Any:
        """Where `none` is a choice, null means it, too."""
        if not isinstance(values, dict):
            return values
        choices = {name for name, field in cls.model_fields.items() if "none" in get_args(field.annotation)}
        return {k: "none" if v is None and k in choices else v for k, v in values.items()}

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes true for 1. False passes as 0, because YAML reads `off` as false."""
        field = cls.model_fields[str(info.field_name)]
        if value is True and {int, float} & {field.annotation, *get_args(field.annotation)}:
            raise ValueError("must be a number")
        return value


class HostsConfig(Section):
    type: str | None = Field(None, description="instance type, such as ml.g5.2xlarge; null: no such hosts")
    count: int = Field(1, description="number of instances")


class GroupConfig(Section):
    name: str = Field(description="instance group name")
    type: str = Field(description="instance type")
    count: int = Field(1, description="number of instances")


class ChannelConfig(Section):
    uri: str = Field(description="s3:// prefix that SageMaker mounts as a folder on the hosts")
    input_mode: str = Field("File", description="File: copy before the job starts; FastFile: stream")
    groups: list[str] = Field([], description="instance groups that get it; empty: all groups")
    content_type: str | None = Field(None, description="MIME type, passed to SageMaker")
    distribution: str = Field("FullyReplicated", description="FullyReplicated: every host gets every object")


class SageMakerConfig(Section):
    region: str | None = Field(None, description="AWS region; default: the AWS profile's")
    role: str | None = Field(None, description="ARN of the job's role (docs/iam/job-role.json)")
    s3_uri: str | None = Field(
        None,
        description="prefix for code, checkpoints and models; default: s3://sagemaker-REGION-ACCOUNT/stoker",
    )
    image: str | None = Field(None, description="training image for every group; default: AWS PyTorch")
    gpu: HostsConfig = Field(HostsConfig(), description="hosts that train: group `gpu`")
    cpu: HostsConfig = Field(HostsConfig(), description="hosts that preprocess: group `cpu`")
    groups: list[GroupConfig] = Field(
        [], description="your own groups, [{name, type, count}], instead of gpu and cpu"
    )
    max_runtime_s: int = Field(
        86_400, description="SageMaker stops the job after this time, which bounds its cost"
    )
    spot: bool = Field(
        False, description="use managed spot instances; the job restarts from the last checkpoint"
    )
    max_wait_s: int | None = Field(
        None, description="spot: limit for waiting plus running; default: twice max_runtime_s"
    )
    max_retries: int | None = Field(
        None, description="times that SageMaker restarts the job after an internal error (1 to 30)"
    )
    keep_alive_s: int = Field(
        0, description="keep instances warm for the next job (one group only); idle time is billed"
    )
    volume_gb: int = Field(100, description="disk size of hosts without NVMe; must hold the data channels")
    volume_kms_key: str | None = Field(None, description="KMS key for these disks")
    kms_key: str | None = Field(None, description="KMS key for code, uploaded data, model and output")
    subnets: list[str] = Field([], description="VPC subnets; requires security_groups")
    security_groups: list[str] = Field(
        [], description="VPC security groups; one must allow all TCP traffic from itself"
    )
    encrypt_traffic: bool = Field(False, description="encrypt traffic between hosts; slower")
    network_isolation: bool = Field(
        False, description="allow network traffic between hosts only; requires a wheels/ folder and channels"
    )
    environment: dict[str, str] = Field({}, description="environment variables; do not put secrets here")
    hyperparameters: dict[str, str | int | float | bool] = Field(
        {}, description="configuration keys exposed as SageMaker hyperparameters, for display and tuning"
    )
    tags: dict[str, str] = Field({}, description="tags of the job, for cost reports")
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {},
        description="your own prices in $/h by instance type, or by group if the type is unknown:"
        " {ml.g5.xlarge: 1.2}",
    )
    channels: dict[str, ChannelConfig] = Field(
        {}, description="input channels, name → {uri, …}; each sets the recipe parameter of that name"
    )
    bucket_owner: str | None = Field(
        None,
        pattern=r"^\d{12}$",
        description="account that must own the bucket of s3_uri, 12 digits; default: the role's",
    )
    request: dict[str, Any] = Field(
        {},
        description="members to add to CreateTrainingJob that have no key here, such as a training plan, FSx"
        " or a private registry: {ResourceConfig: {TrainingPlanArn: …}} (docs/console.md)",
    )
    entry: Literal["container", "script-mode"] = Field(
        "container",
        description="container: plain entrypoint, any image; script-mode: the toolkit in AWS images",
    )


class VertexHostsConfig(Section):
    machine_type: str | None = Field(None, description="machine type, such as g2-standard-8; null: no hosts")
    accelerator: str | None = Field(
        None, description="GPU type, such as NVIDIA_L4; default: the one that is built into the machine type"
    )
    count: int | None = Field(None, description="GPUs per host; default: all of the machine type")
    replicas: int = Field(1, description="number of hosts")


class VertexPoolConfig(VertexHostsConfig):
    name: str = Field(description="group name; pools of one name are one group")


class VertexConfig(Section):
    project: str | None = Field(None, description="Google Cloud project; default: the credentials' project")
    region: str = Field("us-central1", description="region of the job; use a bucket in the same region")
    gcs_uri: str | None = Field(
        None, description="gs://bucket/prefix for code, uploaded data, checkpoints and models"
    )
    service_account: str | None = Field(
        None, description="account that the hosts act as (docs/iam/vertex-job.yaml); default: Vertex AI's own"
    )
    image: str | None = Field(
        None, description="container image for every host, with Python 3.11 to 3.13 and PyTorch"
    )
    entry: Literal["container", "package"] = Field(
        "container",
        description="container: any image runs the code from /gcs; package: a Python package for Google's"
        " prebuilt containers",
    )
    gpu: VertexHostsConfig = Field(VertexHostsConfig(), description="hosts that train: group `gpu`")
    cpu: VertexHostsConfig = Field(VertexHostsConfig(), description="hosts that preprocess: group `cpu`")
    pools: list[VertexPoolConfig] = Field(
        [], description="your own worker pools, [{name, machine_type, …}], instead of gpu and cpu"
    )
    boot_disk_gb: int = Field(100, description="disk size of every host")
    boot_disk_type: str = Field("pd-ssd", description="disk type: pd-ssd, pd-standard, hyperdisk-balanced …")
    max_runtime_s: int = Field(
        86_400, description="Vertex AI stops the job after this time, which bounds its cost"
    )
    spot: bool = Field(False, description="use Spot VMs; the job restarts from the last checkpoint")
    restart: bool = Field(
        True,
        description="restart the job from its last checkpoint when the service restarts one of its hosts",
    )
    persistent_resource: str | None = Field(
        None, description="id of a persistent resource with machines of these types"
    )
    network: str | None = Field(
        None, description="peered VPC network: projects/<number>/global/networks/<name>"
    )
    kms_key: str | None = Field(
        None, description="key for the job's disks and data: projects/…/cryptoKeys/<name>"
    )
    tensorboard: str | None = Field(
        None, description="Vertex AI TensorBoard, projects/…/tensorboards/<id>; requires service_account"
    )
    labels: dict[str, str] = Field({}, description="labels of the job, for cost reports")
    environment: dict[str, str] = Field({}, description="environment variables; do not put secrets here")
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="your own prices in $/h, by machine type or group: {g2-standard-8: 0.9}"
    )


class CpuHostsConfig(Section):
    min: int = Field(0, ge=0, description="CPU hosts to request from the start")
    max: int = Field(
        0, ge=0, description="Ray clusters with an autoscaler: most CPU hosts to request; 0: request none"
    )
    target_wait_pct: float = Field(
        2.0, ge=0, lt=100, description="add CPU hosts while training waits longer than this for preprocessing"
    )
    release_after_s: float = Field(
        60.0, gt=0, description="let hosts go after they have not been needed for so long"
    )
    resource: str = Field(
        "cpu_host", min_length=1, description="custom Ray resource of which each CPU host's node type has 1"
    )
    usd_per_hour: float | None = Field(None, ge=0, description="price of a CPU host, $/h")
    on_demand_usd_per_hour: float | None = Field(
        None, ge=0, description="its on-demand price if it is a spot host, to report the saving"
    )
    rest_usd_per_hour: float | None = Field(
        None, gt=0, description="price of all other hosts of the cluster together, $/h"
    )

    @model_validator(mode="after")
    def _consistent(self) -> CpuHostsConfig:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is larger than max ({self.max})")
        if (self.usd_per_hour is None) != (self.rest_usd_per_hour is None):
            raise ValueError("set both usd_per_hour and rest_usd_per_hour, or neither")
        return self


class RehearsalConfig(Section):
    like: Literal["sagemaker", "vertex"] = Field(
        "sagemaker", description="the service whose hosts are emulated; vertex: a Vertex AI custom job"
    )
    hosts: str = Field(
        "gpu=1,cpu=2",
        description="emulated hosts, group=count[:instance type], in order: algo-1, algo-2, … on SageMaker",
    )
    entry: Literal["toolkit", "container"] = Field(
        "toolkit",
        description="SageMaker: the training toolkit starts train.py, or (container) train.py is process 1",
    )
    cpus: int = Field(2, ge=1, le=1024, description="CPUs per host that Ray may use")
    cpu_quota: float | None = Field(
        None, gt=0, description="CPU cores that each host may use; default: unlimited"
    )
    link_mbps: float | None = Field(
        None, gt=0, description="bandwidth of each host's network link, each way; default: unlimited"
    )
    shm_mb: int = Field(1024, ge=1, description="size of /dev/shm on each host")
    join_delay: dict[str, float | Literal["never"]] = Field(
        {}, description="delay in seconds before a host joins, or never: {algo-3: 30}"
    )
    faults: Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = Field(
        [], description="faults to inject: kill:algo-3@20s, term:all@formed+5s; see docs/rehearsal.md"
    )
    timeout_s: float = Field(3600, gt=0, description="kill the rehearsal after this time")


class SlurmNodesConfig(Section):
    partition: str | None = Field(None, description="partition; null: the cluster's default")
    nodes: int = Field(0, description="number of nodes")
    cpus: int | None = Field(None, ge=1, description="CPUs per node; null: whole nodes (--exclusive)")
    memory_gb: int | None = Field(
        None, ge=1, description="memory per node; null: all of whole nodes, else the cluster's default"
    )
    constraint: str | None = Field(None, description="features that the nodes must have, such as a100&nvme")
    qos: str | None = Field(None, description="quality of service")
    extra: list[str] = Field([], description="further options of sbatch: [--reservation=spring]")


class SlurmGpuNodesConfig(SlurmNodesConfig):
    nodes: int = Field(1, description="number of nodes")
    gpus: int = Field(1, description="GPUs per node")
    gpu_type: str | None = Field(None, description="type of GPU as the cluster names it, such as a100")


class SlurmConfig(Section):
    gpu: SlurmGpuNodesConfig = Field(SlurmGpuNodesConfig(), description="nodes that train: group `gpu`")
    cpu: SlurmNodesConfig = Field(SlurmNodesConfig(), description="nodes that preprocess: group `cpu`")
    account: str | None = Field(None, description="account to charge")
    max_runtime_s: int | None = Field(
        None, description="time limit of each start; null: the partition's, at which Slurm kills the job"
    )
    stop_before_s: int = Field(
        180, description="how long before the time limit the run writes a checkpoint and stops"
    )
    restarts: int = Field(
        20,
        ge=0,
        description="times that the job requeues itself at its time limit, to resume; 0: do not requeue,"
        " not even after a preemption",
    )
    setup: list[str] = Field(
        [],
        description="shell lines that activate the job's Python environment on the nodes; empty: the one"
        " of this command",
    )
    container: Literal["none", "pyxis", "apptainer"] = Field(
        "none", description="what runs the image: Pyxis (srun --container-image) or Apptainer"
    )
    image: Folder | None = Field(None, description="container image with the job's requirements")
    mounts: list[Folder] = Field(
        [], description="folders that the container sees besides the run directory, /path or /path:/inside"
    )

    @model_validator(mode="after")
    def _container_is_whole(self) -> SlurmConfig:
        if (self.container == "none") != (self.image is None):
            raise ValueError("container and image require each other")
        if self.mounts and self.container == "none":
            raise ValueError("mounts require a container")
        return self
