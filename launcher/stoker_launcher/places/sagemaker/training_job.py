"""Laptop: a job's instance groups and its CreateTrainingJob request. Pure: no calls to AWS."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.config.loading import TYPED
from stoker.config.places import ChannelConfig, SageMakerConfig
from stoker.config.schema import Config
from stoker.events import prices
from stoker.place import SERVICE_JOB_VARIABLE
from stoker.recipe import metrics_by_name
from stoker_launcher.job import COMMAND, DataUpload, Job, find_data_uploads
from stoker_launcher.places.remote import (
    CloudRequest,
    HostGroup,
    Keyed,
    cost_table,
    job_name,
    pruned,
    training_group,
    with_training_group,
)

INPUT = "/opt/ml/input/data"
CODE_CHANNEL = "code"
ARCHIVE = "sourcedir.tar.gz"
CODE_FOLDER = f"{INPUT}/{CODE_CHANNEL}"

ENTRYPOINT = ("/bin/bash", "-c", f"cd {CODE_FOLDER} && exec {' '.join(COMMAND)}")
"""`exec` makes Python process 1, so that SIGTERM reaches it."""

IMAGE_ACCOUNT = "763104351884"
IMAGE_TAG = "pytorch:2.13-cu133-amzn2023-sagemaker"
_OTHER_ACCOUNTS = re.compile(
    r"^(cn-|us-gov-|us-iso|af-|me-|il-|mx-|eu-south-|eu-central-2|ap-east-|ap-southeast-[3-9]|ap-south-2|ca-west-)"
)

METRICS = {
    "train:loss": r"step [0-9]+  loss ([0-9.eE+-]+)",
    "train:samples_per_s": r"([0-9.]+) samples/s  input wait",
    "train:input_wait_pct": r"input wait ([0-9.]+) %",
    "val:loss": r"val/loss ([0-9.eE+-]+)",
}
"""CloudWatch graph → pattern of its value in the head's log lines (`tracking.console`)."""
MOST_METRICS = 40
PENDING_S = 1800
"""How long to wait for hosts of a type while there are others to try; SageMaker allows no less."""


def group(name: str, type_: str, count: int, key: str = "") -> HostGroup:
    known = prices.machine(type_)
    if known is None:
        return HostGroup(name, type_, count, key, gpus=None)
    return HostGroup(
        name, type_, count, key, known.vcpus, known.gpus, known.gpu_name, known.baseline_gbps
    )


def groups_of(config: Config) -> tuple[HostGroup, ...]:
    settings = config.sagemaker
    gpu, cpu = settings.gpu, settings.cpu
    found = [
        group(name, types[0], hosts.count, f"sagemaker.{name}")
        for name, hosts, types in (("gpu", gpu, gpu.types), ("cpu", cpu, [cpu.type]))
        if types and types[0]
    ]
    found += [
        group(one.name, one.type, one.count, f"sagemaker.groups.{index}")
        for index, one in enumerate(settings.groups)
    ]
    return tuple(found)


@dataclass(frozen=True)
class SageMakerRequest(CloudRequest):
    section = "sagemaker"
    taken: tuple[str, ...] = ()
    """Parts of `sagemaker.request` that other keys set."""
    alternatives: tuple[SageMakerRequest, ...] = ()
    """The same job with the other types of `sagemaker.gpu.type`, in order."""

    @property
    def code_uri(self) -> str:
        return f"{self.base_uri}/code/{ARCHIVE if self.settings.entry == 'script-mode' else ''}"

    @property
    def settings(self) -> SageMakerConfig:
        return self.job.resolved.config.sagemaker

    @property
    def submission(self) -> dict[str, Any]:
        """The request to AWS Batch, where the job waits in a queue."""
        return {
            **self.settings.queue_request,
            "jobName": self.name,
            "jobQueue": self.settings.queue,
            "serviceJobType": "SAGEMAKER_TRAINING",
            "serviceRequestPayload": json.dumps(self.body),
            "clientToken": self.name,
        }

    def title(self) -> str:
        settings = self.settings
        what = f"SageMaker training job {self.name} in {self.region}, entry {settings.entry}"
        if settings.queue is None:
            return what
        more = f", {json.dumps(settings.queue_request)}" if settings.queue_request else ""
        return f"{what}, queue {settings.queue}{more}"

    def costs(self) -> str:
        tables = [self._costs()]
        for before, other in itertools.pairwise((self, *self.alternatives)):
            pending_s = before.body["StoppingCondition"]["MaxPendingTimeInSeconds"]
            without = f"without capacity for {before.settings.gpu.type} after {pending_s} s"
            tables.append(f"{without}, {other.name} instead:\n{other._costs()}")
        return "\n\n".join(tables)

    def for_command_line(self) -> dict[str, Any]:
        return self.body if self.settings.queue is None else self.submission

    def _costs(self) -> str:
        settings = self.settings
        known = prices.price_list(settings.prices, settings.spot, self.region)
        warm_s = settings.keep_alive_s  # billed, too
        limits = "sagemaker.max_runtime_s" + (" + sagemaker.keep_alive_s" if warm_s else "")
        return cost_table(self.groups, limits, settings.max_runtime_s + warm_s, known)

    def copy_command(self, source: Path, target: str) -> list[str]:
        kms_key = self.settings.kms_key
        encrypted = ["--sse", "aws:kms", "--sse-kms-key-id", kms_key] if kms_key else []
        folder = ["--recursive"] if source.is_dir() else []
        return ["aws", "s3", "cp", *folder, *encrypted, str(source), target]

    def create_command(self, file: Path) -> list[str]:
        create = ["sagemaker", "create-training-job"]
        if self.settings.queue is not None:
            create = ["batch", "submit-service-job"]
        return ["aws", *create, "--region", self.region, "--cli-input-json", f"file://{file}"]


def default_image(region: str) -> str | None:
    """AWS's PyTorch training image; None for regions whose images belong to another account."""
    if not region or _OTHER_ACCOUNTS.match(region):
        return None
    return f"{IMAGE_ACCOUNT}.dkr.ecr.{region}.amazonaws.com/{IMAGE_TAG}"


def request_of(job: Job, name: str, region: str, s3_uri: str) -> SageMakerRequest:
    """Build the whole request, valid or not, with all objects below `s3_uri`; `sagemaker_rules` checks it."""
    config = job.resolved.config
    settings = config.sagemaker
    groups = groups_of(config)
    trains = training_group(config, groups)
    if trains is not None:
        job = with_training_group(job, trains if len(groups) > 1 else None)
    s3_uri = s3_uri.rstrip("/")
    local = {
        name: path
        for name, path in job.data.items()
        if name not in settings.channels and not path.startswith(f"{INPUT}/")
    }
    data = find_data_uploads(local, s3_uri, settings.kms_key)
    keys: dict[str, str] = {}
    code_uri, max_wait_s = f"{s3_uri}/{name}/code", settings.max_wait_s
    if settings.spot and max_wait_s is None:
        max_wait_s = 2 * settings.max_runtime_s
    body = {
        "TrainingJobName": Keyed(name, "name"),
        "RoleArn": Keyed(settings.role, "sagemaker.role"),
        "AlgorithmSpecification": {
            "TrainingImage": Keyed(settings.image or default_image(region), "sagemaker.image"),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": list(ENTRYPOINT) if settings.entry == "container" else None,
            "EnableSageMakerMetricsTimeSeries": True,
            "MetricDefinitions": [
                {"Name": name, "Regex": regex} for name, regex in metrics_of(job).items()
            ],
        },
        "HyperParameters": Keyed(_hyperparameters(job, code_uri), "sagemaker.hyperparameters"),
        "Environment": Keyed(
            {
                key: Keyed(value, f"sagemaker.environment.{key}")
                for key, value in settings.environment.items()
            }
            # Batch gives the training job of each attempt a name of its own.
            | ({SERVICE_JOB_VARIABLE: name} if settings.queue is not None else {}),
            "sagemaker.environment",
        ),
        "InputDataConfig": Keyed(
            _channels(job, data, code_uri, groups) or None, "sagemaker.channels"
        ),
        "OutputDataConfig": {
            "S3OutputPath": Keyed(s3_uri, "sagemaker.s3_uri"),
            "KmsKeyId": Keyed(settings.kms_key, "sagemaker.kms_key"),
        },
        "CheckpointConfig": {
            "S3Uri": Keyed(f"{s3_uri}/{name}/checkpoints", "sagemaker.s3_uri"),
            "LocalPath": "/opt/ml/checkpoints",
        },
        "ResourceConfig": {
            "VolumeSizeInGB": Keyed(settings.volume_gb, "sagemaker.volume_gb"),
            "VolumeKmsKeyId": Keyed(settings.volume_kms_key, "sagemaker.volume_kms_key"),
            "KeepAlivePeriodInSeconds": Keyed(
                settings.keep_alive_s or None, "sagemaker.keep_alive_s"
            ),
            **_instances(groups),
        },
        "StoppingCondition": {
            "MaxRuntimeInSeconds": Keyed(settings.max_runtime_s, "sagemaker.max_runtime_s"),
            "MaxWaitTimeInSeconds": Keyed(max_wait_s, "sagemaker.max_wait_s"),
        },
        "VpcConfig": {
            "Subnets": Keyed(list(settings.subnets) or None, "sagemaker.subnets"),
            "SecurityGroupIds": Keyed(
                list(settings.security_groups) or None, "sagemaker.security_groups"
            ),
        },
        "EnableManagedSpotTraining": settings.spot,
        "EnableInterContainerTrafficEncryption": settings.encrypt_traffic,
        "EnableNetworkIsolation": settings.network_isolation,
        "RetryStrategy": {
            "MaximumRetryAttempts": Keyed(settings.max_retries, "sagemaker.max_retries")
        },
        "MlflowConfig": _mlflow(config),
        "RemoteDebugConfig": {  # a session of Systems Manager leads to the dashboard
            "EnableRemoteDebug": config.cluster.dashboard or None
        },
        "Tags": Keyed(
            [
                Keyed({"Key": name, "Value": value}, f"sagemaker.tags.{name}")
                for name, value in {"stoker-job": config.name, **settings.tags}.items()
            ],
            "sagemaker.tags",
        ),
    }
    taken: list[str] = []
    body = overlaid(pruned(body, keys), settings.request, keys, taken)
    data_at = _data_at(job, data)
    return SageMakerRequest(
        job, name, region, s3_uri, groups, body, keys, data, data_at, taken=tuple(taken)
    )


def requests_of(job: Job, end: str, region: str, s3_uri: str) -> list[SageMakerRequest]:
    """One for each of the types that the GPU hosts may have; all but the last end if no capacity comes."""
    config = job.resolved.config
    requests = []
    for index, type_ in enumerate(config.sagemaker.gpu.types or [None], 1):
        gpu = config.sagemaker.gpu.model_copy(update={"type": type_})
        settings = config.sagemaker.model_copy(update={"gpu": gpu})
        resolved = replace(job.resolved, config=config.model_copy(update={"sagemaker": settings}))
        name = job_name(job.name, end if index == 1 else f"{end}-{index}")
        requests.append(request_of(replace(job, resolved=resolved), name, region, s3_uri))
    for request in requests[:-1]:
        request.body["StoppingCondition"].setdefault("MaxPendingTimeInSeconds", PENDING_S)
    return requests


def metrics_of(job: Job) -> dict[str, str]:
    found, config = dict(METRICS), job.resolved.config
    names: list[str] = []
    if config.script is None:
        with contextlib.suppress(Exception):  # the hosts may have packages that this machine lacks
            names = list(metrics_by_name(job.project.recipe))
    for name in names[: MOST_METRICS - len(METRICS)]:
        if name.endswith("acc1"):
            found[f"val:{name}_pct"] = rf"val/{re.escape(name)} ([0-9.]+) %"
        else:
            found[f"val:{name}"] = rf"val/{re.escape(name)} ([0-9.eE+-]+)"
    return found


def given_hyperparameters(job: Job) -> dict[str, str | int | float | bool]:
    """`sagemaker.hyperparameters` without keys that the command line sets, which hosts would overwrite."""
    given, origins = job.resolved.config.sagemaker.hyperparameters, job.resolved.origins
    typed = [key for key, origin in origins.items() if origin in TYPED]

    def is_typed(name: str) -> bool:
        key = name.replace("__", ".")
        return any(key == one or key.startswith(f"{one}.") for one in typed)

    return {name: value for name, value in given.items() if not is_typed(name)}


def _hyperparameters(job: Job, code_uri: str) -> dict[str, Any]:
    settings = job.resolved.config.sagemaker
    found: dict[str, Any] = {"config": COMMAND[-1]}
    if settings.entry == "script-mode":
        found["sagemaker_program"] = COMMAND[1]
        found["sagemaker_submit_directory"] = f"{code_uri}/{ARCHIVE}"
    for key, value in given_hyperparameters(job).items():
        text = json.dumps(value)
        if isinstance(value, str):
            try:
                json.loads(value)  # must be quoted to stay text
            except ValueError:
                text = value
        # SageMaker's tuning takes no dots in names; `__` is equivalent.
        found[key.replace(".", "__")] = Keyed(text, f"sagemaker.hyperparameters.{key}")
    return found


def s3_inputs(config: Config) -> dict[str, str]:
    """The parameters of a script that name data in S3: input channels, as all its parameters."""
    params = config.params if config.script is not None else {}
    own = config.sagemaker.channels
    return {
        name: uri for name, uri in params.items() if uri.startswith("s3://") and name not in own
    }


def _channels(
    job: Job,
    data: tuple[DataUpload, ...],
    code_uri: str,
    groups: tuple[HostGroup, ...],
) -> list[Keyed]:
    settings = job.resolved.config.sagemaker
    asked = dict(settings.channels)
    origins = {name: f"sagemaker.channels.{name}" for name in asked}
    if settings.entry == "container":
        asked = {CODE_CHANNEL: ChannelConfig.model_validate({"uri": f"{code_uri}/"}), **asked}
        origins.setdefault(CODE_CHANNEL, "sagemaker.s3_uri")
    uris = {item.parameter: item.uri for item in data} | s3_inputs(job.resolved.config)
    for name, uri in uris.items():
        asked[name] = ChannelConfig.model_validate({"uri": uri})
        origins[name] = f"params.{name}"
    # SageMaker requires groups on all channels or on none, and takes none of a single group.
    some = len(groups) > 1 and any(one.groups for one in asked.values())
    by_group = [group.name for group in groups] if some else None
    found = []
    for name, channel in asked.items():
        key, own = origins[name], name in settings.channels
        in_groups = by_group and (channel.groups or by_group)
        source = {
            "S3DataType": "S3Prefix",
            "S3Uri": Keyed(channel.uri, f"{key}.uri" if own else key),
            "S3DataDistributionType": "FullyReplicated",
            "InstanceGroupNames": Keyed(in_groups, f"{key}.groups" if own else key),
        }
        mode = Keyed(channel.input_mode, f"{key}.input_mode" if own else key)
        content = {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}
        found.append(Keyed(content, key))
    return found


def _mlflow(config: Config) -> dict[str, Keyed]:
    """Names the managed MLflow server to SageMaker; the head logs to any server by itself."""
    settings = config.tracking.mlflow
    managed = (settings.uri or "").startswith("arn:")
    members = {
        "ResourceArn": (settings.uri, "uri"),
        "ExperimentName": (settings.experiment or config.name, "experiment"),
        "RunName": (settings.run_name, "run_name"),
    }
    return {
        f"Mlflow{name}": Keyed(value if managed else None, f"tracking.mlflow.{key}")
        for name, (value, key) in members.items()
    }


def _instances(groups: tuple[HostGroup, ...]) -> dict[str, Any]:
    def instances(one: HostGroup) -> dict[str, Any]:
        return {
            "InstanceType": Keyed(one.type, f"{one.key}.type"),
            "InstanceCount": Keyed(one.count, f"{one.key}.count"),
        }

    if len(groups) == 1:
        return {"InstanceGroups": Keyed(None, "sagemaker.groups"), **instances(groups[0])}
    listed = [
        {"InstanceGroupName": Keyed(one.name, f"{one.key}.name"), **instances(one)}
        for one in groups
    ]
    return {"InstanceGroups": Keyed(listed, "sagemaker.groups")}


def _data_at(job: Job, data: tuple[DataUpload, ...]) -> dict[str, str]:
    config = job.resolved.config
    found = {name: f"{INPUT}/{name}" for name in s3_inputs(config)}
    found |= {item.parameter: item.path_in(f"{INPUT}/{item.parameter}") for item in data}
    for name in config.sagemaker.channels:
        value = config.params.get(name)
        in_place = isinstance(value, str) and ("://" in value or value.startswith(f"{INPUT}/"))
        known = name in config.params or name in job.project.fields
        if known and not in_place:
            found[name] = f"{INPUT}/{name}"
    return found


def overlaid(
    body: dict[str, Any],
    more: Mapping[str, Any],
    keys: dict[str, str],
    taken: list[str],
    path: str = "",
) -> dict[str, Any]:
    """The request with `sagemaker.request`, which adds to it: members, and elements of lists."""
    found = dict(body)
    for name, value in more.items():
        where = f"{path}.{name}" if path else name
        here = found.get(name)
        own_key = where in keys and where != "InputDataConfig"
        if own_key or (here is not None and type(here) is not type(value)):
            taken.append(where)
        elif isinstance(value, dict):
            found[name] = overlaid(here or {}, value, keys, taken, where)
        elif isinstance(here, list):
            for index in range(len(here), len(here) + len(value)):
                keys[f"{where}[{index}]"] = f"sagemaker.request.{where}"
            found[name] = [*here, *value]
        elif here is not None:
            taken.append(where)
        else:
            found[name] = value
            keys[where] = f"sagemaker.request.{where}"
    return found
