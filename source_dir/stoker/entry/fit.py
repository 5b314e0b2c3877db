"""Head: runs Ray Train in a separate process; the run's log file, to which both write."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from stoker.config import redaction
from stoker.config.schema import Config
from stoker.errors import Failure
from stoker.hosts.topology import TRAIN_RESOURCE
from stoker.place import RunPlace

if TYPE_CHECKING:
    from stoker.scripts.supervisor import ScriptWork
    from stoker.train.recipe_work import RecipeWork

    Work = RecipeWork | ScriptWork


class Fit:
    """Runs TorchTrainer.fit() in a Ray task, so that the driver can watch it and handle signals.

    The task runs on this host. Its worker has Ray Train and PyTorch preloaded; the driver imports neither.
    """

    def __init__(
        self, work: Work, place: RunPlace, coordinator: Any, ended: Callable[[], None]
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.failure: Failure | None = None
        self.reason = ""
        self.complete = False
        settings = {"config": work.config, "coordinator": coordinator, **work.settings()}
        parts = (work.loop, work.torch_config)
        claims = {TRAIN_RESOURCE: 1.0} if place.train_group else {}
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=here, name="fit")(fit)
        self._call = task.remote(settings, place.run_dir, parts, work.workers, work.use_gpu, claims)
        self._ended = threading.Event()
        threading.Thread(target=self._watch, args=[ended], name="fit", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Afterwards `failure` says why training failed; None: it did not."""
        return not self._ended.is_set()

    def _watch(self, ended: Callable[[], None]) -> None:
        import ray

        try:
            self.failure = ray.get(self._call)
        except Exception as error:
            self.failure = Failure.of(error)
        self._ended.set()
        ended()


def fit(
    settings: dict[str, Any], run_dir: Path, parts: tuple[str, str], *how: Any
) -> Failure | None:
    """Ray task on the head: train to the end; returns why it failed.

    Args:
        settings: passed to the loop in every train worker, with the job as `config`.
        run_dir: Ray Train's files go to its logs.
        parts: the loop and Ray Train's backend config class, each as `module:name`.
        how: number of train workers, whether they use GPUs, and custom resources that each takes.
    """
    from stoker.hosts.cluster import set_ray_train
    from stoker.ray_compat import leave_out_the_cleaner
    from stoker.train.trainer import failure_of, make_trainer

    set_ray_train()
    config: Config = settings["config"]
    # A lost GPU host may come back, or another in its place, in minutes; Ray Train would wait for one.
    # Set anew: Ray reuses this process for the next run of a notebook.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = f"{config.cluster.join_timeout_s:g}"
    redaction.learn_job(config.model_dump(mode="json"))
    open_log(run_dir)
    try:
        if config.driver:
            resolve_name(parts[0])(settings)
            return None
        loop, torch_config = map(resolve_name, parts)
        trainer = make_trainer(config, settings, run_dir / "logs", loop, torch_config, *how)
        leave_out_the_cleaner()
        trainer.fit()
    except BaseException as error:
        logging.getLogger("stoker").error("%s", "".join(traceback.format_exception(error)))
        return failure_of(error)
    return None


class LogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redaction.scrub(super().format(record))  # an exception's text may contain secrets


def open_log(run_dir: Path) -> logging.Logger:
    """Open the run's log file; Ray's messages go there instead of to the screen."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(run_dir / "logs" / "driver.log")
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("ray", "ray.data", "ray.train", "stoker"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO)
    return logging.getLogger("stoker")
