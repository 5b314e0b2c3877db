"""Head: the price list that fits the hosts of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable

from stoker.config.schema import Config
from stoker.events import google
from stoker.events.prices import PriceList, price_list
from stoker.events.summary import Host


def prices_of(config: Config, hosts: Iterable[Host]) -> PriceList:
    """Head: Google's prices if the hosts are Google's machines, else those of the job's AWS region."""
    if any(google.is_machine(host.type) for host in hosts):
        return google.price_list(config.vertex)
    return price_list(config.sagemaker.region or os.environ.get("AWS_REGION"), config.sagemaker.prices)
