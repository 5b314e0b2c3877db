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
from stoker_launcher.places.remote import nearest_of, shared_problems, training_group
from stoker_launcher.places.sagemaker.training_job import (
    CODE_CHANNEL,
    INPUT,
    REMEDIES,
    SageMakerRequest,
)

SUBMITTED_BY_US = {
    "jobName",
    "jobQueue",
    "serviceJobType",
    "serviceRequestPayload",
    "clientToken",
}
RESERVED_VARIABLES = ("RAY_AUTH_", "RAY_ADDRESS", "RAY_DATA_AUTOLOAD_", "SM_", "STOKER_")


def problems(request: SageMakerRequest) -> list[str]:
    rules = (_groups, _shared, _parameters, _taken, _hyperparameters, _image, _queue)
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
    need_gb = sum(item.bytes for item in request.data) / 2**30
    if need_gb > settings.volume_gb:
        notes.append(
            f"the data to upload, {need_gb:.0f} GB, exceed sagemaker.volume_gb ({settings.volume_gb}): they"
            " fit only on types with NVMe disks, or in a channel with input_mode: FastFile"
        )
    if settings.subnets or settings.network_isolation:
        notes.append(
            "in a VPC without NAT, or with network isolation, pip cannot reach an index: put a wheels/ folder"
            " into the source"
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
    return notes


def _groups(request: SageMakerRequest) -> Iterator[str]:
    settings, groups = request.settings, request.groups
    if not groups:
        yield (
            "sagemaker.gpu.type: no hosts requested; name an instance type, for example ml.g5.2xlarge"
        )
    if settings.groups and (settings.gpu.type or settings.cpu.type):
        yield "sagemaker.groups: given together with sagemaker.gpu or cpu; keep one of the two forms"


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


def _parameters(request: SageMakerRequest) -> Iterator[str]:
    settings, config = request.settings, request.job.resolved.config
    if CODE_CHANNEL in (*settings.channels, *request.data_at):
        yield f"sagemaker.channels.{CODE_CHANNEL}: this channel carries the source; rename it, or the parameter"
    if settings.network_isolation and settings.entry == "script-mode":
        toolkit = "AWS's toolkit downloads the code from S3, which network_isolation forbids"
        yield f"sagemaker.entry: {toolkit}; use container"
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


def _taken(request: SageMakerRequest) -> Iterator[str]:
    for path in request.taken:
        key = request.keys.get(path)
        yield f"sagemaker.request.{path}: set by {key or 'Stoker'}; {'use that key' if key else 'remove it'}"


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
    if request.region and "TrainingImage" not in request.body["AlgorithmSpecification"]:
        yield f"sagemaker.image: no default image is known for region {request.region!r}; name one"


def _queue(request: SageMakerRequest) -> Iterator[str]:
    settings, key = request.settings, "sagemaker.queue_request"
    if settings.queue is None:
        if settings.queue_request:
            yield f"{key}: nothing is submitted to AWS Batch; set sagemaker.queue"
        return
    for name in settings.queue_request.keys() & SUBMITTED_BY_US:
        yield f"{key}.{name}: set by Stoker; remove it"
    for path, message, value in _walk(request.submission, "SubmitServiceJobRequest", "batch"):
        yield f"{key}.{path}: {message}{'' if value is None else f' (got {reprlib.repr(value)})'}"


PYTHON_TYPES: dict[str, Any] = {
    **dict.fromkeys(("structure", "map"), dict),
    **dict.fromkeys(("integer", "long"), int),
    "list": list,
    "string": str,
    "boolean": bool,
}
UNITS = {"list": " entries", "map": " entries", "string": " characters"}


@cache
def shapes(service: str = "sagemaker") -> dict[str, dict[str, Any]]:
    """The shapes of the service model, loaded once (about 0.1 s)."""
    from botocore.loaders import Loader

    model: dict[str, dict[str, Any]] = Loader().load_service_model(service, "service-2")["shapes"]
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


def _walk(
    value: Any, name: str, service: str = "sagemaker", path: str = ""
) -> Iterator[tuple[str, str, Any]]:
    shape = shapes(service)[name]
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
            yield from _walk(item, shape["member"]["shape"], service, f"{path}[{index}]")
    elif kind == "map":
        for key, item in value.items():
            for where, message, _ in _walk(key, shape["key"]["shape"], service, f"{path}.{key}"):
                yield where, f"the name {message}", key
            yield from _walk(item, shape["value"]["shape"], service, f"{path}.{key}")
    elif kind == "structure":
        members, path = shape["members"], f"{path}." if path else ""
        for missing in set(shape.get("required", ())) - value.keys():
            yield path + missing, "is required", None
        for member, item in value.items():
            if member in members:
                yield from _walk(item, members[member]["shape"], service, path + member)
            else:
                yield path + member, f"unknown to botocore{nearest(member, members)}", None
