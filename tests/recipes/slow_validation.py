"""A recipe whose first validation waits, in its second batch, for the run to be asked to stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rows import Counting


class SlowValidation(Counting):
    run_dir: str
    """Where the driver notes events."""

    def validation_step(self, model: Any, batch: Any) -> Any:
        folder = Path(self.run_dir)
        if len(batch["y"]) > 1:  # the trial before the first step; the job has batches of one
            return super().validation_step(model, batch)
        with (folder / "validating").open("a") as file:
            batches = file.tell()
            file.write(".")
        until = time.monotonic() + 300
        while batches and not self._asked(folder):
            assert time.monotonic() < until, "nobody asked the run to stop"
            time.sleep(0.02)
        return super().validation_step(model, batch)

    @staticmethod
    def _asked(folder: Path) -> bool:
        return '"event": "stop"' in (folder / "events.jsonl").read_text()
