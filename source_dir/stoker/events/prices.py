"""Anywhere: SageMaker's training instances and their prices: a dated table, not a live quote.

    known = price_list()
    known.usd_per_hour("ml.g5.2xlarge", 2), known.label

Loads neither ray nor torch nor boto3. Every figure shown from here carries the list's `label`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

PRICES_AS_OF = "2026-11"
PRICES_REGION = "us-east-1"


@dataclass(frozen=True)
class Machine:
    """One instance type, on demand in `PRICES_REGION`."""

    type: str
    price_per_hour_usd: float
    vcpus: int
    memory_gib: int
    gpus: int
    gpu_name: str
    baseline_gbps: float
    """Sustained network bandwidth; one TCP flow carries at most 5 Gb/s of it."""


# type, $/h, vCPU, GiB, GPUs, GPU, baseline Gb/s
_TABLE: tuple[tuple[str, float, int, int, int, str, float], ...] = (
    ("ml.g5.xlarge", 1.408, 4, 16, 1, "A10G", 2.5),
    ("ml.g5.2xlarge", 1.515, 8, 32, 1, "A10G", 5),
    ("ml.g5.4xlarge", 2.03, 16, 64, 1, "A10G", 10),
    ("ml.g5.8xlarge", 3.06, 32, 128, 1, "A10G", 25),
    ("ml.g5.12xlarge", 7.09, 48, 192, 4, "A10G", 40),
    ("ml.g5.16xlarge", 5.12, 64, 256, 1, "A10G", 25),
    ("ml.g5.24xlarge", 10.18, 96, 384, 4, "A10G", 50),
    ("ml.g5.48xlarge", 20.36, 192, 768, 8, "A10G", 100),
    ("ml.g6.xlarge", 1.127, 4, 16, 1, "L4", 2.5),
    ("ml.g6.2xlarge", 1.222, 8, 32, 1, "L4", 5),
    ("ml.g6.4xlarge", 1.654, 16, 64, 1, "L4", 10),
    ("ml.g6.8xlarge", 2.518, 32, 128, 1, "L4", 25),
    ("ml.g6.12xlarge", 5.752, 48, 192, 4, "L4", 40),
    ("ml.g6.24xlarge", 8.344, 96, 384, 4, "L4", 50),
    ("ml.g6.48xlarge", 16.688, 192, 768, 8, "L4", 100),
    ("ml.p4d.24xlarge", 25.251, 96, 1152, 8, "A100-40GB", 400),
    ("ml.p5.48xlarge", 63.296, 192, 2048, 8, "H100", 3200),
    ("ml.c5.xlarge", 0.204, 4, 8, 0, "", 1.25),
    ("ml.c5.2xlarge", 0.408, 8, 16, 0, "", 2.5),
    ("ml.c5.4xlarge", 0.816, 16, 32, 0, "", 5),
    ("ml.c5.9xlarge", 1.836, 36, 72, 0, "", 12),
    ("ml.c5.18xlarge", 3.672, 72, 144, 0, "", 25),
    ("ml.m5.xlarge", 0.23, 4, 16, 0, "", 1.25),
    ("ml.m5.2xlarge", 0.461, 8, 32, 0, "", 2.5),
    ("ml.m5.4xlarge", 0.922, 16, 64, 0, "", 5),
    ("ml.m5.12xlarge", 2.765, 48, 192, 0, "", 12),
    ("ml.m5.24xlarge", 5.53, 96, 384, 0, "", 25),
)

MACHINES: dict[str, Machine] = {row[0]: Machine(*row) for row in _TABLE}

_GPU_FAMILY = re.compile(r"^ml\.[gp]\d")
_NVME_FAMILY = re.compile(r"^ml\.(g\d\w*|p3dn|p4\w*|p5\w*|p6\S*|trn\w*|\w\d+[a-z]*d)\.")


def machine(instance_type: str) -> Machine | None:
    """The machine of an instance type; None if it is not in the table."""
    return MACHINES.get(instance_type)


def has_gpu(instance_type: str) -> bool:
    """Whether a type has NVIDIA GPUs, by its family, so unlisted types work too."""
    return bool(_GPU_FAMILY.match(instance_type))


def has_nvme(instance_type: str) -> bool:
    """Whether a type has local NVMe disks instead of an EBS volume."""
    return bool(_NVME_FAMILY.match(instance_type))


@dataclass(frozen=True)
class PriceList:
    """$/h by instance type, for one region and date."""

    region: str
    as_of: str
    """Day or month of the prices."""
    prices: Mapping[str, float]
    own: Mapping[str, float] = field(default_factory=dict)
    """`sagemaker.prices`, which take precedence; a key may also be the name of a host group."""

    def usd_per_hour(self, instance_type: str | None, count: int = 1, group: str = "") -> float | None:
        """$/h of `count` instances; None if the price is unknown."""
        for key, known in ((instance_type, self.own), (group, self.own), (instance_type, self.prices)):
            if key and key in known:
                return known[key] * count
        return None

    @property
    def label(self) -> str:
        """Must accompany every figure computed from this list."""
        own = f", own prices for {', '.join(sorted(self.own))}" if self.own else ""
        return f"estimated, prices of {self.as_of} ({self.region} on demand{own})"


def price_list(own: Mapping[str, float] | None = None) -> PriceList:
    """The table's prices; `own` are `sagemaker.prices` of the configuration."""
    known = {name: machine.price_per_hour_usd for name, machine in MACHINES.items()}
    return PriceList(PRICES_REGION, PRICES_AS_OF, known, dict(own or {}))
