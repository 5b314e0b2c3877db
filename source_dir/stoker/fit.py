"""Head: the trainer's thread."""

from __future__ import annotations

import logging
import threading
import traceback
from typing import Any

from stoker.checkpoints import resume as resuming
from stoker.data.engine.passes import GROUP_LABEL
from stoker.place import Place
from stoker.schema import Config


class Fit:
    """Head: TorchTrainer.fit() in a thread of its own, so that this one can watch and be signalled."""

    def __init__(
        self,
        config: Config,
        place: Place,
        coordinator: Any,
        workers: int,
        use_gpu: bool,
        totals: dict[str, int | None],
        start: resuming.Start,
    ) -> None:
        self.error: BaseException | None = None
        self.reason = ""
        self.complete = False
        """Whether training has come to its own end, with its model written."""
        settings = {
            "config": config,
            "coordinator": coordinator,
            "checkpoints": (start.where, start.synced),
            "resume": start.chosen,
            "model_dir": str(place.model_dir),
            "records": totals["train"],
            "has_val": "val" in totals,
        }
        (place.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        selector = {GROUP_LABEL: place.train_group} if place.train_group else None
        own_cluster = place.backend != "ray"
        self.args = (config, settings, place.run_dir / "logs", workers, use_gpu, selector, own_cluster)
        self.thread = threading.Thread(target=self._run, name="fit", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        from stoker.training.trainer import make_trainer

        try:
            make_trainer(*self.args).fit()
        except BaseException as error:
            logging.getLogger("stoker").error("%s", "".join(traceback.format_exception(error)))
            self.error = error

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()
