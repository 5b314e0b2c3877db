"""On a cluster of two nodes, the agent of one dies again and again; prints what happened.

A process belongs to one cluster only, and that of the tests is another.
"""

from __future__ import annotations

import json
import os
from typing import Any

from several_hosts import job, until
from streaming import Train

from tests.fakes.ray_nodes import ray_nodes


def servers(train: Train) -> dict[str, Any]:
    import ray

    answer: tuple[bytes, dict[str, Any]] = ray.get(train.coordinator.servers.remote(), timeout=30)
    return answer[1]


def main() -> None:
    with ray_nodes(("gpu", "cpu"), dashboard=False, store_mb=100) as nodes:
        os.environ |= {key: value for key, value in nodes.environment.items() if key.startswith("RAY_")}
        import ray

        ray.init(address=nodes.gcs, log_to_driver=False)
        try:
            train = Train(job({"records": 200, "ms": 1}, batch=50, block=25))
            notes: list[str] = []

            def died(times: int) -> bool:
                notes.extend(event["text"] for event in train.events("note"))
                return sum("the agent on host cpu-1 died" in text for text in notes) >= times

            ports = []
            for death in range(1, 3):
                found = until(lambda: servers(train), 90)
                ports += [server.port for server in found.values()]
                for server in found.values():
                    ray.kill(server.agent)
                assert until(lambda death=death: died(death), 60), notes
                assert until(lambda: not servers(train), 60), "a dead agent is no server"
            found = until(lambda: servers(train), 90)
            ports += [server.port for server in found.values()]
            ids = [i for step in train.steps("train", 0) for i in step]
            cpu = until(lambda: [e for e in train.events("host_cpu") if len(e["hosts"]) == 2], 60)
            train.close()
        finally:
            # Before its cluster goes: Ray ends a process that has lost it.
            ray.shutdown()
    print(json.dumps({"ports": ports, "notes": notes, "rows": len(set(ids)), "sampled": bool(cpu)}))


if __name__ == "__main__":
    main()
