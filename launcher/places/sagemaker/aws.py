"""Laptop: lazily created boto3 clients, and AWS errors as one-line messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from launcher.places.sagemaker.request import Draft
from launcher.places.sagemaker.upload import split_uri
from stoker.errors import UsageError

NO_CREDENTIALS = (
    "AWS: no credentials found; run `aws configure` or set AWS_PROFILE (--dry-run --offline needs none, but"
    " sagemaker.s3_uri)"
)


@cache
def client(service: str, region: str, timeout_s: float | None = None) -> Any:
    """Laptop: a cached boto3 client that retries throttled calls; honours `AWS_ENDPOINT_URL`.

    Args:
        service: name of the AWS service.
        region: AWS region.
        timeout_s: timeout of a single attempt without retries; None retries with long timeouts.
    """
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": 1 if timeout_s else 9},
        connect_timeout=timeout_s or 10,
        read_timeout=timeout_s or 60,
    )
    with readable_errors(service):
        session: Any = boto3.session.Session()  # Any: its stubs have one overload per service
        return session.client(service, region_name=region, config=config)


def region_of(configured: str | None) -> str | None:
    """Laptop: the region from the configuration, else the environment, else the AWS profile."""
    found = configured or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if found:
        return found
    import botocore.session

    with readable_errors("configuration"):
        profile: str | None = botocore.session.Session().get_config_variable("region")
    return profile


@cache
def regions() -> frozenset[str]:
    """Laptop: the regions in which SageMaker exists, as far as the installed botocore knows."""
    import botocore.session

    session = botocore.session.Session()
    return frozenset(
        region
        for partition in session.get_available_partitions()
        for region in session.get_available_regions("sagemaker", partition)
    )


def account_id(region: str) -> str:
    """Laptop: the account whose credentials are in use.

    Raises:
        UsageError: there are no credentials, or AWS rejects them.
    """
    sts = client("sts", region)
    with readable_errors("credentials"):
        return str(sts.get_caller_identity()["Account"])


def refuse_without_credentials() -> None:
    """Laptop: look for credentials without asking AWS about them.

    Raises:
        UsageError: there are none.
    """
    import boto3

    with readable_errors("credentials"):
        if boto3.session.Session().get_credentials() is None:
            raise UsageError(NO_CREDENTIALS)


def existence_problems(draft: Draft) -> Iterator[str]:
    """Laptop: problems with the request's buckets and prefixes: missing, inaccessible, wrong region."""
    s3 = client("s3", draft.region)
    bucket, _ = split_uri(draft.s3_uri)
    with readable_errors("S3"):
        yield from _bucket_problem(s3, bucket, draft.region)
        for name, channel in draft.settings.channels.items():
            if channel.uri.startswith("s3://"):
                yield from _prefix_problem(s3, channel.uri, f"sagemaker.channels.{name}.uri")


class PassingError(UsageError):
    """Laptop: an error that may pass by itself, or once somebody has signed in again."""


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Laptop: convert botocore exceptions to a one-line `UsageError`."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        NoRegionError,
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
        message = error.response.get("Error", {}).get("Message", str(error))
        kind = UsageError if "AccessDenied" in code else PassingError
        raise kind(f"AWS {what}: {error.operation_name}: {code}: {message}{_remedy(code)}") from None
    except BotoCoreError as error:
        raise PassingError(f"AWS {what}: {error}") from None


def _remedy(code: str) -> str:
    if "AccessDenied" in code:
        return "; docs/iam/launcher.json lists the permissions that the launcher needs"
    if "Expired" in code or "InvalidClientToken" in code or "UnrecognizedClient" in code:
        return "; sign in again (`aws sso login`) or check AWS_PROFILE"
    if code == "ResourceLimitExceeded":
        return "; request the quota in Service Quotas, or choose another instance type"
    if code == "ResourceInUse":
        return "; a job with this name exists; submit again to get a new name"
    return ""


def _bucket_problem(s3: Any, bucket: str, region: str) -> Iterator[str]:
    from botocore.exceptions import ClientError

    try:
        answer = s3.head_bucket(Bucket=bucket)
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        found = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
        if status == 404:
            yield (
                f"sagemaker.s3_uri: bucket {bucket!r} does not exist; create it"
                f" (`aws s3 mb s3://{bucket} --region {region}`) or name another"
            )
            return
        if status == 403:
            yield (
                f"sagemaker.s3_uri: no access to bucket {bucket!r}; see docs/iam/launcher.json for the policy"
            )
            return
        if status != 301:
            raise
    else:
        found = answer.get("BucketRegion")
    if found and found != region:
        yield (
            f"sagemaker.s3_uri: bucket {bucket!r} is in {found}, the job in {region}; use a bucket in"
            " the job's region"
        )


def _prefix_problem(s3: Any, uri: str, key: str) -> Iterator[str]:
    from botocore.exceptions import ClientError

    bucket, prefix = split_uri(uri)
    try:
        found = s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("KeyCount", 0)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code not in ("NoSuchBucket", "404", "AccessDenied", "403", "AllAccessDisabled"):
            raise
        reason = "the bucket does not exist" if code in ("NoSuchBucket", "404") else "no access to the bucket"
        yield f"{key}: {reason} (got {uri!r})"
        return
    if not found:
        yield f"{key}: nothing there (got {uri!r}); upload the data or correct the prefix"
