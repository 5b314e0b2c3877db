"""A real Ray cluster with Ray's own autoscaler, whose hosts are nodes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fakes.ray_nodes import started, stop_all

from stoker.hosts.raynode import free_port
from stoker.ray_compat import COMMAND_LINE

HEAD_ID = "f" * 51 + "00000"
"""The head's node id for Ray's fake provider."""
GPU_TYPE = "gpu-on-demand"
"""A type of host, and its group. Ray starts those that are there from the beginning, without a device."""
PROVIDER = "hosts_of_any_memory.Provider"


@contextlib.contextmanager
def autoscaled(
    *,
    head_cpus: int = 2,
    cpus: int = 2,
    most: int = 6,
    idle_s: float = 5.0,
    path: str = "",
    gpu_hosts: int = 0,
) -> Iterator[dict[str, str]]:
    """Environment of a driver on the head of such a cluster.

    Args:
        head_cpus: CPUs of the head.
        cpus: of each host that the autoscaler adds.
        most: number of hosts that it may add.
        idle_s: it removes hosts that have done nothing for so long.
        gpu_hosts: with a GPU, there from the beginning; the autoscaler may add one.
        path: where Ray's workers on all hosts import modules from.
    """
    scratch, port = Path(tempfile.mkdtemp(prefix="as")), free_port()
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "240",
        "PYTHONPATH": path,
        "RAY_ADDRESS": f"127.0.0.1:{port}",
    }
    of_head = {
        "RAY_FAKE_CLUSTER": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), path]),
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    }
    config = scratch / "autoscaler.json"
    config.write_text(json.dumps(_config(port, head_cpus, cpus, most, idle_s, gpu_hosts)))
    command = [
        sys.executable, "-c", COMMAND_LINE, "start", "--head", "--block",
        "--node-ip-address=127.0.0.1", f"--port={port}", f"--num-cpus={head_cpus}", "--num-gpus=0",
        "--labels=stoker-group=gpu,stoker.host=head", f"--object-store-memory={200 * 2**20}",
        "--include-dashboard=false", f"--dashboard-port={free_port()}",
        f"--temp-dir={scratch}/ray", f"--autoscaling-config={config}",
    ]  # fmt: skip
    head = None
    try:
        head = started(command, environment | of_head, scratch / "log")
        yield environment
    finally:
        # The nodes are children of the autoscaler's process, which is a child of the head's.
        stop_all([head] if head else [])
        shutil.rmtree(scratch, ignore_errors=True)


def _config(
    port: int, head_cpus: int, cpus: int, most: int, idle_s: float, gpu_hosts: int
) -> dict[str, object]:
    store = 80 * 2**20
    # Ray does not fill in what an external provider leaves out.
    commands = (
        "setup",
        "head_setup",
        "worker_setup",
        "head_start_ray",
        "worker_start_ray",
        "initialization",
    )
    with_gpu = {
        "resources": {
            "CPU": cpus,
            "GPU": 1,
            "memory": 2**40,  # at least what Ray finds on this machine
            "object_store_memory": store,
        },
        "labels": {"stoker-group": GPU_TYPE},
        "node_config": {},
        "min_workers": gpu_hosts,
        "max_workers": gpu_hosts + 1,
    }
    return {
        **{f"{name}_commands": [] for name in commands},
        **{name: {} for name in ("auth", "file_mounts", "docker")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
        "cluster_name": "fake",
        "max_workers": most,
        "idle_timeout_minutes": idle_s / 60,
        "upscaling_speed": 100,
        "provider": {
            # As an external provider: Ray's package lacks the defaults of its own type fake_multinode.
            "type": "external",
            "module": PROVIDER,
            "gcs_address": f"127.0.0.1:{port}",
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {
                "resources": {"CPU": head_cpus},
                "node_config": {},
                "max_workers": 0,
            },
            "cpu": {
                "resources": {"CPU": cpus, "cpu_host": 1, "object_store_memory": store},
                "labels": {"stoker-group": "cpu"},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            },
            **({GPU_TYPE: with_gpu} if gpu_hosts else {}),
        },
    }
