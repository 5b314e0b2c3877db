"""Anywhere: metrics of a run's events, by conventional name, against the global step.

TensorBoard and MLflow use the same names: `train/loss`, `val/acc1`, `lr`,
`perf/samples_per_s`, `perf/input_wait_pct`, `data/quarantined`, …; docs/tracking.md lists them.
"""

from __future__ import annotations

from typing import Any


class Scalars:
    """Anywhere: converts the events of one run, given in their order."""

    def __init__(self) -> None:
        self.step = 0
        self._books: dict[tuple[str, int], dict[str, Any]] = {}

    def of(self, event: dict[str, Any]) -> dict[str, float]:
        """The event's metrics by name; they belong to `self.step`."""
        read = getattr(self, f"_of_{event['event']}", None)
        if read is None:
            return {}
        found: dict[str, float] = read(event)
        return found

    def _of_step(self, event: dict[str, Any]) -> dict[str, float]:
        self.step = event["step"]
        elapsed = max(event["elapsed_s"], 1e-9)
        values = {
            "train/step_loss": event["loss"],
            "lr": event["lr"],
            "perf/samples_per_s": event["epoch_samples"] / elapsed,
            "perf/input_wait_pct": 100 * event["wait_s"] / elapsed,
        }
        values |= {f"perf/{term}_ms": value for term, value in event.get("terms_ms", {}).items()}
        if event.get("grad_norm") is not None:
            values["train/grad_norm"] = event["grad_norm"]
        return values

    def _of_epoch(self, event: dict[str, Any]) -> dict[str, float]:
        return self._of_metrics(event)

    def _of_metrics(self, event: dict[str, Any]) -> dict[str, float]:
        self.step = event["step"]
        return {name: value for name, value in event["metrics"].items() if value is not None}

    def _of_records(self, event: dict[str, Any]) -> dict[str, float]:
        self._books[event["split"], event["epoch"]] = event
        books = self._books.values()
        return {
            "data/quarantined": sum(counts["quarantined"] for counts in books),
            "data/repeated": sum(counts.get("repeated", 0) for counts in books),
        }

    def _of_resumed(self, event: dict[str, Any]) -> dict[str, float]:
        self.step = event["step"]
        return {}

    def _of_checkpoint(self, event: dict[str, Any]) -> dict[str, float]:
        return {"perf/checkpoint_s": event["seconds"]} if event.get("seconds") is not None else {}

    def _of_host_cpu(self, event: dict[str, Any]) -> dict[str, float]:
        return {f"system/{host}/cpu_utilization_percentage": used for host, used in event["hosts"].items()}
