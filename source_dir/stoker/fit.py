"""Head: Ray Train's part of the run, in a process of its own."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from stoker import redaction
from stoker.data.engine.passes import GROUP_LABEL
from stoker.errors import explain
from stoker.logs import open_log
from stoker.place import Place
from stoker.schema import Config
from stoker.training.work import Work


class Fit:
    """Head: TorchTrainer.fit(), so that this process can watch and be signalled.

    It runs in one of Ray's processes on this host, which has imported Ray Train and PyTorch before it was
    asked: the driver needs neither.
    """

    def __init__(self, work: Work, place: Place, coordinator: Any) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.error = self.reason = ""
        self.complete = False
        """Whether training has come to its own end, with its model written."""
        settings = {"config": work.config, "coordinator": coordinator, **work.settings()}
        parts = (work.loop, work.torch_config)
        selector = {GROUP_LABEL: place.train_group} if place.train_group else None
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=here, name="fit")(fit)
        own_cluster = place.backend != "ray"
        self._call = task.remote(
            work.config, settings, place.run_dir, parts, work.workers, work.use_gpu, selector, own_cluster
        )
        self._ended = False

    @property
    def alive(self) -> bool:
        """Whether training goes on; `error` says how it ended."""
        import ray

        if not self._ended and ray.wait([self._call], timeout=0)[0]:
            self._ended = True
            try:
                self.error = ray.get(self._call)
            except Exception as error:
                self.error = explain(error)
        return not self._ended


def fit(config: Config, settings: dict[str, Any], run_dir: Path, parts: tuple[str, str], *how: Any) -> str:
    """A process of Ray's on the head: train to the end.

    Args:
        config: the job.
        settings: for the loop in every train worker.
        run_dir: of the run; Ray Train's own files go to its logs.
        parts: the loop, and the class by which Ray Train sets up its group, each as `module:name`.
        how: number of train workers, whether they have GPUs, labels of their hosts, whether the cluster ends
            with the run.

    Returns:
        The one line behind a failure; empty where there is none.
    """
    from stoker.bootstrap.cluster import set_ray_train
    from stoker.training.trainer import cause_of, make_trainer

    set_ray_train()
    redaction.learn(config.model_dump(mode="json"))
    open_log(run_dir)
    try:
        loop, torch_config = map(resolve_name, parts)
        make_trainer(config, settings, run_dir / "logs", loop, torch_config, *how).fit()
    except BaseException as error:
        logging.getLogger("stoker").error("%s", "".join(traceback.format_exception(error)))
        return cause_of(error) or type(error).__name__  # an empty line would stand for success
    return ""
