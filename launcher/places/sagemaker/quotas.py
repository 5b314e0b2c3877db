"""Laptop: whose AWS credentials are in use, and how many training instances that account may run at once."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from launcher.places.sagemaker import aws
from launcher.places.sagemaker.groups import groups_of
from stoker.config.schema import Config
from stoker.errors import UsageError

TIMEOUT_S = 4.0
"""For one answer of AWS."""
LISTING_S = 15.0
"""SageMaker has some thousand quotas, a hundred to a page."""
Row = tuple[Literal["ok", "note", "FAIL"], str, str, str]


def findings(config: Config) -> Iterator[Row]:
    """Laptop: (mark, what, found, remedy) of identity and quotas; nothing where no job asks for AWS.

    Without a job that names instance types, only the identity is looked at, if there are credentials.
    """
    groups = groups_of(config)
    if not groups and not has_credentials():
        yield "note", "AWS", "no credentials", "run `aws configure` before --on sagemaker"
        return
    bad: Literal["note", "FAIL"] = "FAIL" if groups else "note"
    try:
        region = aws.region_of(config.sagemaker.region)
        if region is None:
            yield bad, "AWS", "no region", "set sagemaker.region or AWS_REGION"
            return
        with aws.readable_errors("credentials"):
            who = aws.client("sts", region, TIMEOUT_S).get_caller_identity()["Arn"]
    except UsageError as error:
        yield bad, "AWS", str(error).removeprefix("AWS: "), ""
        return
    yield "ok", "AWS", f"{who} in {region}", ""
    wanted: Counter[str] = Counter()
    for group in groups:
        wanted[group.type] += group.count
    if wanted:
        yield from _quotas(wanted, region, config.sagemaker.spot)


def has_credentials() -> bool:
    """Laptop: whether this machine names any, without asking the network whether it is one of Amazon's."""
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )
    files = (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config"))
    return any(os.environ.get(name) for name in names) or any(
        Path(os.environ.get(variable) or Path.home() / ".aws" / file).is_file() for variable, file in files
    )


def _quotas(wanted: Counter[str], region: str, spot: bool) -> Iterator[Row]:
    kind = "spot training job" if spot else "training job"
    names = {f"{instance} for {kind} usage": instance for instance in wanted}
    try:
        found = _values(set(names), region)
    except UsageError as error:
        yield "note", "quotas", f"unknown ({error})", ""
        return
    for name, instance in names.items():
        have, need = found.get(name), wanted[instance]
        if have is None:
            yield "note", "quotas", f"{name}: AWS lists none in {region}", "look at Service Quotas, SageMaker"
        elif have < need:
            yield (
                "FAIL",
                "quotas",
                f"{name}: {have:g}, the job needs {need}",
                (f"ask for it in Service Quotas, SageMaker, {region}"),
            )
        else:
            yield "ok", "quotas", f"{name}: {have:g}, the job needs {need}", ""


def _values(names: set[str], region: str) -> dict[str, float]:
    """Those of these names that AWS lists.

    Raises:
        UsageError: no permission, no network, or not within `LISTING_S`.
    """
    deadline, found = time.monotonic() + LISTING_S, dict[str, float]()
    with aws.readable_errors("quotas"):
        pages = aws.client("service-quotas", region, TIMEOUT_S).get_paginator("list_service_quotas")
        for page in pages.paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100}):
            found |= {row["QuotaName"]: row["Value"] for row in page["Quotas"] if row["QuotaName"] in names}
            if found.keys() == names:
                break
            if time.monotonic() > deadline:
                raise UsageError(f"AWS quotas: not all listed within {LISTING_S:.0f} s")
    return found
