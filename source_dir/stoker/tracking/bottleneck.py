"""Head: the bottleneck of a run, from step times and CPU use of its hosts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from stoker.tracking.summary import Bottleneck, Host, Summary

INPUT_BOUND_PCT = 10.0
"""From this input wait on, the bottleneck is the input side, not the GPU."""
BUSY_PCT = 70.0
"""Below this CPU use, hosts that preprocess are themselves waiting for the data that they read."""
SATURATED_PCT = 90.0
"""From this CPU use of a GPU host on, receiving is limited by its CPUs."""
BUSY_FETCHING = 0.7
"""From this share of CPU time on, the fetching threads are not waiting for the network."""
RECOVERY_S = 60.0
"""How long a run may wait for each lost host: Ray takes about 20 s to notice, then its work is redone."""


class HostLoad:
    """Head: CPU use of each host over a run."""

    def __init__(self) -> None:
        self._samples: dict[bool, defaultdict[str, list[float]]] = {
            training: defaultdict(list) for training in (False, True)
        }

    def take(self, hosts: Mapping[str, float], training: bool) -> None:
        """Add one sample per host; samples before the first step count only if there are no others."""
        for host, used in hosts.items():
            self._samples[training][host].append(used)

    def rows(self, hosts: list[Host]) -> list[dict[str, Any]]:
        """The rows for summary.json."""
        rows = []
        for host in hosts:
            used = self._samples[True].get(host.host) or self._samples[False].get(host.host)
            if used:
                mean = round(sum(used) / len(used), 1)
                rows.append({"host": host.host, "group": host.group, "mean_pct": mean, "max_pct": max(used)})
        return rows


def bottleneck(summary: Summary, times: Mapping[str, float]) -> Bottleneck:
    """Head: the GPU, or lost hosts if they explain the whole wait, or else what training waited for most.

    Args:
        summary: with its input wait, host_cpu, and the hosts of chain and train workers.
        times: seconds over the run: STEP_TERMS with `_s`, fetch_s, fetch_cpu_s.
    """
    if summary.speed.input_wait_pct < INPUT_BOUND_PCT:
        return "gpu"
    waits = {
        "production": times["wait_production_s"],
        "transfer": times["wait_transfer_s"],
        "here": times["wait_collate_s"] + times["host_to_device_s"],
    }
    lost = sum(event["event"] == "host_lost" for event in summary.events)
    if lost and sum(waits.values()) <= RECOVERY_S * lost:
        return "lost_hosts"
    most = max(waits, key=lambda name: waits[name])
    if most == "production":
        busy = _mean_pct(summary, set(summary.chain_tasks_by_host))
        return "cpu" if busy is None or busy >= BUSY_PCT else "network"
    if most == "transfer":
        receiving = _mean_pct(summary, set(summary.train_workers_by_host))
        saturated = receiving is not None and receiving >= SATURATED_PCT
        fetching = times["fetch_cpu_s"] / max(times["fetch_s"], 1e-9)
        return "gpu_host_cpu" if saturated or fetching >= BUSY_FETCHING else "network"
    return "gpu_host_cpu"


def _mean_pct(summary: Summary, names: set[str]) -> float | None:
    used = [float(row["mean_pct"]) for row in summary.host_cpu if row["host"] in names]
    return sum(used) / len(used) if used else None
