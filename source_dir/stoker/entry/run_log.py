"""Head: the run's log file."""

from __future__ import annotations

import logging
from pathlib import Path

from stoker.config import redaction


class LogFormatter(logging.Formatter):
    """Removes the run's secrets, which an exception's text may contain, from log lines."""

    def format(self, record: logging.LogRecord) -> str:
        return redaction.scrub(super().format(record))


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
