"""Head: sets up Ray Train's TorchTrainer and interprets its errors."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import ray.train
import torch.distributed
from ray.exceptions import ActorDiedError
from ray.train import (
    ControllerError,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    UserCallback,
    WorkerGroupError,
)
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.util import get_node_ip_address

from stoker.config.schema import Config
from stoker.errors import Failure, ScriptError, StokerError, cause_of
from stoker.events.kinds import TrainWorkerLost
from stoker.hosts.raynode import free_port
from stoker.session import ATTEMPT_VARIABLE

WORKER_MEMORY = 2**20
"""Bytes claimed per train worker on hosts without GPUs. A placement group needs some resource, and a
claimed CPU would be lost to the chain; hosts reserve CPUs for train workers by declaring fewer."""


def make_trainer(
    config: Config,
    settings: dict[str, Any],
    storage: Path,
    loop: Callable[[dict[str, Any]], None],
    torch_config: Any,
    workers: int,
    use_gpu: bool,
    claims: dict[str, float],
) -> Any:
    class Losses(UserCallback):  # type: ignore[misc]
        left = config.train.max_failures

        def after_exception(
            self, run_context: Any, worker_exceptions: dict[int, Exception]
        ) -> None:
            causes = [getattr(e, "health_check_failure", e) for e in worker_exceptions.values()]
            # Ray restarts these without counting.
            counts = not any(getattr(cause, "preempted", False) for cause in causes)
            if self.left > 0 or not counts:
                try:
                    cause = str(failure_of_first(worker_exceptions))
                except Exception as error:  # of a user's exception; here, it would end the run
                    cause = f"a train worker failed ({type(error).__name__})"
                lost = TrainWorkerLost(cause=cause, restarts_left=self.left - counts)
                settings["coordinator"].log.remote(lost)
            self.left -= counts

    resources: dict[str, float] = {"CPU": 0, "memory": WORKER_MEMORY, **claims}
    if use_gpu:
        resources["GPU"] = 1
    return TorchTrainer(
        loop,
        train_loop_config=settings,
        torch_config=torch_config(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=use_gpu,
            resources_per_worker=resources,
        ),
        run_config=RunConfig(
            name="ray_train",
            storage_path=str(storage),
            callbacks=[Losses()],
            failure_config=FailureConfig(
                max_failures=config.train.max_failures, controller_failure_limit=0
            ),
        ),
    )


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        return failure_of_first(error.worker_failures)
    failure = Failure.of(error)
    if isinstance(error, ControllerError):
        return replace(failure, text=f"Ray Train could not start the train workers: {failure.text}")
    return failure


def failure_of_first(failures: Mapping[int, BaseException]) -> Failure:
    """Of the first rank that failed; a text that does not say what it is about gets the rank."""
    rank, error = min(failures.items())
    failure, cause = Failure.of(error), cause_of(error)
    if isinstance(cause, ActorDiedError) and not cause.actor_init_failed:
        # Ray's own words, without the indented lines that name the actor.
        lines = [line for line in str(cause).splitlines() if not line.startswith("\t")]
        failure = replace(failure, where="", text=" ".join(lines))
    elif isinstance(cause, StokerError) and not failure.where:
        return failure
    return replace(failure, text=f"train worker {rank}: {failure.text}")


LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # typed, it lacks the stores

_stores: list[Any] = []
"""Train worker of rank 0: the store, which lives as long as this process."""


class Rendezvous(Backend):  # type: ignore[misc]
    """For a script, whose ranks open the process group themselves, if they do."""

    share_cuda_visible_devices = True
    """All ranks of a host see all its GPUs, as under torchrun; LOCAL_RANK selects one."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(refuse_unusable_gpu, backend_config.backend)
        alone = len(worker_group) == 1
        agreed = worker_group.execute_single(0, free_address if alone else open_rank_store)
        worker_group.execute(set_variables, {**agreed, ATTEMPT_VARIABLE: secrets.token_hex(4)})


class ScriptConfig(TorchConfig):  # type: ignore[misc]
    """Replaces TorchConfig, because train workers of a script do not use PyTorch."""

    @property
    def backend_cls(self) -> type[Rendezvous]:
        return Rendezvous

    @property
    def train_func_context(self) -> Any:
        return contextlib.nullcontext


class ProcessGroup(TorchConfig().backend_cls):  # type: ignore[misc]
    """For a recipe, whose train workers are the ranks; a single one has no store."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(refuse_unusable_gpu, backend_config.backend)
        agreed = worker_group.execute_single(0, open_rank_store) if len(worker_group) > 1 else {}
        worker_group.execute(enter_group, backend_config, agreed)


class RecipeConfig(TorchConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[ProcessGroup]:
        return ProcessGroup


def refuse_unusable_gpu(backend: str) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        raise ScriptError(
            f"PyTorch {torch.__version__} (CUDA: {torch.version.cuda or 'none'}) cannot use the GPU of"
            f" {socket.gethostname()}; choose an image with CUDA that fits the driver"
        )


def open_rank_store() -> dict[str, str]:
    """Train worker of rank 0: open PyTorch's store; returns the variables with which ranks enter it."""
    address = get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    # PyTorch 2.6 cannot give a listening socket to its libuv backend.
    given = {"master_listen_fd": listener.detach(), "use_libuv": False}
    options = {"is_master": True, "wait_for_workers": False, **given}
    _stores[:] = [dist.TCPStore(address, port, **options)]
    # PyTorch opens no store of its own at the address of one of torchrun's agent.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), **agent}


def free_address() -> dict[str, str]:
    """Train worker of a script's only rank: where it may open a store; it may also start ranks of its own."""
    return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}


def set_variables(variables: dict[str, str]) -> None:
    """Set variables; keep gloo, and NCCL on one machine, to the cluster's interface."""
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
    context = ray.train.get_context()
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
    store = None if agreed else dist.HashStore()
    timeout = timedelta(seconds=config.timeout_s)
    dist.init_process_group(
        config.backend, store=store, rank=rank, world_size=count, timeout=timeout
    )
