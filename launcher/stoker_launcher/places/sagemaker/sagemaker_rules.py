"""Laptop: checks of a SageMaker job before anything is uploaded.

Each rule checks a request without network access and yields lines `key: what is wrong (got …); remedy`.
All rules run, so that the user sees every problem at once.
"""

from __future__ import annotations

import contextlib
import re
import reprlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from stoker.config.loading import load
from stoker.config.redaction import is_secret
from stoker.errors import UsageError, nearest
from stoker.events import prices
from stoker.hosts import requirements
from stoker.hosts.topology import has_gpu
from stoker_launcher.places.remote import nearest_of, shared_problems, training_group
from stoker_launcher.places.sagemaker.training_job import (
    CODE_CHANNEL,
    IMAGE_ACCOUNT,
    INPUT,
    REMEDIES,
    SageMakerRequest,
    is_read,
)

RESERVED_VARIABLES = ("RAY_AUTH_", "RAY_ADDRESS", "RAY_DATA_AUTOLOAD_", "SM_", "STOKER_")


def problems(request: SageMakerRequest) -> list[str]:
    rules = (
        _groups,
        _shared,
        _settings,
        _channels,
        _parameters,
        _request,
        _hyperparameters,
        _image,
    )
    found = [line for rule in rules for line in rule(request)]
    named = {line.partition(": ")[0] for line in found}
    limits = limit_problems(request.body, request.keys)
    found += [line for line in limits if line.partition(": ")[0] not in named]
    return list(dict.fromkeys(found))


def warnings(request: SageMakerRequest) -> list[str]:
    settings = request.settings
    hosts = sum(group.count for group in request.groups)
    notes = []
    if not settings.subnets:
        notes.append(
            "no VPC: hosts can reach the internet; set sagemaker.subnets and security_groups to prevent that"
        )
    if settings.subnets and not settings.network_isolation:
        notes.append(
            "in a VPC without NAT, pip cannot reach an index: put a wheels/ folder into the source"
        )
    if hosts > 1 and not settings.encrypt_traffic:
        notes.append(
            "traffic between hosts is not encrypted: set sagemaker.encrypt_traffic=true (slower)"
        )
    if settings.encrypt_traffic and settings.subnets:
        notes.append(
            "encrypted traffic needs UDP 500 and protocol 50 (ESP) allowed in the security group"
        )
    if settings.kms_key is None:
        notes.append(
            "no KMS key: code and model use S3's default encryption; set sagemaker.kms_key to change that"
        )
    if settings.spot and len(request.groups) > 1:
        notes.append(
            "AWS does not document spot with several instance groups: try a short job first"
        )
    config = request.job.resolved.config
    for name in config.sagemaker.channels if config.script is None else ():
        if not (name in request.data_at or name in config.params or is_read(config, name)):
            notes.append(
                f"sagemaker.channels.{name}: the recipe is not known to have params.{name} to set"
            )
    return notes


def _groups(request: SageMakerRequest) -> Iterator[str]:
    settings, groups = request.settings, request.groups
    if not groups:
        yield (
            "sagemaker.gpu.type: no hosts requested; name an instance type, for example ml.g5.2xlarge"
        )
    if settings.groups and (settings.gpu.type or settings.cpu.type):
        yield "sagemaker.groups: given together with sagemaker.gpu or cpu; keep one of the two forms"
    names = [group.name for group in groups]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"sagemaker.groups: two groups are named {name!r}; every name must differ"
    for group in groups:
        if group.count < 1:
            yield f"{group.key}.count: at least 1 (got {group.count}); to have none, remove the group"
        if group.type.startswith("ml.trn"):
            yield (
                f"{group.key}.type: Trainium has no CUDA (got {group.type!r}); use a type with GPUs"
            )
        if not group.type.startswith("ml.") and f"ml.{group.type}" in instance_types():
            yield (
                f"{group.key}.type: must begin with ml. (got {group.type!r}); use ml.{group.type}"
            )
    if (
        settings.gpu.type
        and not settings.gpu.type.startswith("ml.trn")
        and settings.gpu.type in instance_types()
        and not has_gpu(settings.gpu.type)
    ):
        yield (
            f"sagemaker.gpu.type: {settings.gpu.type} has no GPU; to train on CPUs, set it as"
            " sagemaker.cpu.type and remove gpu"
        )
    if settings.gpu.type and settings.cpu.type and has_gpu(settings.cpu.type):
        yield (
            f"sagemaker.cpu.type: {settings.cpu.type} has GPUs that would idle; use an ml.c5 or ml.m5 type"
        )


def _shared(request: SageMakerRequest) -> Iterator[str]:
    settings, groups = request.settings, request.groups
    trains = (
        training_group(request.job.resolved.config, groups) if len(groups) != 1 else groups[0].name
    )
    shown: dict[str, Mapping[str, object]] = {
        "sagemaker.environment": settings.environment,
        "sagemaker.hyperparameters": settings.hyperparameters,
        "sagemaker.tags": settings.tags,
    }
    types, more = ("an instance type", instance_types()), "sagemaker.cpu.count"
    remedy, vault = "an s3:// URI, or sagemaker.channels", ("Secrets Manager", shown)
    yield from shared_problems(request, "sagemaker", trains, more, types, vault, remedy)
    for name in settings.environment:
        if name.startswith(RESERVED_VARIABLES):
            yield f"sagemaker.environment.{name}: set by Stoker or SageMaker; remove it"


def _settings(request: SageMakerRequest) -> Iterator[str]:
    settings = request.settings
    if settings.max_wait_s is not None and not settings.spot:
        yield "sagemaker.max_wait_s: only spot jobs wait; add sagemaker.spot=true or remove it"
    if settings.max_wait_s is not None and settings.max_wait_s < settings.max_runtime_s:
        yield (
            f"sagemaker.max_wait_s: must be at least max_runtime_s, {settings.max_runtime_s}"
            f" (got {settings.max_wait_s}); it counts waiting and running together"
        )
    if settings.keep_alive_s and len(request.groups) > 1:
        yield "sagemaker.keep_alive_s: SageMaker has no warm pools for several instance groups; remove it"
    if settings.keep_alive_s and settings.spot:
        yield "sagemaker.keep_alive_s: SageMaker has no warm pools for spot instances; remove one of the two"

    need_gb = sum(item.bytes for item in request.data) / 1e9
    with_nvme = [group.type for group in request.groups if prices.has_nvme(group.type)]
    if settings.volume_kms_key and with_nvme:
        yield (
            f"sagemaker.volume_kms_key: not supported by {', '.join(with_nvme)}, whose NVMe disks"
            " are encrypted by the hardware; remove it"
        )
    if need_gb > 0.9 * settings.volume_gb and len(with_nvme) < len(request.groups):
        yield (
            f"sagemaker.volume_gb: {need_gb:.0f} GB of data do not fit (got {settings.volume_gb});"
            f" set {int(need_gb * 1.2) + 1}, or use a channel with input_mode: FastFile"
        )


def _channels(request: SageMakerRequest) -> Iterator[str]:
    groups = [group.name for group in request.groups]
    trains = training_group(request.job.resolved.config, request.groups)
    for name, channel in request.settings.channels.items():
        key = f"sagemaker.channels.{name}"
        if name == CODE_CHANNEL:
            yield f"{key}: the channel of this name carries the source; choose another"
        for group in channel.groups:
            if group not in groups:
                yield f"{key}.groups: no such group (got {group!r}); the job has {', '.join(groups)}"
        if channel.groups and trains is not None and trains not in channel.groups:
            yield (
                f"{key}.groups: the head, a host of {trains}, reads the channel, too (got"
                f" {channel.groups}); add {trains}"
            )
        if len(set(channel.groups)) < len(channel.groups):
            yield f"{key}.groups: a group is listed twice (got {channel.groups}); remove one"
    if CODE_CHANNEL in request.data_at:
        yield f"params.{CODE_CHANNEL}: the channel of this name carries the source; rename the parameter"


def _parameters(request: SageMakerRequest) -> Iterator[str]:
    settings, config = request.settings, request.job.resolved.config
    for name, value in config.params.items():
        if name in request.data_at or not isinstance(value, str):
            continue
        if value.startswith(f"{INPUT}/"):
            channel = value.removeprefix(f"{INPUT}/").split("/")[0]
            if channel not in {
                each.get("ChannelName") for each in request.body.get("InputDataConfig", [])
            }:
                yield (
                    f"params.{name}: no channel {channel!r} (got {value!r}); add sagemaker.channels.{channel}"
                )
        elif settings.network_isolation and value.startswith("s3://"):
            yield (
                f"params.{name}: with network_isolation hosts cannot read S3 (got {value!r});"
                f" use sagemaker.channels.{name}.uri"
            )


def _request(request: SageMakerRequest) -> Iterator[str]:
    for path in request.taken:
        key = request.keys.get(path)
        yield f"sagemaker.request.{path}: set by {key or 'Stoker'}; {'use that key' if key else 'remove it'}"
    seen: dict[str, str] = {}
    for index, channel in enumerate(request.body.get("InputDataConfig", [])):
        name = str(channel.get("ChannelName"))
        key = request.keys.get(f"InputDataConfig[{index}]", "sagemaker.channels")
        if (other := seen.get(name.lower())) == name:
            yield f"{key}: two channels are named {name!r}; rename one"
        elif other is not None:
            yield f"{key}: {name!r} differs from the channel {other!r} only by case; rename one"
        seen.setdefault(name.lower(), name)
    for name in request.settings.tags:
        if name.lower().startswith("aws:"):
            yield f"sagemaker.tags.{name}: names that begin with aws: belong to AWS; rename the tag"
    for key, prefix in (("subnets", "subnet-"), ("security_groups", "sg-")):
        for value in getattr(request.settings, key):
            if not value.startswith(prefix):
                yield f"sagemaker.{key}: ids begin with {prefix} (got {value!r}); name the id"
    if request.settings.network_isolation and request.settings.entry == "script-mode":
        yield (
            "sagemaker.entry: AWS's toolkit downloads the code from S3, which network_isolation forbids; use"
            " container"
        )
    source, image = request.job.source_dir, request.settings.image or IMAGE_ACCOUNT
    wheels = source is not None and (source / "wheels").is_dir()
    if request.settings.network_isolation and IMAGE_ACCOUNT in image and not wheels:
        yield (
            "sagemaker.network_isolation: pip reaches no index then, and the image lacks Ray; put a wheels/"
            " folder next to requirements.txt (pip download -d wheels -r requirements.txt), or use an image"
            " that has the packages"
        )


def _hyperparameters(request: SageMakerRequest) -> Iterator[str]:
    given = [key.replace("__", ".") for key in request.settings.hyperparameters]
    for key, value in request.settings.hyperparameters.items():
        where = f"sagemaker.hyperparameters.{key}"
        if "__" in key and given.count(key.replace("__", ".")) > 1:
            yield f"{where}: set twice, also as {key.replace('__', '.')} (got {value!r}); remove one"
        if key.startswith(("sagemaker_", "sagemaker.")) or key == "config":
            yield f"{where}: set by Stoker; remove it"
        elif "'" in str(value):
            yield (
                f"{where}: a single quote breaks SageMaker's start script (got {value!r}); set it in job.yaml"
            )
        elif not is_secret(key, ""):
            try:
                load(None, [f"{key.replace('__', '.')}={value}"], origin=where)
            except UsageError as error:
                yield from error.problems


def _image(request: SageMakerRequest) -> Iterator[str]:
    image = request.body["AlgorithmSpecification"].get("TrainingImage")
    key = "sagemaker.image"
    if image is None:
        if request.region:  # a missing region is a problem of its own
            yield f"{key}: no default image is known for region {request.region!r}; name one"
        return
    if request.body["AlgorithmSpecification"].get("TrainingImageConfig"):
        return  # a private registry
    registry = re.match(r"(\d{12})\.dkr\.ecr[a-z-]*\.([a-z0-9-]+)\.", image)
    if registry is None:
        yield (
            f"{key}: not an image in ECR; use <account>.dkr.ecr.<region>.amazonaws.com/<name>:<tag>"
            f" (got {image!r})"
        )
        return
    if registry[2] != request.region:
        yield (
            f"{key}: in region {registry[2]}, the job in {request.region}; use the image of the job's region"
        )
    if "inference" in image:
        yield (
            f"{key}: an inference image has no training toolkit (got {image!r}); use a training image"
        )
    if "-cpu" in image and any(group.gpus != 0 for group in request.groups):
        yield (
            f"{key}: a CPU image, but the job has GPUs; all groups share one image, so use the GPU one"
        )
    python = re.search(r"py(\d)(\d{1,2})(?!\d)", image)
    torch = re.search(r"pytorch(?:-training)?:(\d+)\.(\d+)", image)
    if why := requirements.unfit(python, torch if registry[1] == IMAGE_ACCOUNT else None):
        yield f"{key}: {why}"


PYTHON_TYPES: dict[str, Any] = {
    **dict.fromkeys(("structure", "map"), dict),
    **dict.fromkeys(("integer", "long"), int),
    "list": list,
    "string": str,
    "boolean": bool,
}
UNITS = {"list": " entries", "map": " entries", "string": " characters"}


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """The shapes of the service model, loaded once (about 0.1 s)."""
    from botocore.loaders import Loader

    model: dict[str, dict[str, Any]] = Loader().load_service_model("sagemaker", "service-2")[
        "shapes"
    ]
    return model


def instance_types() -> list[str]:
    return list(shapes()["TrainingInstanceType"]["enum"])


def limit_problems(body: dict[str, Any], keys: dict[str, str]) -> Iterator[str]:
    """Every violation of a length, range, pattern, enum or required member.

    botocore itself checks types and lower limits only.
    """
    for path, message, value in _walk(body, "CreateTrainingJobRequest"):
        whole = re.sub(r"\[\d+\]", "", path)
        remedy, key = (
            nearest_of(whole, REMEDIES),
            nearest_of(path, keys) or nearest_of(whole, keys) or path,
        )
        got = "" if value is None else f" (got {reprlib.repr(value)})"
        yield f"{key}: {message}{got}{f'; {remedy}' if remedy else ''}"


def _walk(value: Any, name: str, path: str = "") -> Iterator[tuple[str, str, Any]]:
    shape = shapes()[name]
    kind = shape["type"]
    fits = isinstance(value, PYTHON_TYPES.get(kind, object))
    if not fits or (isinstance(value, bool) and kind != "boolean"):
        yield path, f"must be a {kind}", value
        return
    size = len(value) if isinstance(value, str | list | dict) else value
    shown = value if kind == "string" else size
    if size > shape.get("max", size):
        yield path, f"at most {shape['max']:,}{UNITS.get(kind, '')}", shown
    elif size < shape.get("min", size):
        yield path, f"at least {shape['min']:,}{UNITS.get(kind, '')}", shown
    elif kind == "string":
        if "enum" in shape and value not in shape["enum"]:
            # Type names differ by few characters, so use a low cutoff for the nearest name.
            few = (
                f"one of {', '.join(shape['enum'])}"
                if len(shape["enum"]) <= 6
                else "not known to AWS"
            )
            yield path, few + nearest(value, shape["enum"], cutoff=0.5), value
        # The patterns are Java's; Python has no `\\p{…}`, and `\\w` is close enough.
        of_java = {"Z": " ", "N": r"\d"}
        pattern = re.sub(
            r"\\p\{(\w+)\}", lambda found: of_java.get(found[1], r"\w"), shape.get("pattern", "")
        )
        with contextlib.suppress(re.error):
            if pattern and not re.fullmatch(pattern, value):
                yield path, "has a form that SageMaker rejects", value
    elif kind == "list":
        for index, item in enumerate(value):
            yield from _walk(item, shape["member"]["shape"], f"{path}[{index}]")
    elif kind == "map":
        for key, item in value.items():
            for where, message, _ in _walk(key, shape["key"]["shape"], f"{path}.{key}"):
                yield where, f"the name {message}", key
            yield from _walk(item, shape["value"]["shape"], f"{path}.{key}")
    elif kind == "structure":
        members, path = shape["members"], f"{path}." if path else ""
        for missing in set(shape.get("required", ())) - value.keys():
            yield path + missing, "is required", None
        for member, item in value.items():
            if member in members:
                yield from _walk(item, members[member]["shape"], path + member)
            else:
                yield path + member, f"unknown to botocore{nearest(member, members)}", None
