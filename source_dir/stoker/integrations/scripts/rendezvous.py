"""Head and train worker: chooses the rendezvous address of the script's ranks during Ray Train's set-up.

Ray's own backend would open a process group in the train workers and occupy the port that the script needs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from stoker.bootstrap.raynode import free_port

ATTEMPT_VARIABLE = "STOKER_ATTEMPT"
"""Identical in all train workers of a group start; changes with the next start."""


class Rendezvous(Backend):  # type: ignore[misc]
    """Ray Train's controller: agrees on an address, which the script opens."""

    share_cuda_visible_devices = True
    """All ranks of a host see all its GPUs, as under torchrun; LOCAL_RANK selects one."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, free_address)
        agreed = {"MASTER_ADDR": address, "MASTER_PORT": str(port), ATTEMPT_VARIABLE: secrets.token_hex(4)}
        worker_group.execute(set_variables, agreed)


class ScriptConfig(TorchConfig):  # type: ignore[misc]
    """Head: replaces TorchConfig, because train workers of a script do not use PyTorch."""

    @property
    def backend_cls(self) -> type[Rendezvous]:
        return Rendezvous

    @property
    def train_func_context(self) -> Any:
        return contextlib.nullcontext


def set_variables(variables: dict[str, str]) -> None:
    """Train worker: set environment variables for the script."""
    os.environ.update(variables)


def free_address() -> tuple[str, int]:
    """Train worker of rank 0: this host's address and a free port."""
    import ray.util

    return ray.util.get_node_ip_address(), free_port("")
