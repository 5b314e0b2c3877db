"""several Ray nodes on this machine, each with its own object store, for measurements."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.hosts import cluster, forks, raynode
from stoker.hosts.raynode import RayNode
from stoker.storage.checkpoint_store import Cleaner

STORE_MB = 200
HEAD = "127.0.1.1"


class Nodes:
    """Laptop: the started nodes, the head first.

    Each has its own address in 127.0.0.0/8, so that Ray treats them as different machines and transfers
    objects between their stores as it does between hosts.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.port = raynode.free_port()
        self.started: list[RayNode] = []

    def add(self, group: str, cpus: int, store_mb: int = STORE_MB) -> RayNode:
        """Laptop: start one more node and wait until it is ready.

        Args:
            group: its host group; the node is named after the group and its number.
            cpus: number of CPUs declared to Ray; not enforced.
            store_mb: size of its object store.

        Raises:
            ClusterError: Ray did not start.
        """
        number = len(self.started)
        arguments = raynode.arguments_for(
            address=f"127.0.1.{number + 1}",
            labels={"stoker-group": group, "stoker.host": f"{group}-{number}"},
            cpus=cpus,
            gpus=0,
        )
        arguments.append(f"--object-store-memory={store_mb * 2**20}")
        if number == 0:
            arguments += ["--head", f"--port={self.port}", "--include-dashboard=false"]
        else:
            arguments.append(f"--address={HEAD}:{self.port}")
        arguments.append(f"--dashboard-agent-listen-port={raynode.free_port()}")
        # Nodes with a shared folder would unpack the same job over each other.
        folder = self.scratch / str(number)
        node = RayNode(arguments, folder, forks.started(forks.FOR_CHAINS, self.scratch))
        self.started.append(node)
        # Two nodes of one machine that start at the same time would wait for each other forever.
        node.wait_started()
        return node


def prepare() -> None:
    """Laptop: set the environment that Ray reads on import; idempotent."""
    cluster.set_environment(os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32))


@contextmanager
def ray_nodes(head_cpus: int, store_mb: int = STORE_MB) -> Iterator[Nodes]:
    """Laptop: a cluster of one node, group `gpu`, with this process connected; stopped at the end.

    Args:
        head_cpus: CPUs declared by its head.
        store_mb: size of the head's object store.
    """
    prepare()
    import ray

    nodes = Nodes(raynode.private_folder())
    cleaner = Cleaner(nodes.scratch, raynode.PREFIX)  # noqa: F841 - for as long as the nodes
    try:
        nodes.add("gpu", head_cpus, store_mb)
        ray.init(
            address=f"{HEAD}:{nodes.port}",
            _node_ip_address=HEAD,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield nodes
    finally:
        ray.shutdown()
        for node in reversed(nodes.started):
            node.stop()
        shutil.rmtree(nodes.scratch, ignore_errors=True)
