"""Head: TensorBoard's event files."""

from __future__ import annotations

import base64
import io
import logging
from pathlib import Path
from typing import Any

from stoker.tracking.runs import flat_config
from stoker.tracking.scalars import Scalars
from stoker.tracking.sinks import Sink
from stoker.tracking.summary import Summary

COMPARED = ("params.", "train.", "data.", "seed")
"""Sections whose values are TensorBoard's hyperparameters."""


class Board(Sink):
    """Head: a run's curves, its configuration as text, and its hyperparameters beside its metrics."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.scalars = Scalars()
        self.writer = self._open(None)
        try:
            config = (run_dir / "config.yaml").read_text(encoding="utf-8")
        except OSError:
            return
        # Four spaces make a block of code, which a fence inside the text cannot end.
        self.writer.add_text("config", "".join(f"    {line}\n" for line in config.splitlines()), 0)

    def _open(self, purge_step: int | None) -> Any:
        from tensorboardX import SummaryWriter

        return SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=purge_step)

    def take(self, event: dict[str, Any]) -> None:
        """Draw what an event holds."""
        for name, value in self.scalars.of(event).items():
            self.writer.add_scalar(name, value, self.scalars.step, walltime=event.get("time"))
        if event["event"] == "samples":
            try:
                for number, image in enumerate(event["images"]):
                    self.writer.add_image(f"samples/{number}", pixels(image["png"]), dataformats="HWC")
            except Exception:
                logging.getLogger("stoker").exception("TensorBoard: no sample images")
        if event["event"] == "resumed":
            # What was drawn beyond the checkpoint comes again.
            self.writer.close()
            self.writer = self._open(event["step"] + 1)

    def close(self, summary: Summary) -> None:
        """Write the hyperparameters, for TensorBoard's table of runs, and close the files."""
        from tensorboardX.summary import hparams

        try:
            config = flat_config(self.run_dir)
            given = {
                key: value if isinstance(value, bool | int | float) else str(value)
                for key, value in config.items()
                if key.startswith(COMPARED)
            }
            for part in hparams(given, summary.metrics.last):
                self.writer.file_writer.add_summary(part)
        except Exception:
            # A table of hyperparameters is not worth a run.
            logging.getLogger("stoker").exception("TensorBoard: no hyperparameters")
        self.writer.close()


def pixels(png: str) -> Any:
    """Head: a picture in base64 as height × width × 3, uint8."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))
