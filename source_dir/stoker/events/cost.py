"""Anywhere: the cost of a run, if the prices of its hosts are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stoker.config.places import CpuHostsConfig
from stoker.config.schema import Config
from stoker.events import google
from stoker.events.prices import PriceList, price_list
from stoker.events.summary import Host, Summary


def prices_of(config: Config, hosts: Iterable[Host]) -> PriceList:
    """Google's prices if the hosts are Google's machines, else SageMaker's."""
    if any(google.is_machine(host.type) for host in hosts):
        return google.price_list(config.vertex)
    return price_list(config.sagemaker.prices)


def run_cost(
    summary: Summary, prices: PriceList, scaling: CpuHostsConfig | None = None
) -> dict[str, Any] | None:
    """The summary's `cost`; None unless every host has a price.

    Counted from the start of the head's process. SageMaker also bills a few minutes before that (image
    download), which only its own record shows. A host that was lost or came late counts for its own time.
    `usd` covers the whole run with all of its starts; `usd_per_million_samples` is what samples cost once
    training runs at its steady rate.
    """
    if scaling is not None and scaling.max:
        return _scaled_cost(summary, scaling)
    hosts = summary.cluster.hosts
    each = [prices.usd_per_hour(host.type, group=host.group) for host in hosts]
    known = [price for price in each if price is not None]
    if not known or len(known) != len(each):
        return None
    hours = _hours(summary)
    here = sum(price * _hours_of(host, summary) for host, price in zip(hosts, known, strict=True))
    return {
        **_totals(summary, here, here / hours if hours else sum(known)),
        "usd_per_hour_by_type": {_kind(h): p for h, p in zip(hosts, known, strict=True)},
        "prices_as_of": prices.as_of,
        "prices_region": prices.region,
        "estimated": True,
    }


def _hours(summary: Summary) -> float:
    """Of this start."""
    return (summary.cluster.formed_s + summary.seconds - summary.earlier_s) / 3600


def _hours_of(host: Host, summary: Summary) -> float:
    """In which a host was there; those of the beginning all have the same `since`."""
    began, own_s = min(h.since for h in summary.cluster.hosts), summary.seconds - summary.earlier_s
    missed_s = host.since - began + summary.cluster.formed_s if host.since > began else 0.0
    gone_s = 0.0 if host.until is None else began + own_s - host.until
    return max(_hours(summary) - (missed_s + max(gone_s, 0.0)) / 3600, 0.0)


def _totals(summary: Summary, here: float, per_hour: float) -> dict[str, Any]:
    """Dollars of all starts, and rates of this one, which cost `here`."""
    rate, before = summary.speed.steady_samples_per_s, summary.earlier_usd
    if before is None:  # elsewhere, or before prices were known: as if on these hosts
        before = per_hour * summary.earlier_s / 3600
    return {
        "usd": round(here + before, 4),
        "usd_per_hour": round(per_hour, 4),
        "usd_per_million_samples": round(per_hour / (3600 * rate) * 1e6, 4) if rate else None,
    }


def _scaled_cost(summary: Summary, prices: CpuHostsConfig) -> dict[str, Any] | None:
    """The cost with CPU hosts that were there for a part of the run; None without prices."""
    if prices.usd_per_hour is None or prices.rest_usd_per_hour is None:
        return None
    hours = _hours(summary)
    cpu_hours = sum(_hours_of(host, summary) for host in summary.cluster.hosts if host.scaled)
    here = prices.rest_usd_per_hour * hours + prices.usd_per_hour * cpu_hours
    cost = {
        **_totals(summary, here, here / hours if hours else prices.rest_usd_per_hour),
        "usd_per_hour_by_type": {"CPU host": prices.usd_per_hour, "rest": prices.rest_usd_per_hour},
        "cpu_host_hours": round(cpu_hours, 4),
        "prices_as_of": "cluster.cpu_hosts",
        "prices_region": "this cluster",
        "estimated": True,
    }
    if prices.on_demand_usd_per_hour is not None:
        saved = (prices.on_demand_usd_per_hour - prices.usd_per_hour) * cpu_hours
        cost["saved_by_spot_usd"] = round(saved, 4)
    return cost


def cost_row(summary: Summary) -> tuple[str, str] | None:
    cost = summary.cost
    if not cost:
        return None
    parts = [f"${cost['usd']:.2f}"]
    if cost.get("usd_per_million_samples") is not None:
        parts.append(f"${cost['usd_per_million_samples']:.2f} per 1M samples at the steady rate")
    if cost.get("saved_by_spot_usd"):
        parts.append(f"${cost['saved_by_spot_usd']:.2f} saved against on-demand CPU hosts")
    where = "; as if the rehearsed hosts were real" if summary.backend == "rehearsal" else ""
    text = (
        f"{', '.join(parts)} (estimated, prices of {cost['prices_as_of']} in {cost['prices_region']}{where})"
    )
    return "cost", text


def _kind(host: Host) -> str:
    return host.type or host.group
