"""On a cluster of several nodes, an agent dies again and again; prints what happened.

A process belongs to one cluster only, and that of the tests is another.
"""

from __future__ import annotations

import json
import os
from typing import Any

from several_hosts import job, until
from streaming import Train

from tests.fakes.ray_nodes import RayNodes


def servers(train: Train) -> dict[str, Any]:
    import ray

    found: dict[str, Any] = ray.get(train.coordinator.servers.remote(), timeout=120).servers
    return found


def agents_that_die(train: Train, deaths: int) -> dict[str, Any]:
    """Kill the agent of one host, and the one that comes after it."""
    import ray

    node = min(until(lambda: servers(train)))
    notes: list[str] = []

    def died(times: int) -> bool:
        notes.extend(event["text"] for event in train.events("note"))
        return sum("died" in text for text in notes) >= times

    ports = []
    for death in range(1, deaths + 1):
        server = until(lambda: servers(train).get(node))
        ports.append(server.port)
        ray.kill(server.agent)
        assert until(lambda death=death: died(death)), notes
        assert until(lambda old=server: servers(train).get(node) != old), "a dead agent is no server"
    ports.append(until(lambda: servers(train).get(node)).port)
    ids = [i for step in train.steps("train", 0) for i in step]
    sampled = until(lambda: [e for e in train.events("host_cpu") if node in e["hosts"]])
    return {"ports": ports, "notes": notes, "rows": len(set(ids)), "sampled": bool(sampled)}


def main() -> None:
    nodes = RayNodes.entered(json.loads(os.environ["STOKER_TEST_NODES"]))
    import ray

    ray.init(address=nodes.gcs, log_to_driver=False)
    try:
        train = Train(job({"records": 200, "ms": 1}, batch=50, block=25))
        found = agents_that_die(train, 2)
        train.close()
    finally:
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
