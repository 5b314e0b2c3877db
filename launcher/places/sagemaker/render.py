"""Laptop: the cost of a job as text."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.files import table
from launcher.places.sagemaker.groups import Group, usd_per_hour
from stoker.events import prices
from stoker.events.prices import PriceList
from stoker.figures import duration


def cost_table(groups: tuple[Group, ...], max_runtime_s: int, spot: bool, known_prices: PriceList) -> str:
    """Laptop: a table of groups with $/h, and the maximum cost of the job."""
    rows = []
    for group in groups:
        known = prices.machine(group.type)
        rows.append(
            (
                group.name,
                str(group.count),
                group.type,
                str(known.vcpus * group.count) if known else "?",
                f"{known.gpus * group.count}×{known.gpu_name}" if known and known.gpus else "-",
                f"{known.baseline_gbps:g}" if known else "?",
                dollars(group.usd_per_hour(known_prices), 3),
            )
        )
    total = usd_per_hour(groups, known_prices)
    rows.append(("total", str(sum(group.count for group in groups)), "", "", "", "", dollars(total, 3)))
    head = ("group", "hosts", "type", "vCPUs", "GPUs", "Gb/s each", "$/h")
    hours = max_runtime_s / 3600
    most = dollars(total * hours if total is not None else None)
    note = "; spot usually costs less" if spot else ""
    limit = f"at most ${most} in {hours:g} h (sagemaker.max_runtime_s)"
    return f"{table(head, rows)}\n{limit}; {known_prices.label}{note}"


def billed_table(groups: Sequence[Group], billable_s: int, known_prices: PriceList) -> str:
    """Laptop: the cost of each group, from the billable seconds reported by SageMaker."""
    hours = billable_s / 3600
    rows = []
    for group in groups:
        price = group.usd_per_hour(known_prices)
        cost = dollars(price * hours if price is not None else None)
        rows.append((group.name, str(group.count), group.type, dollars(price, 3), cost))
    total = usd_per_hour(groups, known_prices)
    rows.append(("total", "", "", dollars(total, 3), dollars(total * hours if total is not None else None)))
    head = ("group", "hosts", "type", "$/h", "$")
    return f"{table(head, rows)}\nbillable {duration(billable_s)}; {known_prices.label}"


def dollars(amount: float | None, digits: int = 2) -> str:
    """Laptop: an amount without the $ sign; ? if unknown."""
    return "?" if amount is None else f"{amount:,.{digits}f}"
