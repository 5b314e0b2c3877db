"""Laptop: several Ray nodes on this machine, each with an object store of its own, to measure on."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.bootstrap import cluster, raynode
from stoker.bootstrap.raynode import RayNode

STORE_MB = 200
HEAD = "127.0.1.1"


class Nodes:
    """Laptop: the nodes that were started, the head first.

    Each has an address of its own in 127.0.0.0/8, so that Ray takes them for different machines and moves
    objects between their stores as it does between hosts.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.port = raynode.free_port()
        self.started: list[RayNode] = []

    def add(self, group: str, cpus: int, store_mb: int = STORE_MB) -> RayNode:
        """Laptop: start one more node and wait until it runs.

        Args:
            group: its host group; the node's name is the group and its number.
            cpus: how many CPUs Ray may count on there; a declaration, not a limit.
            store_mb: size of its object store.

        Raises:
            ClusterError: Ray did not start.
        """
        number = len(self.started)
        arguments = raynode.arguments_for(
            address=f"127.0.1.{number + 1}",
            labels={"stoker.group": group, "stoker.host": f"{group}-{number}"},
            cpus=cpus,
            gpus=0,
            store=raynode.Store(store_mb * 2**20),
        )
        # Nodes that share a folder unpack the same job over each other.
        arguments.append(f"--temp-dir={self.scratch}/{number}")
        if number == 0:
            arguments += ["--head", f"--port={self.port}", "--include-dashboard=false"]
        else:
            arguments.append(f"--address={HEAD}:{self.port}")
        arguments.append(f"--dashboard-agent-listen-port={raynode.free_port()}")
        node = RayNode(arguments, self.scratch / f"{number}.log")
        self.started.append(node)
        # Two nodes of one machine that start at once wait for each other for ever.
        node.wait_started()
        return node


def prepare() -> None:
    """Laptop: what Ray must find in the environment when it is imported; again has no effect."""
    cluster.set_environment(os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32))


@contextmanager
def ray_nodes(head_cpus: int, store_mb: int = STORE_MB) -> Iterator[Nodes]:
    """Laptop: a cluster of one node, group `gpu`, to which this process is connected; gone at the end.

    Args:
        head_cpus: CPUs that its head declares.
        store_mb: size of the head's object store.
    """
    prepare()
    import ray

    # Paths of Ray's sockets must stay short.
    nodes = Nodes(Path(tempfile.mkdtemp(prefix="sn", dir="/tmp")))
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
