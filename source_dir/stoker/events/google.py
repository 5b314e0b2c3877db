"""Anywhere: Google Cloud's training machines and their prices on Vertex AI: a dated table, not a live quote.

Sources: Compute Engine's list of on-demand prices for us-central1, and Vertex AI's fee for training, which is
the difference to its own list (n1-standard-4: $0.2185 instead of $0.1900); neither was looked up again since.
Types without a price here cost "?"; `vertex.prices` gives yours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.events.prices import PriceList

if TYPE_CHECKING:
    from stoker.config.places import VertexConfig

PRICES_AS_OF = "2025"
PRICES_REGION = "us-central1"
TRAINING_FEE = 1.15


@dataclass(frozen=True)
class Machine:
    """One machine type, on demand in `PRICES_REGION`."""

    type: str
    compute_usd_per_hour: float
    vcpus: int
    memory_gib: float
    gpus: int = 0
    """Built into the type; others can be attached to N1 machines."""

    @property
    def usd_per_hour(self) -> float:
        """$/h as a host of a training job."""
        return round(self.compute_usd_per_hour * TRAINING_FEE, 4)


# type, $/h on Compute Engine, vCPU, GiB, built-in GPUs
_TABLE: tuple[tuple[str, float, int, float, int], ...] = (
    ("g2-standard-4", 0.7069, 4, 16, 1),
    ("g2-standard-8", 0.8536, 8, 32, 1),
    ("g2-standard-12", 1.0003, 12, 48, 1),
    ("g2-standard-16", 1.1470, 16, 64, 1),
    ("g2-standard-24", 2.0008, 24, 96, 2),
    ("g2-standard-32", 1.7340, 32, 128, 1),
    ("g2-standard-48", 4.0015, 48, 192, 4),
    ("g2-standard-96", 8.0030, 96, 384, 8),
    ("a2-highgpu-1g", 3.6734, 12, 85, 1),
    ("a2-highgpu-2g", 7.3468, 24, 170, 2),
    ("a2-highgpu-4g", 14.6935, 48, 340, 4),
    ("a2-highgpu-8g", 29.3871, 96, 680, 8),
    ("a2-ultragpu-1g", 5.0688, 12, 170, 1),
    ("a2-ultragpu-2g", 10.1376, 24, 340, 2),
    ("a2-ultragpu-4g", 20.2752, 48, 680, 4),
    ("a2-ultragpu-8g", 40.5504, 96, 1360, 8),
    ("n1-standard-4", 0.1900, 4, 15, 0),
    ("n1-standard-8", 0.3800, 8, 30, 0),
    ("n1-standard-16", 0.7600, 16, 60, 0),
    ("n1-standard-32", 1.5200, 32, 120, 0),
    ("n1-highmem-8", 0.4732, 8, 52, 0),
    ("n1-highmem-16", 0.9464, 16, 104, 0),
    ("n1-highcpu-16", 0.5670, 16, 14.4, 0),
    ("n1-highcpu-32", 1.1339, 32, 28.8, 0),
    ("n2-standard-8", 0.3885, 8, 32, 0),
    ("n2-standard-16", 0.7769, 16, 64, 0),
    ("n2-standard-32", 1.5539, 32, 128, 0),
    ("c2-standard-4", 0.2088, 4, 16, 0),
    ("c2-standard-8", 0.4176, 8, 32, 0),
    ("c2-standard-16", 0.8352, 16, 64, 0),
    ("c2-standard-30", 1.5660, 30, 120, 0),
    ("c2-standard-60", 3.1321, 60, 240, 0),
    ("e2-standard-4", 0.1340, 4, 16, 0),
    ("e2-standard-8", 0.2680, 8, 32, 0),
    ("e2-standard-16", 0.5360, 16, 64, 0),
    ("e2-standard-32", 1.0721, 32, 128, 0),
)
MACHINES: dict[str, Machine] = {row[0]: Machine(*row) for row in _TABLE}

ATTACHES = "n1-"
"""The series whose machines GPUs can be attached to."""
ATTACHED_USD_PER_HOUR = {"NVIDIA_TESLA_T4": 0.35, "NVIDIA_TESLA_V100": 2.48, "NVIDIA_TESLA_P100": 1.46}
"""Each GPU that is attached to an N1 machine, on Compute Engine."""

ACCELERATORS = {
    "g2-standard-": "NVIDIA_L4",
    "g4-standard-": "NVIDIA_RTX_PRO_6000",
    "a2-highgpu-": "NVIDIA_TESLA_A100",
    "a2-megagpu-": "NVIDIA_TESLA_A100",
    "a2-ultragpu-": "NVIDIA_A100_80GB",
    "a3-highgpu-": "NVIDIA_H100_80GB",
    "a3-megagpu-": "NVIDIA_H100_MEGA_80GB",
    "a3-ultragpu-": "NVIDIA_H200_141GB",
    "a4-highgpu-": "NVIDIA_B200",
}
"""Machine series with built-in GPUs → their type, as Vertex AI names it."""


def built_in_accelerator(machine_type: str) -> str | None:
    """The type of the GPUs that a machine type includes; None without any."""
    return next((name for series, name in ACCELERATORS.items() if machine_type.startswith(series)), None)


def built_in_gpus(machine_type: str) -> int:
    """The number of GPUs that a machine type includes; 1 if its name does not tell."""
    if built_in_accelerator(machine_type) is None:
        return 0
    known = MACHINES.get(machine_type)
    counted = re.search(r"-(\d+)g$", machine_type)
    return known.gpus if known else int(counted[1]) if counted else 1


def usd_per_hour(machine_type: str, accelerator: str | None = None, gpus: int = 0) -> float | None:
    """$/h of a host with its GPUs, built-in or attached; None if it is not in the tables."""
    known = MACHINES.get(machine_type)
    if known is None or (gpus and not known.gpus and accelerator not in ATTACHED_USD_PER_HOUR):
        return None
    attached = gpus * ATTACHED_USD_PER_HOUR[str(accelerator)] if gpus and not known.gpus else 0.0
    return round((known.compute_usd_per_hour + attached) * TRAINING_FEE, 4)


def price_list(settings: VertexConfig) -> PriceList:
    """The prices of a job's hosts: yours, those of groups with attached GPUs, the table's."""
    own: dict[str, float] = {}
    table = {name: machine.usd_per_hour for name, machine in MACHINES.items()}
    named = [("gpu", settings.gpu), ("cpu", settings.cpu), *((pool.name, pool) for pool in settings.pools)]
    for group, hosts in named:
        kind, gpus = hosts.machine_type, hosts.count if hosts.count is not None else 1
        if kind is None or not hosts.accelerator or built_in_gpus(kind):
            continue
        price = usd_per_hour(kind, hosts.accelerator, gpus)
        if price is None:
            table.pop(kind, None)  # without its GPUs, the machine's price would be too low
        else:
            own[group] = price
    return PriceList(PRICES_REGION, PRICES_AS_OF, table, {**own, **settings.prices})


def is_machine(name: str | None) -> bool:
    """Whether a host's type is one of Google Cloud's, as far as the tables know."""
    return bool(name) and (name in MACHINES or built_in_accelerator(str(name)) is not None)
