"""Laptop: the instance groups of a job, their prices and configuration keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.config.schema import Config
from stoker.events import prices
from stoker.events.prices import PriceList


@dataclass(frozen=True)
class Group:
    """Laptop: one instance group and the configuration key that defines it."""

    name: str
    type: str
    count: int
    key: str
    """`sagemaker.gpu`, or `sagemaker.groups.1`."""

    @property
    def has_gpu(self) -> bool:
        return prices.has_gpu(self.type)

    def usd_per_hour(self, known_prices: PriceList) -> float | None:
        """Laptop: estimated $/h of the group; None if its price is unknown."""
        return known_prices.usd_per_hour(self.type, self.count, self.name)


def groups_of(config: Config) -> tuple[Group, ...]:
    """Laptop: the groups in the configuration, in its order."""
    settings = config.sagemaker
    found = [
        Group(name, hosts.type, hosts.count, f"sagemaker.{name}")
        for name, hosts in (("gpu", settings.gpu), ("cpu", settings.cpu))
        if hosts.type
    ]
    found += [
        Group(group.name, group.type, group.count, f"sagemaker.groups.{index}")
        for index, group in enumerate(settings.groups)
    ]
    return tuple(found)


def training_group(config: Config, groups: tuple[Group, ...]) -> Group | None:
    """Laptop: the group that trains: the one configured, else the only one with GPUs, else the only one."""
    if config.cluster.gpu_group:
        return next((group for group in groups if group.name == config.cluster.gpu_group), None)
    with_gpu = [group for group in groups if group.has_gpu]
    if len(with_gpu) == 1:
        return with_gpu[0]
    return groups[0] if len(groups) == 1 else None


def usd_per_hour(groups: Sequence[Group], known_prices: PriceList) -> float | None:
    """Laptop: estimated $/h of all groups; None if any price is unknown."""
    each = [group.usd_per_hour(known_prices) for group in groups]
    known = [price for price in each if price is not None]
    return sum(known) if len(known) == len(each) else None
