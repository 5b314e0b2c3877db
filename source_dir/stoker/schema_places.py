"""The keys of the places that the launcher sends jobs to: SageMaker, and its rehearsal."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Anywhere: a frozen group of keys that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_choice(cls, values: Any) -> Any:
        """YAML and the command line read `none` as nothing; where it is one of the choices, it is that."""
        if not isinstance(values, dict):
            return values
        choices = {name for name, field in cls.model_fields.items() if "none" in get_args(field.annotation)}
        return {k: "none" if v is None and k in choices else v for k, v in values.items()}


class HostsConfig(Section):
    type: str | None = Field(None, description="instance type, ml.g5.2xlarge; null: none of these")
    count: int = Field(1, description="how many of them")


class GroupConfig(Section):
    name: str = Field(description="instance group name")
    type: str = Field(description="instance type")
    count: int = Field(1, description="how many of them")


class ChannelConfig(Section):
    uri: str = Field(description="s3:// prefix that SageMaker shows to the hosts as a folder")
    input_mode: str = Field("File", description="File copies first, FastFile streams")
    groups: list[str] = Field([], description="instance groups that see it; empty: every group")
    content_type: str | None = Field(None, description="MIME type, passed on")
    distribution: str = Field("FullyReplicated", description="every host sees every object")


class SageMakerConfig(Section):
    region: str | None = Field(None, description="AWS region; default: the AWS profile's")
    role: str | None = Field(None, description="ARN of the job's role (docs/iam/job-role.json)")
    s3_uri: str | None = Field(
        None,
        description="where code, checkpoints and models go; default: s3://sagemaker-REGION-ACCOUNT/stoker",
    )
    image: str | None = Field(None, description="training image for every group; default: AWS PyTorch")
    gpu: HostsConfig = Field(HostsConfig(), description="the hosts that train: group `gpu`")
    cpu: HostsConfig = Field(HostsConfig(), description="the hosts that preprocess: group `cpu`")
    groups: list[GroupConfig] = Field(
        [], description="other groups, [{name, type, count}], instead of gpu and cpu"
    )
    max_runtime_s: int = Field(86_400, description="SageMaker stops the job after this; bounds its cost")
    spot: bool = Field(False, description="managed spot instances; restarts from the last checkpoint")
    max_wait_s: int | None = Field(
        None, description="spot: waiting and running together; default: twice max_runtime_s"
    )
    max_retries: int | None = Field(
        None, description="restarts by SageMaker after an internal error of its own (1 to 30)"
    )
    keep_alive_s: int = Field(
        0, description="keep instances warm for the next job (one group only); they cost meanwhile"
    )
    volume_gb: int = Field(100, description="disk of hosts without NVMe; data channels must fit")
    volume_kms_key: str | None = Field(None, description="KMS key of these disks")
    kms_key: str | None = Field(None, description="KMS key of code, uploaded data, model and output")
    subnets: list[str] = Field([], description="VPC subnets; with security_groups")
    security_groups: list[str] = Field(
        [], description="VPC security groups; one must allow all TCP from itself"
    )
    encrypt_traffic: bool = Field(False, description="encrypt between hosts; slower")
    network_isolation: bool = Field(
        False, description="no network but between hosts: needs a wheels/ folder and channels"
    )
    environment: dict[str, str] = Field({}, description="environment variables; nothing secret")
    hyperparameters: dict[str, str | int | float | bool] = Field(
        {}, description="configuration keys shown, and tuned, as SageMaker hyperparameters"
    )
    tags: dict[str, str] = Field({}, description="tags of the job, for cost reports")
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {},
        description="your own $/h by instance type, or by host group where the type is not known:"
        " {ml.g5.xlarge: 1.2}",
    )
    channels: dict[str, ChannelConfig] = Field(
        {}, description="input data, name → {uri, …}; replaces the recipe parameter of that name"
    )
    entry: Literal["container", "script-mode"] = Field(
        "container",
        description="container: plain entrypoint, any image; script-mode: the toolkit of AWS images",
    )


class RehearsalConfig(Section):
    hosts: str = Field(
        "gpu=1,cpu=2",
        description="emulated hosts, group=count[:instance type], numbered algo-1, algo-2, … in order",
    )
    entry: Literal["toolkit", "container"] = Field(
        "toolkit",
        description="toolkit: SageMaker's training toolkit starts train.py; container: it is process 1",
    )
    cpus: int = Field(2, ge=1, le=1024, description="CPUs that each host offers to Ray")
    cpu_quota: float | None = Field(
        None, gt=0, description="cores of this machine each host may use; default: as many as it likes"
    )
    link_mbps: float | None = Field(
        None, gt=0, description="rate of each host's network link, both ways; default: unlimited"
    )
    shm_mb: int = Field(1024, ge=1, description="size of /dev/shm of each host")
    join_delay: dict[str, float | Literal["never"]] = Field(
        {}, description="seconds by which a host comes late, or never: {algo-3: 30}"
    )
    faults: Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = Field(
        [], description="what goes wrong: kill:algo-3@20s, term:all@formed+5s; see docs/rehearsal.md"
    )
    timeout_s: float = Field(3600, gt=0, description="end the rehearsal by force after this time")
