"""Ray script: what its train workers pass to `ray.train.report` also reaches the job.

Ray Train loads `TrainReports` by its name in a variable (`VARIABLE`) wherever the script makes a trainer.
"""

from __future__ import annotations

import numbers
from typing import Any

from ray.train import UserCallback

from stoker import ray_compat, session

VARIABLE = "RAY_TRAIN_CALLBACKS"
CALLBACK = f"{__name__}.TrainReports"


class Reported(UserCallback):  # type: ignore[misc]
    """Controller of the trainer."""

    reports = 0

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        """Log the numbers that rank 0 reported; a report is not a step."""
        self.reports += 1
        own = {name: float(v) for name, v in metrics[0].items() if isinstance(v, numbers.Real)}
        if own:
            session.tell("metrics", step=self.reports, metrics=own, is_step=False)


class TrainReports(ray_compat.train_callbacks()):  # type: ignore[misc]
    """Script: created with each trainer, then copied to its controller."""

    def __init__(self) -> None:
        super().__init__([Reported()], None)
        ray_compat.leave_out_the_cleaner()
