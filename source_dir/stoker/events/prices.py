"""Anywhere: training machines of SageMaker and Vertex AI, their prices, and what a run cost.

    known = price_list()
    known.usd_per_hour("ml.g5.2xlarge", 2), known.label

`machines.csv` is a dated table, not a live quote: SageMaker's prices of training in us-east-1 (g4dn, g6e and
p4de as other projects publish them), and Compute Engine's on-demand prices in
us-central1, to which Vertex AI's fee for training is added (n1-standard-4: $0.2185, not $0.1900).
`sagemaker.prices` and `vertex.prices` give yours; a type without a price costs "?". Every figure shown from
here carries the list's `label`. Loads neither ray nor torch nor boto3.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.config.places import CpuHostsConfig, VertexConfig, VertexHostsConfig
from stoker.config.schema import Config
from stoker.events.summary import Host, Summary

TRAINING_FEE = 1.15
SPOT = "; spot usually costs less"


@dataclass(frozen=True)
class Machine:
    type: str
    price_per_hour_usd: float
    vcpus: int
    gpus: int
    gpu_name: str = ""
    baseline_gbps: float = 0.0
    """Sustained network bandwidth; one TCP flow carries at most 5 Gb/s of it. SageMaker's types only."""


with Path(__file__).with_name("machines.csv").open(encoding="utf-8") as _file:
    _ROWS = [*csv.DictReader(_file)]


def _rows(service: str) -> dict[str, dict[str, str]]:
    return {row["type"]: row for row in _ROWS if row["service"] == service}


def _machine(row: dict[str, str], fee: float = 1.0) -> Machine:
    price = round(float(row["usd_per_hour"]) * fee, 4)
    speed = float(row["baseline_gbps"] or 0)
    return Machine(row["type"], price, int(row["vcpus"]), int(row["gpus"]), row["gpu"], speed)


MACHINES = {name: _machine(row) for name, row in _rows("sagemaker").items()}
GOOGLE_MACHINES = {name: _machine(row, TRAINING_FEE) for name, row in _rows("vertex").items()}
ATTACHED_USD_PER_HOUR = {n: float(row["usd_per_hour"]) for n, row in _rows("vertex gpu").items()}
"""Each GPU that is attached to a machine, on Compute Engine."""
ACCELERATORS = {name: row["gpu"] for name, row in _rows("vertex series").items()}
"""Google's series with built-in GPUs → their type, as Vertex AI names it."""


def machine(instance_type: str) -> Machine | None:
    return MACHINES.get(instance_type)


def built_in_accelerator(machine_type: str) -> str | None:
    return next(
        (name for series, name in ACCELERATORS.items() if machine_type.startswith(series)), None
    )


def built_in_gpus(machine_type: str) -> int:
    """The number of GPUs that Google's machine type includes; 1 if its name does not tell."""
    if built_in_accelerator(machine_type) is None:
        return 0
    known = GOOGLE_MACHINES.get(machine_type)
    counted = re.search(r"-(\d+)g$", machine_type)
    return known.gpus if known else int(counted[1]) if counted else 1


@dataclass(frozen=True)
class PriceList:
    """$/h by instance type, for one region and date."""

    region: str
    as_of: str
    prices: Mapping[str, float]
    own: Mapping[str, float] = field(default_factory=dict)
    """The configuration's prices, which take precedence; a key may also be the name of a host group."""
    spot: bool = False
    """Whether the hosts are spot capacity, whose prices are not known."""
    elsewhere: str = ""
    """The hosts' region, if it is another one."""

    def usd_per_hour(
        self, instance_type: str | None, count: int = 1, group: str = ""
    ) -> float | None:
        # Of groups, `prices` has those whose machines have attached GPUs.
        own, others = self.own, self.prices
        places = ((own, instance_type), (own, group), (others, group), (others, instance_type))
        return next((known[key] * count for known, key in places if key and key in known), None)

    @property
    def label(self) -> str:
        own = f", own prices for {', '.join(sorted(self.own))}" if self.own else ""
        of, where = f"prices of {self.as_of}", f"{self.region} "
        if self.elsewhere:
            of, where = f"at {self.region}'s {of} instead of {self.elsewhere}'s", ""
        return f"estimated, {of} ({where}on demand{own}){SPOT if self.spot else ''}"


def price_list(
    own: Mapping[str, float] | None = None, spot: bool = False, region: str = ""
) -> PriceList:
    known = {name: machine.price_per_hour_usd for name, machine in MACHINES.items()}
    elsewhere = region if region != "us-east-1" else ""
    return PriceList("us-east-1", "2026-11", known, dict(own or {}), spot, elsewhere)


def google_groups(settings: VertexConfig) -> list[tuple[str, VertexHostsConfig]]:
    return [
        ("gpu", settings.gpu),
        ("cpu", settings.cpu),
        *((pool.name, pool) for pool in settings.pools),
    ]


def google_prices(settings: VertexConfig) -> PriceList:
    """Yours, those of groups with attached GPUs, the table's."""
    table = {name: machine.price_per_hour_usd for name, machine in GOOGLE_MACHINES.items()}
    for group, hosts in google_groups(settings):
        known = GOOGLE_MACHINES.get(hosts.machine_type or "")
        gpus = hosts.count if hosts.count is not None else 1
        if known is None or known.gpus or not hosts.accelerator or not gpus:
            continue
        if hosts.accelerator in ATTACHED_USD_PER_HOUR:
            attached = ATTACHED_USD_PER_HOUR[hosts.accelerator] * gpus * TRAINING_FEE
            table[group] = round(known.price_per_hour_usd + attached, 4)
        else:
            table.pop(known.type, None)  # without its GPUs, the machine's price would be too low
    return PriceList("us-central1", "2025", table, dict(settings.prices), settings.spot)


def prices_of(config: Config, hosts: Iterable[Host]) -> PriceList:
    types = {host.type for host in hosts if host.type}
    vertex = config.vertex
    named = (*vertex.prices, *(hosts.machine_type for _, hosts in google_groups(vertex)))
    if types & {*GOOGLE_MACHINES, *named} or any(map(built_in_accelerator, types)):
        return google_prices(vertex)
    return price_list(config.sagemaker.prices, config.sagemaker.spot)


def run_cost(
    summary: Summary, prices: PriceList, scaling: CpuHostsConfig | None = None
) -> dict[str, Any] | None:
    """The summary's `cost`; None unless every host has a price.

    Counted from the start of the head's process. SageMaker also bills a few minutes before that (image
    download), which only its own record shows. A host that was lost or came late counts for its own time.
    `usd` and what scaled CPU hosts took cover the whole run with all of its starts, the latter only if all
    of them counted it; `usd_per_million_samples` is what samples cost once training runs at its steady rate.
    """
    hosts, scaled_hours = summary.cluster.hosts, dict[str, float]()
    began, hours = min((host.since for host in hosts), default=0.0), _hours(summary)
    as_of, region, spot = prices.as_of, prices.region, prices.spot
    if scaling is not None and scaling.max:  # CPU hosts that were there for a part of the run
        of_cpu_host, rest = scaling.usd_per_hour, scaling.rest_usd_per_hour
        if of_cpu_host is None or rest is None:
            return None
        taken = sum(_hours_of(host, summary, began) for host in hosts if host.scaled)
        if "cpu_host_hours" in (summary.earlier_cost or {}) or not summary.earlier_s:
            scaled_hours["cpu_host_hours"] = taken
        here, at_start = rest * hours + of_cpu_host * taken, rest
        by_type = {"CPU host": of_cpu_host, "rest": rest}
        as_of, region, spot = "cluster.cpu_hosts", "this cluster", False
    else:
        each = [prices.usd_per_hour(host.type, group=host.group) for host in hosts]
        known = [price for price in each if price is not None]
        if not known or len(known) < len(each):
            return None
        pairs = [*zip(hosts, known, strict=True)]
        here = sum(price * _hours_of(host, summary, began) for host, price in pairs)
        at_start = sum(known)
        by_type = {host.type or host.group: price for host, price in pairs}
    per_hour = here / hours if hours else at_start
    rate, before = summary.speed.steady_samples_per_s, summary.earlier_cost or {}
    # Elsewhere, or before prices were known: as if on these hosts.
    before_usd = before.get("usd", per_hour * summary.earlier_s / 3600)
    return {
        "usd": round(here + before_usd, 4),
        "usd_per_hour": round(per_hour, 4),
        "usd_per_million_samples": round(per_hour / (3600 * rate) * 1e6, 4) if rate else None,
        "usd_per_hour_by_type": by_type,
        **{name: round(value + before.get(name, 0), 4) for name, value in scaled_hours.items()},
        "prices_as_of": as_of,
        "prices_region": region,
        "spot": spot,
        "estimated": True,
    }


def _hours(summary: Summary) -> float:
    return (summary.cluster.formed_s + summary.seconds - summary.earlier_s) / 3600


def _hours_of(host: Host, summary: Summary, began: float) -> float:
    """In which a host was there; those of the beginning all have the same `since`."""
    own_s = summary.seconds - summary.earlier_s
    missed_s = host.since - began + summary.cluster.formed_s if host.since > began else 0.0
    gone_s = 0.0 if host.until is None else began + own_s - host.until
    return max(_hours(summary) - (missed_s + max(gone_s, 0.0)) / 3600, 0.0)


def spot_note(cost: Mapping[str, Any]) -> str:
    return f" on demand{SPOT}" if cost.get("spot") else ""


def cost_row(summary: Summary) -> tuple[str, str] | None:
    cost = summary.cost
    if not cost:
        return None
    parts = [f"${cost['usd']:.2f}"]
    if cost.get("usd_per_million_samples") is not None:
        parts.append(f"${cost['usd_per_million_samples']:.2f} per 1M samples at the steady rate")
    where = "; as if the rehearsed hosts were real" if summary.place == "rehearsal" else ""
    source = f"estimated, prices of {cost['prices_as_of']} in {cost['prices_region']}{spot_note(cost)}{where}"
    return "cost", f"{', '.join(parts)} ({source})"
