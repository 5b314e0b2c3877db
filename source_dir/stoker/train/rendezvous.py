"""Ray Train's controller and train workers: how the ranks find each other during Ray Train's set-up.

PyTorch's store has no key, and where a rank opens it, it listens on every address. Here, the first train
worker opens it on the host's cluster address alone, and the ranks enter it as if it were of torchrun's agent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from datetime import timedelta
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from stoker.errors import ScriptError
from stoker.hosts.raynode import free_port

ATTEMPT_VARIABLE = "STOKER_ATTEMPT"
"""Identical in all train workers of a group start; changes with the next start."""
LOOPBACK = "127.0.0.1"

_stores: list[Any] = []
"""Train worker of rank 0: the store, which lives as long as this process."""


class Rendezvous(Backend):  # type: ignore[misc]
    """Ray Train's controller: for a script, whose ranks open the process group themselves, if they do."""

    share_cuda_visible_devices = True
    """All ranks of a host see all its GPUs, as under torchrun; LOCAL_RANK selects one."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(refuse_unusable_gpu, backend_config.backend)
        alone = len(worker_group) == 1
        agreed = worker_group.execute_single(0, free_address if alone else open_store)
        worker_group.execute(set_variables, {**agreed, ATTEMPT_VARIABLE: secrets.token_hex(4)})


class ScriptConfig(TorchConfig):  # type: ignore[misc]
    """Head: replaces TorchConfig, because train workers of a script do not use PyTorch."""

    @property
    def backend_cls(self) -> type[Rendezvous]:
        return Rendezvous

    @property
    def train_func_context(self) -> Any:
        return contextlib.nullcontext


class ProcessGroup(TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray Train's controller: for a recipe, whose train workers are the ranks; a single one has no store."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(refuse_unusable_gpu, backend_config.backend)
        agreed = worker_group.execute_single(0, open_store) if len(worker_group) > 1 else {}
        worker_group.execute(enter_group, backend_config, agreed)


class RecipeConfig(TorchConfig):  # type: ignore[misc]
    """Head: TorchConfig with `ProcessGroup`."""

    @property
    def backend_cls(self) -> type[ProcessGroup]:
        return ProcessGroup


def refuse_unusable_gpu(backend: str) -> None:
    """Train worker: refuse to train on the CPUs of a host whose GPU was counted on.

    Raises:
        ScriptError: PyTorch cannot use the GPU.
    """
    import torch

    if backend == "nccl" and not torch.cuda.is_available():
        raise ScriptError(
            f"PyTorch {torch.__version__} (CUDA: {torch.version.cuda or 'none'}) cannot use the GPU of"
            f" {socket.gethostname()}; choose an image with CUDA that fits the driver"
        )


def open_store() -> dict[str, str]:
    """Train worker of rank 0: open PyTorch's store; returns the variables with which ranks enter it."""
    from ray.util import get_node_ip_address

    address = get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    _stores[:] = [_distributed().TCPStore(address, port, **options)]
    # PyTorch opens no store of its own at the address of one of torchrun's agent.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), **agent}


def free_address() -> dict[str, str]:
    """Train worker of a script's only rank: where it may open a store; it may also start ranks of its own."""
    return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}


def set_variables(variables: dict[str, str]) -> None:
    """Train worker: set variables; keep gloo, and NCCL on one machine, to the cluster's interface."""
    import psutil
    from ray.util import get_node_ip_address

    os.environ.update(variables)
    address = variables.get("MASTER_ADDR", LOOPBACK)
    if address != LOOPBACK:
        address = get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if address in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if address == LOOPBACK:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def enter_group(config: TorchConfig, agreed: dict[str, str]) -> None:
    """Train worker: open the process group; `agreed` is of `open_store`, or empty for a single one."""
    from ray.train import get_context
    from ray.train.torch import get_device

    context = get_context()
    rank, count = context.get_world_rank(), context.get_world_size()
    own = {
        "RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "NODE_RANK": context.get_node_rank(),
        # Accelerate selects the device by it.
        "ACCELERATE_TORCH_DEVICE": get_device(),
    }
    set_variables({**agreed, **{name: str(value) for name, value in own.items()}})
    dist = _distributed()
    store = None if agreed else dist.HashStore()
    timeout = timedelta(seconds=config.timeout_s)
    dist.init_process_group(config.backend, store=store, rank=rank, world_size=count, timeout=timeout)


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed  # typed, it lacks the stores
