"""Laptop: `submit.py prices`: shows the prices behind cost estimates and fetches current ones from AWS."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from typing import Any

from launcher.files import table
from launcher.places.sagemaker import aws
from stoker.errors import UsageError, nearest
from stoker.events import prices

LIST_REGION = "us-east-1"
"""The region that serves the price list of all regions."""
SERVICE = "AmazonSageMaker"
_TRAINING = re.compile(r"(?:^|-)Train:(ml\.[a-z0-9-]+\.[a-z0-9-]+)$")
"""The usage type that training is billed under: USE1-Train:ml.g5.xlarge. Other attributes differ between
products; the bill shows this one."""


def show(region: str | None, update: bool) -> int:
    """Laptop: print the prices for a region; with `update`, fetch them first.

    Raises:
        UsageError: AWS cannot be reached or has no such region, or no prices of `region` were fetched so far.
    """
    asked, region = region, aws.region_of(region) or prices.PRICES_REGION
    if asked and asked not in aws.regions():
        raise UsageError(f"--region: AWS has no region {asked!r}{nearest(asked, aws.regions())}")
    if update:
        found = training_prices(region)
        file = prices.write_user_file(region, date.today().isoformat(), found)
        print(f"{len(found)} prices of {region} written to {file}")
    known = prices.price_list(region)
    absent = f"no prices of {region} yet; fetch them: submit.py prices --update --region {region}"
    if asked and known.region != asked:
        raise UsageError(absent)
    rows = []
    for name, price in sorted(known.prices.items(), key=lambda item: (prices.has_gpu(item[0]), item[1])):
        about = prices.machine(name)
        gpus = f"{about.gpus}×{about.gpu_name}" if about and about.gpus else "-"
        figures = (
            (str(about.vcpus), str(about.memory_gib), gpus, f"{about.baseline_gbps:g}")
            if about
            else ("",) * 4
        )
        rows.append((name, f"{price:.3f}", *figures))
    print(table(("type", "$/h", "vCPUs", "GiB", "GPUs", "Gb/s"), rows))
    print(known.label)
    if known.region != region:
        print(absent)
    return 0


def training_prices(region: str) -> dict[str, float]:
    """Laptop: fetch the current on-demand $/h of every training instance type in a region.

    Raises:
        UsageError: no credentials, no permission (pricing:GetProducts), no network, or no such region.
    """
    client = aws.client("pricing", LIST_REGION)
    filters = [
        {"Type": "TERM_MATCH", "Field": "regionCode", "Value": region},
        {"Type": "TERM_MATCH", "Field": "productFamily", "Value": "ML Instance"},
    ]
    found: dict[str, float] = {}
    with aws.readable_errors("prices"):
        pages = client.get_paginator("get_products").paginate(ServiceCode=SERVICE, Filters=filters)
        for page in pages:
            for text in page["PriceList"]:
                product = json.loads(text)
                usage = _TRAINING.search(product["product"]["attributes"].get("usagetype", ""))
                if usage:
                    found.update((usage[1], price) for price in _hourly(product))
    if not found:
        raise UsageError(f"--region {region}: the AWS price list has no training instances there")
    return found


def _hourly(product: dict[str, Any]) -> Iterator[float]:
    """The on-demand prices of one product, without free tiers."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"].get("USD", 0))
            if price > 0 and dimension.get("unit", "Hrs").lower().startswith("h"):
                yield price
