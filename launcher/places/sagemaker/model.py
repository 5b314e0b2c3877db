"""Laptop: check a request against the limits in botocore's service model.

botocore checks only types, required members and minima before it sends a request. The service reports
violated lengths, patterns and enums one at a time, after the upload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from stoker.errors import nearest

Shapes = dict[str, dict[str, Any]]

# Request path without indices → (configuration key, form of a valid value or remedy).
REMEDIES: dict[str, tuple[str, str]] = {
    "TrainingJobName": ("name", "letters, digits and single hyphens, at most 63"),
    "RoleArn": (
        "sagemaker.role",
        "give the ARN of the job's role, arn:aws:iam::<account>:role/<name> (docs/iam/job-role.json)",
    ),
    "AlgorithmSpecification.TrainingImage": (
        "sagemaker.image",
        "an ECR image of at most 255 characters",
    ),
    "InputDataConfig": ("sagemaker.channels", "put several prefixes under one channel"),
    "InputDataConfig.ChannelName": ("sagemaker.channels", "letters, digits, '.', '-' and '_' only"),
    "InputDataConfig.DataSource.S3DataSource.S3Uri": ("sagemaker.channels", "s3://bucket/prefix"),
    "OutputDataConfig.S3OutputPath": ("sagemaker.s3_uri", "s3://bucket/prefix"),
    "OutputDataConfig.KmsKeyId": ("sagemaker.kms_key", "a key id, key ARN or alias/<name>"),
    "CheckpointConfig.S3Uri": ("sagemaker.s3_uri", "s3://bucket/prefix"),
    "HyperParameters": ("sagemaker.hyperparameters", "leave the rest in the configuration file"),
    "Environment": (
        "sagemaker.environment",
        "names of letters, digits and '_'; put long values in a file",
    ),
    "ResourceConfig.InstanceGroups": ("sagemaker.groups", "merge groups of one type"),
    "ResourceConfig.VolumeSizeInGB": ("sagemaker.volume_gb", "a number of gigabytes"),
    "ResourceConfig.VolumeKmsKeyId": (
        "sagemaker.volume_kms_key",
        "a key id, key ARN or alias/<name>",
    ),
    "ResourceConfig.KeepAlivePeriodInSeconds": ("sagemaker.keep_alive_s", "six hours at most"),
    "StoppingCondition.MaxRuntimeInSeconds": ("sagemaker.max_runtime_s", "a number of seconds"),
    "StoppingCondition.MaxWaitTimeInSeconds": ("sagemaker.max_wait_s", "a number of seconds"),
    "VpcConfig.Subnets": (
        "sagemaker.subnets",
        "name subnets and security groups together: subnet-…",
    ),
    "VpcConfig.SecurityGroupIds": (
        "sagemaker.security_groups",
        "name subnets and security groups together: sg-…",
    ),
    "RetryStrategy.MaximumRetryAttempts": ("sagemaker.max_retries", "1 to 30"),
    "Tags": ("sagemaker.tags", "letters, digits, spaces and _.:/=+-@"),
}


PYTHON_TYPES: dict[str, Any] = {
    **dict.fromkeys(("structure", "map"), dict),
    **dict.fromkeys(("integer", "long"), int),
    "list": list,
    "string": str,
    "boolean": bool,
}


@cache
def shapes() -> Shapes:
    """Laptop: the shapes of the service model, loaded once (about 0.1 s)."""
    from botocore.loaders import Loader

    model: Shapes = Loader().load_service_model("sagemaker", "service-2")["shapes"]
    return model


def limit_problems(body: dict[str, Any], keys: dict[str, str]) -> Iterator[str]:
    """Laptop: every violation of a length, range, pattern, enum or required member."""
    for path, message, value in _walk(body, "CreateTrainingJobRequest", "", shapes()):
        plain = re.sub(r"\[\d+\]", "", path)
        section, remedy = "", ""
        while not section:
            section, remedy = REMEDIES.get(plain, ("", ""))
            if "." not in plain:
                break
            plain = plain.rpartition(".")[0]
        key = _key_of(path, keys) or section or path
        got = "" if value is None else f" (got {_short(value)})"
        yield f"{key}: {message}{got}" + (f"; {remedy}" if remedy else "")


def instance_types() -> list[str]:
    """Laptop: all training instance types in the service model."""
    return list(shapes()["TrainingInstanceType"]["enum"])


def _walk(value: Any, name: str, path: str, model: Shapes) -> Iterator[tuple[str, str, Any]]:
    shape = model[name]
    kind = shape["type"]
    wanted = PYTHON_TYPES.get(kind, object)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "boolean"):
        yield path, f"must be a {kind}", value
    elif kind == "structure":
        for missing in shape.get("required", ()):
            if missing not in value:
                yield _join(path, missing), "is required", None
        for member, item in value.items():
            if member in shape["members"]:
                yield from _walk(item, shape["members"][member]["shape"], _join(path, member), model)
            else:
                yield _join(path, member), f"unknown to botocore{nearest(member, shape['members'])}", None
    elif kind == "list":
        yield from _size_problem(len(value), shape, path, "entries")
        for index, item in enumerate(value):
            yield from _walk(item, shape["member"]["shape"], f"{path}[{index}]", model)
    elif kind == "map":
        yield from _size_problem(len(value), shape, path, "entries")
        for key, item in value.items():
            for where, message, _ in _walk(key, shape["key"]["shape"], _join(path, key), model):
                yield where, f"the name {message}", key
            yield from _walk(item, shape["value"]["shape"], _join(path, key), model)
    elif kind == "string":
        yield from _string_problems(value, shape, path)
    elif kind in ("integer", "long"):
        yield from _size_problem(value, shape, path, "")


def _string_problems(value: str, shape: dict[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    wrong_size = list(_size_problem(len(value), shape, path, "characters", value))
    yield from wrong_size[:1]
    if wrong_size:
        return
    if "enum" in shape and value not in shape["enum"]:
        # Type names differ by few characters, so use a low cutoff for the nearest name.
        few = f"one of {', '.join(shape['enum'])}" if len(shape["enum"]) <= 6 else "not known to AWS"
        yield path, few + nearest(value, shape["enum"], cutoff=0.5), value
    pattern = _python_pattern(shape.get("pattern", ""))
    if pattern and not re.fullmatch(pattern, value):
        yield path, "has a form that SageMaker rejects", value


def _size_problem(
    size: int, shape: dict[str, Any], path: str, unit: str, value: Any = None
) -> Iterator[tuple[str, str, Any]]:
    shown = size if value is None else value
    unit = f" {unit}" if unit else ""
    if size > shape.get("max", size):
        got = f", {size:,} here" if value is not None else ""
        yield path, f"at most {shape['max']:,}{unit}{got}", shown
    if size < shape.get("min", size):
        yield path, f"at least {shape['min']:,}{unit}", shown


def _python_pattern(pattern: str) -> str | None:
    """Translate a Java pattern; Python has no `\\p{…}`, and `\\w` is close enough."""
    for java, python in (
        (r"\p{L}", r"\w"),
        (r"\p{Z}", r" "),
        (r"\p{N}", r"\d"),
        (r"\p{Alnum}", r"\w"),
    ):
        pattern = pattern.replace(java, python)
    try:
        re.compile(pattern)
    except re.error:
        return None
    return pattern


def _key_of(path: str, keys: dict[str, str]) -> str | None:
    while path and path not in keys:
        path = path.rpartition(".")[0]
    return keys.get(path)


def _join(path: str, member: str) -> str:
    return f"{path}.{member}" if path else member


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
