"""Laptop: checks of a SageMaker job before anything is uploaded: what only its billed hosts would find.

All rules run, so that the user sees every problem at once. What the service itself answers before it bills
anything is left to it, but for the limits in its API's own model.
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
from stoker_launcher.places.remote import nearest_of, shared_problems
from stoker_launcher.places.sagemaker.training_job import CODE_CHANNEL, INPUT, SageMakerRequest

SUBMITTED_BY_US = {
    "jobName",
    "jobQueue",
    "serviceJobType",
    "serviceRequestPayload",
    "clientToken",
}
RESERVED_VARIABLES = ("RAY_AUTH_", "RAY_ADDRESS", "RAY_DATA_AUTOLOAD_", "SM_", "STOKER_")


def problems(request: SageMakerRequest) -> list[str]:
    rules = (_settings, _parameters, _hyperparameters)
    found = [line for rule in rules for line in rule(request)]
    named = {line.partition(": ")[0] for line in found}
    limits = limit_problems(request.body, request.keys)
    found += [line for line in limits if line.partition(": ")[0] not in named]
    return list(dict.fromkeys(found))


def _settings(request: SageMakerRequest) -> Iterator[str]:
    settings = request.settings
    if not request.groups:
        yield "sagemaker.gpu.type: no hosts requested; name an instance type, for example ml.g5.2xlarge"
    if settings.groups and (settings.gpu.type or settings.cpu.type):
        yield "sagemaker.groups: given with sagemaker.gpu or cpu, and all would be billed; keep one form"
    shown: dict[str, Mapping[str, object]] = {
        "sagemaker.environment": settings.environment,
        "sagemaker.hyperparameters": settings.hyperparameters,
        "sagemaker.tags": settings.tags,
    }
    remedy = "an s3:// URI, or sagemaker.channels"
    yield from shared_problems(request, shown, "Secrets Manager", remedy)
    for name in settings.environment:
        if name.startswith(RESERVED_VARIABLES):
            yield f"sagemaker.environment.{name}: set by Stoker or SageMaker; remove it"
    for path in request.taken:
        key = nearest_of(path, request.keys)
        yield f"sagemaker.request.{path}: set by {key or 'Stoker'}; {'use that key' if key else 'remove it'}"
    for name in settings.queue_request.keys() & SUBMITTED_BY_US:
        yield f"sagemaker.queue_request.{name}: set by Stoker; remove it"
    if settings.queue_request and settings.queue is None:
        yield "sagemaker.queue_request: nothing is submitted to AWS Batch; set sagemaker.queue"
    if settings.network_isolation and settings.entry == "script-mode":
        toolkit = "AWS's toolkit downloads the code from S3, which network_isolation forbids"
        yield f"sagemaker.entry: {toolkit}; use container"


def _parameters(request: SageMakerRequest) -> Iterator[str]:
    """What hosts would not find."""
    settings, config = request.settings, request.job.resolved.config
    channels = {one.get("ChannelName") for one in request.body.get("InputDataConfig", [])}
    if CODE_CHANNEL in (*settings.channels, *request.data_at):
        yield f"sagemaker.channels.{CODE_CHANNEL}: this channel carries the source; rename it, or the parameter"
    for name, value in config.params.items():
        if name in request.data_at or not isinstance(value, str):
            continue
        channel = value.removeprefix(f"{INPUT}/").split("/")[0]
        if value.startswith(f"{INPUT}/") and channel not in channels:
            yield f"params.{name}: no channel {channel!r} (got {value!r}); add sagemaker.channels.{channel}"
        if value.startswith("s3://") and settings.network_isolation:
            yield (
                f"params.{name}: with network_isolation hosts cannot read S3 (got {value!r});"
                f" use sagemaker.channels.{name}.uri"
            )


def _hyperparameters(request: SageMakerRequest) -> Iterator[str]:
    for key, value in request.settings.hyperparameters.items():
        where = f"sagemaker.hyperparameters.{key}"
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

    model: dict[str, dict[str, Any]] = Loader().load_service_model("sagemaker", "service-2")
    return model["shapes"]


def limit_problems(body: dict[str, Any], keys: dict[str, str]) -> Iterator[str]:
    """Every violation of a length, range, pattern, enum or required member.

    botocore itself checks types and lower limits only.
    """
    for path, message, value in _walk(body, "CreateTrainingJobRequest"):
        key = nearest_of(path, keys) or nearest_of(re.sub(r"\[\d+\]", "", path), keys) or path
        yield f"{key}: {message}{'' if value is None else f' (got {reprlib.repr(value)})'}"


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
            known = shape["enum"]
            few = f"one of {', '.join(known)}" if len(known) <= 6 else "not known to AWS"
            yield path, few + nearest(value, known, cutoff=0.5), value
        with contextlib.suppress(re.error):  # the patterns are Java's
            pattern = shape.get("pattern", "")
            if pattern and not re.fullmatch(pattern, value):
                yield path, f"does not match {pattern}", value
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
