"""A train worker that dies, and what it had written is not there where it starts again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rows import DiesOnce


class LosesItsDisk(DiesOnce):
    """As if Ray started it again on another host: in its second epoch its checkpoints are gone."""

    run_dir: str

    def training_step(self, model: Any, batch: Any) -> Any:
        marker, run_dir = Path(self.marker), Path(self.run_dir)
        if marker.exists() and len(marker.read_text()) == 9:
            deadline = time.monotonic() + 300
            while '"checkpoint"' not in (run_dir / "events.jsonl").read_text():
                assert time.monotonic() < deadline, "no checkpoint of the first epoch"
                time.sleep(0.1)
            (run_dir / "checkpoints").rename(run_dir / "elsewhere")
        return super().training_step(model, batch)
