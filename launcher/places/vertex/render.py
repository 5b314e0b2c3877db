"""Laptop: the cost of a Vertex AI job as text."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.files import table
from launcher.places.sagemaker.render import dollars
from launcher.places.vertex.pools import Pool
from stoker.events import google
from stoker.events.prices import PriceList


def usd_per_hour(pool: Pool, known: PriceList) -> float | None:
    """Laptop: estimated $/h of a pool; None if its price is unknown."""
    return known.usd_per_hour(pool.machine_type, pool.replicas, pool.group)


def cost_table(pools: Sequence[Pool], max_runtime_s: int, spot: bool, known: PriceList) -> str:
    """Laptop: a table of pools with $/h, and the maximum cost of the job."""
    rows, each = [], [usd_per_hour(pool, known) for pool in pools]
    for pool, price in zip(pools, each, strict=True):
        machine = google.MACHINES.get(pool.machine_type)
        rows.append(
            (
                pool.group,
                str(pool.replicas),
                pool.machine_type,
                str(machine.vcpus * pool.replicas) if machine else "?",
                f"{pool.gpus * pool.replicas}×{pool.gpu_type}" if pool.gpus else "-",
                dollars(price, 3),
            )
        )
    total = None if None in each else sum(price for price in each if price is not None)
    rows.append(("total", str(sum(pool.replicas for pool in pools)), "", "", "", dollars(total, 3)))
    head = ("group", "hosts", "type", "vCPUs", "GPUs", "$/h")
    hours = max_runtime_s / 3600
    most = dollars(total * hours if total is not None else None)
    note = "; spot usually costs less" if spot else ""
    return (
        f"{table(head, rows)}\nat most ${most} in {hours:g} h (vertex.max_runtime_s); {known.label}{note};"
        " without disks"
    )
