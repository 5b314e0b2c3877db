"""Head: wait for the job's hosts to join the Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from stoker.config.schema import Config
from stoker.hosts.output import say
from stoker.hosts.raynode import ClusterError
from stoker.hosts.topology import Topology, label

REPORT_EVERY_S = 5.0
GONE_S = 60.0
"""After this, a host that was lost has had time to be back."""


def present_hosts(topology: Topology) -> dict[str, dict[str, Any]]:
    """The job's hosts that are alive in the cluster, as host name → Ray node entry."""
    import ray

    by_label = {label(host): host for host in topology.hosts}
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = [(by_label.get(node.get("Labels", {}).get("stoker.host", "")), node) for node in alive]
    return {name: node for name, node in names if name}


def wait_for_hosts(
    topology: Topology, config: Config, started: float, check: Callable[[], None]
) -> list[str]:
    """Wait until all hosts have joined, or after the timeout accept `cluster.min_cpu_hosts` of them.

    A host that was here and is lost is not waited for until the timeout, because its instance is gone.

    Args:
        topology: the hosts to expect.
        config: `cluster.join_timeout_s` and `cluster.min_cpu_hosts`.
        started: `time.monotonic()` at which the timeout starts.
        check: called in every iteration; raises to give up.

    Returns:
        The names of the hosts that have joined.

    Raises:
        ClusterError: hosts are missing after the timeout; the message names them.
    """
    timeout = config.cluster.join_timeout_s
    least = config.cluster.min_cpu_hosts
    reported = 0.0
    seen: dict[str, float] = {}
    while True:
        check()
        present, now = present_hosts(topology), time.monotonic()
        seen |= dict.fromkeys(present, now)
        missing = [host for host in topology.hosts if host not in present]
        waited = now - started
        if not missing:
            return list(present)
        absent = by_group(topology, missing)
        gone = [host for host in missing if now - seen.get(host, now) > GONE_S]
        late = waited > timeout
        without = missing if late else gone
        cpu_hosts = [h for h in topology.hosts if topology.group_of(h) != topology.gpu_group]
        enough = least is not None and len(set(cpu_hosts) - set(without)) >= least
        enough = enough and set(without) <= set(cpu_hosts)
        if without == missing and enough:
            allowed = f"cluster.min_cpu_hosts is {least}"
            say(f"continuing without {absent} after {waited:.0f} s: {allowed}")
            return list(present)
        if late:
            raise ClusterError(f"hosts that did not join within {timeout:.0f} s: {absent}")
        if gone and not enough:
            raise ClusterError(
                f"hosts that were lost while the cluster formed: {by_group(topology, gone)};"
                " cluster.min_cpu_hosts lets a run start without CPU hosts"
            )
        if now - reported > REPORT_EVERY_S:
            reported = now
            there = by_group(topology, list(present)) or "none"
            so_far = f"{waited:.0f} of {timeout:.0f} s"
            say(f"waiting for hosts, {so_far}; missing: {absent}; joined: {there}")
        time.sleep(0.25)


def by_group(topology: Topology, hosts: list[str]) -> str:
    """The hosts, listed by group: `cpu: algo-2, algo-3`."""
    parts = [(g.name, [host for host in g.hosts if host in hosts]) for g in topology.groups]
    return "; ".join(f"{name}: {', '.join(members)}" for name, members in parts if members)
