"""Head: the hosts of the cluster for the summary, and changes to them."""

from __future__ import annotations

import time
from typing import Any

from stoker.config.places import CpuHostsConfig
from stoker.events.kinds import HostChanged, HostJoined, HostLost, HostReleased
from stoker.events.summary import Host, Summary
from stoker.hosts.topology import GROUP_LABEL


def hosts(scaling: CpuHostsConfig) -> list[Host]:
    """The cluster's live hosts as summary entries.

    Args:
        scaling: which of them the cluster's autoscaler adds and removes.
    """
    import ray

    found, now = [], time.time()
    for node in ray.nodes():
        if node["Alive"]:
            labels, resources = node.get("Labels", {}), node["Resources"]
            found.append(
                Host(
                    host=labels.get("stoker.host") or node["NodeManagerHostname"],
                    group=labels.get(GROUP_LABEL, "default"),
                    cpus=resources.get("CPU", 0),
                    gpus=resources.get("GPU", 0),
                    ip=node["NodeManagerAddress"],
                    type=labels.get("stoker.type"),
                    node_id=node["NodeID"],
                    scaled=bool(scaling.max and resources.get(scaling.resource, 0)),
                    since=now,
                )
            )
    return sorted(found, key=lambda host: (host.group, host.host))


def host_changes(summary: Summary, scaling: CpuHostsConfig) -> list[dict[str, Any]]:
    """Events for hosts that were lost, were released or joined since the last call.

    Adds late hosts to the summary, and when the others ended.
    """
    now = {host.node_id: host for host in hosts(scaling)}
    known = {host.node_id: host for host in summary.cluster.hosts}
    closing = [event["nodes"] for event in summary.events if event["event"] == "closing"]
    released = closing[-1] if closing else []
    changes: list[HostChanged] = []
    for node, host in known.items():
        if node not in now and host.until is None:
            host.until = time.time()
            kind = HostReleased if node in released else HostLost
            changes.append(_change(kind, host))
    joined = [host for node, host in now.items() if node not in known]
    summary.cluster.hosts += joined
    changes += [_change(HostJoined, host) for host in joined]
    return [change.record() for change in changes]


def _change(kind: type[HostChanged], host: Host) -> HostChanged:
    return kind.model_validate({"host": host.host, "group": host.group, "node": host.node_id})
