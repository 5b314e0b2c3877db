"""Anywhere: metrics of a run's events, by conventional name, against the global step.

TensorBoard and MLflow use the same names: `train/loss`, `val/acc1`, `lr`,
`perf/samples_per_s`, `perf/input_wait_pct`, `data/quarantined`, …; docs/tracking.md lists them.
"""

from __future__ import annotations

from stoker.events import kinds


class Scalars:
    """Converts the events of one run, given in their order."""

    def __init__(self) -> None:
        self.step = 0
        self._books: dict[tuple[str, int], kinds.RecordsCounted] = {}

    def of(self, event: kinds.Event) -> dict[str, float]:
        """The event's metrics by name; they belong to `self.step`."""
        match event:
            case kinds.StepLogged():
                self.step = event.step
                return _of_step(event)
            case kinds.EpochEnded() | kinds.MetricsLogged():
                self.step = event.step
                return {name: value for name, value in event.metrics.items() if value is not None}
            case kinds.RecordsCounted():
                self._books[event.split, event.epoch] = event
                books = self._books.values()
                return {
                    "data/quarantined": sum(counts.quarantined for counts in books),
                    "data/repeated": sum(counts.repeated for counts in books),
                }
            case kinds.Resumed():
                self.step = event.step
            case kinds.CheckpointWritten(seconds=float(seconds)):
                return {"perf/checkpoint_s": seconds}
            case kinds.HostCpu():
                return {f"system/{host}/cpu_utilization_percentage": cpu for host, cpu in event.hosts.items()}
        return {}


def _of_step(event: kinds.StepLogged) -> dict[str, float]:
    elapsed = max(event.elapsed_s, 1e-9)
    values = {
        "train/step_loss": event.loss,
        "lr": event.lr,
        "perf/samples_per_s": event.epoch_samples / elapsed,
        "perf/input_wait_pct": 100 * event.wait_s / elapsed,
    }
    values |= {f"perf/{term}_ms": value for term, value in event.terms_ms.items()}
    return values if event.grad_norm is None else values | {"train/grad_norm": event.grad_norm}
