"""Head: the bottleneck of a run, from step times and CPU use of its hosts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from stoker.events.prices import machine
from stoker.events.summary import Bottleneck, Host, Summary

MIN_STEPS = 10
"""With fewer steps, start-up dominates the measurement."""
INPUT_BOUND_PCT = 10.0
"""From this input wait on, the bottleneck is the input side, not the GPU."""
NEAR = 0.7
"""A limit of which the measured rate is less than this does not bind."""
BUSY_PCT = 70.0
"""Below this CPU use, hosts that preprocess are themselves waiting for the data that they read."""
SATURATED_PCT = 90.0
"""From this CPU use of a GPU host on, receiving is limited by its CPUs."""
BUSY_FETCHING = 0.7
"""From this share of CPU time on, the fetching threads are not waiting for the network."""
RECOVERY_S = 60.0
"""How long a run may wait for each lost host: Ray takes about 20 s to notice, then its work is redone."""


class HostLoad:
    """CPU use of each host over a run."""

    def __init__(self) -> None:
        self._samples: dict[bool, defaultdict[str, list[float]]] = {
            training: defaultdict(list) for training in (False, True)
        }

    def take(self, hosts: Mapping[str, float], training: bool) -> None:
        """Add one sample per host; samples before the first step count only if there are no others."""
        for host, used in hosts.items():
            self._samples[training][host].append(used)

    def rows(self, hosts: list[Host]) -> list[dict[str, Any]]:
        rows = []
        for host in hosts:
            used = self._samples[True].get(host.host) or self._samples[False].get(host.host)
            if used:
                mean = round(sum(used) / len(used), 1)
                rows.append({"host": host.host, "group": host.group, "mean_pct": mean, "max_pct": max(used)})
        return rows


def chain_limit(summary: Summary) -> float | None:
    """Samples/s that the CPUs that preprocess could carry; None if the chain was not measured."""
    chain_ms = sum(float(stage.get("cpu_ms_per_sample", 0)) for stage in summary.chain)
    hosts = summary.cluster.at_once()
    working = [host for host in hosts if host.host in summary.chain_tasks_by_host] or hosts
    cpus = sum(host.cpus for host in working)
    return 1000 * cpus / chain_ms if chain_ms > 0 and cpus else None


def network_limit(summary: Summary) -> float | None:
    """Samples/s that the network of the train hosts could carry; None for unknown types."""
    size, hosts = summary.speed.bytes_per_sample, summary.cluster.at_once()
    trains = [host for host in hosts if host.host in summary.train_workers_by_host]
    types = [machine(host.type) if host.type else None for host in trains]
    if not size or not types or len(hosts) < 2 or None in types:
        return None
    return sum(m.baseline_gbps for m in types if m) * 1e9 / 8 / size


def near(summary: Summary, limit: float | None) -> bool:
    """Whether the measured rate is near a limit; an unknown one may bind."""
    return limit is None or summary.speed.steady_samples_per_s >= NEAR * limit


class OneWait(NamedTuple):
    """A wait without which training would not be input-bound."""

    seconds: float
    first: bool
    """Whether it is that for the first batch of each pass."""
    rest_pct: float
    """Input wait without it."""


def without_one_wait(summary: Summary) -> OneWait | None:
    """The one wait that explains the input wait; None if there is none."""
    speed = summary.speed
    total_s = sum(speed.step_terms_ms.values()) * speed.steps / 1000
    wait_s = total_s * speed.input_wait_pct / 100
    # Among equals, the first batch: the longest wait usually is for it.
    one_s, first = max((speed.first_wait_s, True), (speed.longest_wait_s, False))
    rest = 100 * max(wait_s - one_s, 0.0) / max(total_s - one_s, 1e-9)
    return OneWait(one_s, first, rest) if one_s > 0 and rest < INPUT_BOUND_PCT else None


def bottleneck(summary: Summary, times: Mapping[str, float]) -> Bottleneck:
    """The GPU; lost hosts or one wait if they explain the whole wait; or what training waited for most."""
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
    return checked(summary, _most_waited_for(summary, times, most), most == "production")


def checked(summary: Summary, binds: Bottleneck, production: bool) -> Bottleneck:
    """A bottleneck, unless one wait explains the input wait or its limit is far from the rate."""
    if binds not in ("gpu", "lost_hosts") and without_one_wait(summary):
        return "one_wait"
    by_network = binds == "network" and not production  # or by the storage that is read
    limit = chain_limit(summary) if binds == "cpu" else network_limit(summary) if by_network else None
    return binds if near(summary, limit) else "late"


def _most_waited_for(summary: Summary, times: Mapping[str, float], most: str) -> Bottleneck:
    if most == "production":
        busy = _mean_pct(summary, set(summary.chain_tasks_by_host))
        if busy is not None and busy < BUSY_PCT:
            return "network"
        # Where training takes the CPUs that preprocess, they are busy, but not with the chain.
        shared = _mean_pct(summary, set(summary.chain_tasks_by_host) & set(summary.train_workers_by_host))
        taken = shared is not None and shared >= SATURATED_PCT and not near(summary, chain_limit(summary))
        return "gpu_host_cpu" if taken else "cpu"
    if most == "transfer":
        receiving = _mean_pct(summary, set(summary.train_workers_by_host))
        saturated = receiving is not None and receiving >= SATURATED_PCT
        fetching = times["fetch_cpu_s"] / max(times["fetch_s"], 1e-9)
        if saturated or fetching >= BUSY_FETCHING:
            return "gpu_host_cpu"
        return "network"
    return "gpu_host_cpu"


def _mean_pct(summary: Summary, names: set[str]) -> float | None:
    used = [float(row["mean_pct"]) for row in summary.host_cpu if row["host"] in names]
    return sum(used) / len(used) if used else None
