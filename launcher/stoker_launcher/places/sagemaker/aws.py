"""Laptop: AWS through boto3: clients, errors as one-line messages, uploads, and an account's quotas."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker_launcher.places.remote import UnansweredError
from stoker_launcher.places.sagemaker.training_job import SageMakerRequest, groups_of

ATTEMPTS = 9
"""boto3's attempts per call; a watcher continues for ten minutes besides."""
NO_CREDENTIALS = (
    "AWS: no credentials found; run `aws configure` or set AWS_PROFILE (--dry-run --offline needs none, but"
    " sagemaker.s3_uri)"
)


@cache
def client(service: str, region: str, timeout_s: float | None = None) -> Any:
    """A cached boto3 client that retries throttled calls; honours `AWS_ENDPOINT_URL`."""
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": 1 if timeout_s else ATTEMPTS},
        connect_timeout=timeout_s or 10,
        read_timeout=timeout_s or 60,
    )
    with readable_errors(service):
        session: Any = boto3.session.Session()  # Any: its stubs have one overload per service
        return session.client(service, region_name=region, config=config)


def region_of(configured: str | None) -> str | None:
    """The region from the configuration, else the environment, else the AWS profile."""
    if found := configured or os.environ.get("AWS_REGION"):
        return found
    import boto3

    with readable_errors("configuration"):
        return boto3.session.Session().region_name


@cache
def regions() -> frozenset[str]:
    """The regions in which SageMaker exists, as far as the installed botocore knows."""
    import botocore.session

    session = botocore.session.Session()
    return frozenset(
        region
        for partition in session.get_available_partitions()
        for region in session.get_available_regions("sagemaker", partition)
    )


def account_id(region: str) -> str:
    sts = client("sts", region)
    with readable_errors("credentials"):
        return str(sts.get_caller_identity()["Account"])


def existence_problems(request: SageMakerRequest) -> Iterator[str]:
    """What S3 says of the bucket for the uploads and of each channel; one listing each."""
    from botocore.exceptions import ClientError

    s3 = client("s3", request.region)
    bucket, _ = split_uri(request.root_uri)
    asked = {"sagemaker.s3_uri": f"s3://{bucket}/"}
    for name, channel in request.settings.channels.items():
        asked[f"sagemaker.channels.{name}.uri"] = channel.uri
    for key, uri in asked.items():
        bucket, prefix = split_uri(uri)
        with readable_errors("S3"):
            try:
                found = s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
            except ClientError as error:
                yield f"{key}: {_words_of(error)} (got {uri!r})"
                continue
        if prefix and not found.get("KeyCount"):
            yield f"{key}: nothing there (got {uri!r}); upload the data or correct the prefix"


class PassingError(UsageError):
    """An error that may pass by itself, or once somebody has signed in again."""


class LostAnswerError(PassingError, UnansweredError):
    """No answer, or that of a repeated call."""


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        NoRegionError,
        ParamValidationError,
        PartialCredentialsError,
        ProfileNotFound,
    )

    try:
        yield
    except (NoCredentialsError, PartialCredentialsError):
        raise UsageError(NO_CREDENTIALS) from None
    except NoRegionError:
        raise UsageError("sagemaker.region: not set, and the AWS profile has none") from None
    except ProfileNotFound as error:
        raise UsageError(f"AWS_PROFILE: {error}") from None
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        kind = UsageError if "AccessDenied" in code else PassingError
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == "ResourceInUse" or status >= 500:
            kind = LostAnswerError
        raise kind(f"AWS {what}: {_words_of(error)}") from None
    except ParamValidationError as error:  # nothing was sent
        raise UsageError(f"AWS {what}: {' '.join(str(error).split())}") from None
    except BotoCoreError as error:
        raise LostAnswerError(f"AWS {what}: {error}") from None
    except S3UploadFailedError as error:  # wraps the actual error
        raise UsageError(f"AWS {what}: {error}") from None
    except OSError as error:
        raise UsageError(f"{what}: {error.filename}: {error.strerror}") from None


_SIGN_IN = "sign in again (`aws sso login`) or check AWS_PROFILE"
_REMEDIES = {
    "AccessDenied": "docs/iam/launcher.json lists the permissions that the launcher needs",
    "Expired": _SIGN_IN,
    "InvalidClientToken": _SIGN_IN,
    "UnrecognizedClient": _SIGN_IN,
    "NoSuchBucket": "create it (`aws s3 mb`) or name another",
    "ResourceLimitExceeded": "request the quota in Service Quotas, or choose another instance type",
}


def _words_of(error: Any) -> str:
    """A client's error in AWS's own words, and what to do about it."""
    about = error.response.get("Error", {})
    code, message = about.get("Code", ""), about.get("Message", str(error))
    remedy = next((f"; {remedy}" for part, remedy in _REMEDIES.items() if part in code), "")
    return f"{error.operation_name}: {code}: {message}{remedy}"


class S3Store:
    """Where a job's uploads go: only a bucket of the account that must own it, and under the key, if any."""

    def __init__(self, request: SageMakerRequest) -> None:
        settings = request.settings
        self.s3 = client("s3", request.region)
        self.owner = "".join(settings.bucket_owner or (settings.role or "").split(":")[4:5])
        self.protection = {"ExpectedBucketOwner": self.owner}
        if settings.kms_key is not None:
            self.protection |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": settings.kms_key}

    def exists(self, uri: str) -> bool:
        bucket, key = split_uri(uri)
        owner = self.owner
        there = self.s3.list_objects_v2(
            Bucket=bucket, Prefix=key, MaxKeys=1, ExpectedBucketOwner=owner
        )
        return bool(there.get("KeyCount"))

    def send(self, file: Path, uri: str) -> None:
        self.s3.upload_file(str(file), *split_uri(uri), ExtraArgs=self.protection)

    def put(self, content: bytes, uri: str) -> None:
        bucket, key = split_uri(uri)
        self.s3.put_object(Bucket=bucket, Key=key, Body=content, **self.protection)


def split_uri(uri: str) -> tuple[str, str]:
    """`s3://bucket/some/key` → (bucket, some/key)."""
    parts = urlsplit(uri)
    return parts.netloc, parts.path.lstrip("/")


TIMEOUT_S = 4.0
"""For one answer of AWS."""
CheckRow = tuple[Literal["ok", "note", "FAIL"], str, str, str]


def findings(config: Config) -> Iterator[CheckRow]:
    """(mark, what, found, remedy) of identity and quotas; nothing where no job asks for AWS.

    Without a job that names instance types, only the identity is looked at, if there are credentials.
    """
    import boto3

    groups = groups_of(config)
    bad: Literal["note", "FAIL"] = "FAIL" if groups else "note"
    try:
        with readable_errors("credentials"):
            if not groups and boto3.session.Session().get_credentials() is None:
                yield "note", "AWS", "no credentials", "run `aws configure` before --on sagemaker"
                return
        region = region_of(config.sagemaker.region)
        if region is None:
            yield bad, "AWS", "no region", "set sagemaker.region or AWS_REGION"
            return
        with readable_errors("credentials"):
            who = client("sts", region, TIMEOUT_S).get_caller_identity()["Arn"]
    except UsageError as error:
        yield bad, "AWS", error.problems[0].rest, ""
        return
    yield "ok", "AWS", f"{who} in {region}", ""
    wanted: Counter[str] = Counter()
    for group in groups:
        wanted[group.type] += group.count
    for other in config.sagemaker.gpu.types[1:]:
        wanted[other] = max(wanted[other], config.sagemaker.gpu.count)
    if wanted:
        yield from _quotas(wanted, region, config.sagemaker.spot)


def _quotas(wanted: Counter[str], region: str, spot: bool) -> Iterator[CheckRow]:
    kind = "spot training job" if spot else "training job"
    names = {f"{instance} for {kind} usage": instance for instance in wanted}
    found: dict[str, float] = {}
    try:
        with readable_errors("quotas"):
            pages = client("service-quotas", region, TIMEOUT_S).get_paginator("list_service_quotas")
            for page in pages.paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100}):
                rows = [row for row in page["Quotas"] if row["QuotaName"] in names]
                found |= {row["QuotaName"]: row["Value"] for row in rows}
                if found.keys() == names.keys():
                    break
    except UsageError as error:
        yield "note", "quotas", f"unknown ({error})", ""
        return
    for name, instance in names.items():
        have, need, ask = found.get(name), wanted[instance], f"Service Quotas, SageMaker, {region}"
        if have is None:
            yield "note", "quotas", f"{name}: AWS lists none in {region}", f"look at {ask}"
        else:
            mark: Literal["ok", "FAIL"] = "FAIL" if have < need else "ok"
            remedy = f"ask for it in {ask}" if have < need else ""
            yield mark, "quotas", f"{name}: {have:g}, the job needs {need}", remedy
