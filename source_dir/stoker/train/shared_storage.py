"""Head: whether all hosts that may train can see the checkpoints.

Ray may restart the train workers on another host. Without the checkpoints there, the run would silently
start again from the first epoch.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path
from typing import Any

from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.figures import count_of
from stoker.hosts.topology import GROUP_LABEL

PROBE_TIMEOUT_S = 300.0
SEEN_WITHIN_S = 5.0
"""How long a new file may take to appear on another host of a shared file system."""


def refuse_unshared(config: Config, where: str, train_group: str | None, use_gpu: bool) -> None:
    """Head, before training: refuse restarts if one could land on a host without the checkpoints.

    Args:
        config: `train.max_failures` allows restarts.
        where: folder or URI of this run's checkpoints.
        train_group: label of the group whose hosts train; None: any host.
        use_gpu: whether train workers need GPUs.

    Raises:
        UsageError: several hosts may train but do not share the folder.
    """
    if not config.train.max_failures or "://" in where:
        return
    hosts = hosts_that_may_train(train_group, use_gpu)
    blind = hosts_without(where, list(hosts)) if len(hosts) > 1 else []
    if blind:
        raise UsageError(
            f"train.max_failures: {count_of(config.train.max_failures, 'restart')} may land on another host,"
            f" but {', '.join(sorted(hosts[node] for node in blind))} cannot see the checkpoints in {where}"
            f" of {hosts[next(iter(hosts))]}; set checkpoint.dir to s3:// or a folder shared by the hosts"
            " that train, or set train.max_failures=0"
        )


def hosts_that_may_train(train_group: str | None, use_gpu: bool) -> dict[str, str]:
    """Head: Ray node id → host name, for each host that train workers may start on."""
    import ray

    found = {}
    for node in ray.nodes():
        labels = node.get("Labels", {})
        fits = train_group is None or labels.get(GROUP_LABEL) == train_group
        if node["Alive"] and fits and (not use_gpu or node["Resources"].get("GPU")):
            found[node["NodeID"]] = labels.get("stoker.host") or node["NodeManagerHostname"]
    return found


def hosts_without(folder: str, nodes: list[str]) -> list[str]:
    """Head: those of `nodes` that do not see a file written into `folder` by the first of them.

    Raises:
        UsageError: a host does not answer, or the first one cannot write.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = f"{folder}/.shared-{uuid.uuid4().hex}"

    def on(node: str, function: Any) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(function).options(num_cpus=0, scheduling_strategy=there).remote(probe)

    first, *others = nodes
    try:
        ray.get(on(first, write), timeout=PROBE_TIMEOUT_S)
        seen = ray.get([on(node, sees) for node in others], timeout=PROBE_TIMEOUT_S)
    except (ray.exceptions.RayError, OSError) as error:
        cause = " ".join(str(error).split())[-300:] or type(error).__name__
        raise UsageError(f"checkpoint.dir: cannot check {folder} on the hosts that train: {cause}") from None
    finally:
        on(first, remove)
    return [node for node, there in zip(others, seen, strict=True) if not there]


def write(path: str) -> None:
    """Host that trains: create the probe file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()


def sees(path: str) -> bool:
    """Host that trains: whether the probe file appears here."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not Path(path).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def remove(path: str) -> None:
    """Host that trains: delete the probe file."""
    with contextlib.suppress(OSError):
        Path(path).unlink()
