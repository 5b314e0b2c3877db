"""Head: sets up Ray Train's TorchTrainer and interprets its errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stoker.config.schema import Config
from stoker.errors import DataError, ScriptError, UsageError, where_raised
from stoker.hosts.forks import TRAINS_VARIABLE
from stoker.train.loop import WHERE

WORKER_MEMORY = 2**20
"""Bytes claimed per train worker on hosts without GPUs. A placement group needs some resource, and a
claimed CPU would be lost to the chain; hosts reserve CPUs for train workers by declaring fewer."""


def count_workers(config: Config, resources: Mapping[str, float]) -> tuple[int, bool]:
    """Head: (train workers, whether they use GPUs): one per GPU, or `train.workers` without GPUs.

    Args:
        config: the job.
        resources: of the cluster, as `ray.cluster_resources()`.

    Raises:
        UsageError: more workers than GPUs, or without GPUs more than CPUs (two always start).
    """
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    wanted = config.train.workers or 0
    if gpus and wanted > gpus:
        raise UsageError(f"train.workers: {wanted} workers need as many GPUs; found {gpus}")
    if not gpus and wanted > max(cpus, 2):
        raise UsageError(f"train.workers: {wanted} workers need as many CPUs; found {cpus}")
    return wanted or gpus or 1, gpus > 0


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
    """Head: create the job's TorchTrainer.

    Args:
        config: the job.
        settings: passed to the loop in every train worker.
        storage: folder for Ray Train's own files.
        loop: the function that every train worker runs.
        torch_config: a TorchConfig class, which sets up the workers' process group.
        workers: total number of train workers.
        use_gpu: one GPU per train worker.
        claims: custom resources that each train worker takes; only hosts that train have them.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchTrainer

    class Losses(UserCallback):  # type: ignore[misc]
        """Ray Train's controller: reports a lost train worker if training restarts after it."""

        left = config.train.max_failures

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            causes = [getattr(e, "health_check_failure", e) for e in worker_exceptions.values()]
            # Ray restarts these without counting.
            counts = not any(getattr(cause, "preempted", False) for cause in causes)
            if self.left > 0 or not counts:
                try:
                    cause = first_cause(worker_exceptions)
                except Exception as error:  # of a user's exception; here, it would end the run
                    cause = f"a train worker failed ({type(error).__name__})"
                lost = {"cause": cause, "restarts_left": self.left - counts}
                settings["coordinator"].log.remote("train_worker_lost", lost)
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
            worker_runtime_env={"env_vars": {TRAINS_VARIABLE: "1"}},
            failure_config=FailureConfig(max_failures=config.train.max_failures, controller_failure_limit=0),
        ),
    )


def cause_of(error: BaseException) -> str:
    """Head: the cause of a failed fit() on one line: which train worker raised what, and where."""
    from ray.train import ControllerError, WorkerGroupError

    if isinstance(error, WorkerGroupError) and error.worker_failures:
        return first_cause(error.worker_failures)
    if isinstance(error, ControllerError):
        return f"Ray Train could not start the train workers: {unwrap(error.controller_failure)}"
    return unwrap(error)


def first_cause(failures: Mapping[int, BaseException]) -> str:
    """Head: the cause of the failure of the lowest of these ranks on one line."""
    rank, failure = min(failures.items())
    text = unwrap(failure)
    for kind in ("DataError", "UsageError", "ScriptError", "OSError", "FloatingPointError"):
        if text.startswith(f"{kind}: "):
            return text.removeprefix(f"{kind}: ")
    return f"train worker {rank}: {text}"


def unwrap(error: BaseException) -> str:
    """Head: the innermost error wrapped by Ray, as `Type: message (file:line)`."""
    from ray.exceptions import ActorDiedError

    inner: BaseException = error
    seen: set[int] = set()
    kinds = ("cause", "_base_exc", "health_check_failure")
    while id(inner) not in seen:
        seen.add(id(inner))
        below = next((found for kind in kinds if (found := getattr(inner, kind, None))), None)
        if isinstance(below, BaseException):
            inner = below
    # One with a place was raised in a train worker, about another actor.
    if isinstance(inner, ActorDiedError) and not (inner.actor_init_failed or hasattr(inner, WHERE)):
        return died(str(inner))
    if isinstance(inner, DataError | ScriptError | UsageError):
        return f"{type(inner).__name__}: {(str(inner).splitlines() or [''])[0]}"
    return str(getattr(inner, WHERE, "")) or where_raised(inner)


def died(text: str) -> str:
    """Head: what Ray says of a dead actor in a paragraph, on one short line."""
    pid, address = (re.search(rf"\b{name}: (\S+)", text) for name in ("pid", "ip"))
    which = f" (process {pid[1]} on {address[1]})" if pid and address else ""
    if "node has died" in text or "node was terminated" in text:
        return f"died{which}: its host is gone"
    if "OUT_OF_MEMORY" in text:
        return f"died{which}: Ray ended it because its host is short of memory"
    return f"died{which}: out of memory, killed or crashed"
