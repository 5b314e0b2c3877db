"""Head: the hosts of the cluster for the summary, and changes to them."""

from __future__ import annotations

import time
from typing import Any

from stoker.bootstrap.topology import GROUP_LABEL
from stoker.tracking.summary import Host, Summary


def hosts() -> list[Host]:
    """Head: the cluster's live hosts as summary entries."""
    import ray

    found = []
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
                )
            )
    return sorted(found, key=lambda host: (host.group, host.host))


def host_changes(summary: Summary) -> list[dict[str, Any]]:
    """Head: events for hosts lost or joined since the last call; adds late hosts to the summary."""
    now = {host.model_dump()["node_id"]: host for host in hosts()}
    known = {host.model_dump()["node_id"]: host for host in summary.cluster.hosts}
    told = {event["node"] for event in summary.events if event["event"] == "host_lost"}
    joined = [(node, host) for node, host in now.items() if node not in known]
    lost = [(node, host) for node, host in known.items() if node not in now and node not in told]
    summary.cluster.hosts += [host for _, host in joined]
    return [
        {"time": time.time(), "event": event, "host": host.host, "group": host.group, "node": node}
        for event, changes in (("host_lost", lost), ("host_joined", joined))
        for node, host in changes
    ]
