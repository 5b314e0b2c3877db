"""Head: distributes the events of a run to its sinks, and names the metrics in them."""

from __future__ import annotations

import logging
import queue
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stoker.config.redaction import scrub, scrubbed
from stoker.errors import where_raised
from stoker.events import kinds
from stoker.events.kinds import Event
from stoker.events.summary import Summary


class Sink:
    """A destination of a run's events; used only from the driver's thread.

    To add your own, put a class into your source folder and name it in `tracking.sinks`. It is created with
    the run directory, which contains `config.yaml`, and the configuration.
    """

    essential = False
    """Whether an error in it fails the run; otherwise the sink is dropped, with a note."""

    def take(self, event: dict[str, Any]) -> None:
        """Take one event: `event` is its kind, `time` is in seconds since 1970; see docs/events.md."""

    def on_event(self, event: Event) -> None:
        """As `take`, for Stoker's own sinks."""
        self.take(event.record())

    def about(self) -> dict[str, Any]:
        """Where to find the run there, for `tracking` in summary.json."""
        return {}

    def close(self, summary: Summary) -> None:
        """Called at the end of the run.

        Args:
            summary: complete, with the final `status`.
        """


class Tracking:
    def __init__(self, summary: Summary, sinks: Iterable[Sink]) -> None:
        self.summary, self.sinks = summary, list(sinks)
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def add(self, *sinks: Sink) -> None:
        self.sinks[-1:-1] = sinks

    def say(self, text: str) -> None:
        """Any thread: queue one line for the user; it becomes a note with the next event."""
        self._said.put(text)

    def note(self, text: str) -> None:
        self._give(kinds.Note(text=scrub(text)))

    def phase(self, name: str) -> None:
        self._give(kinds.PhaseDone(phase=name))

    def take(self, records: Iterable[dict[str, Any]]) -> list[Event]:
        events = [self._read(record) for record in records]
        for event in events:
            self._give(event)
        while not self._said.empty():
            self.note(self._said.get())
        return events

    def _read(self, record: dict[str, Any]) -> Event:
        event = kinds.event_of(scrubbed(record))
        if isinstance(event, kinds.HostCpu):
            names = {host.node_id: host.host for host in self.summary.cluster.hosts}
            hosts = {names.get(node, node): used for node, used in event.hosts.items()}
            gpus = {names.get(node, node): used for node, used in event.gpus.items()}
            return event.model_copy(update={"hosts": hosts, "gpus": gpus})
        return event

    def close(self) -> None:
        """End of the run: complete the summary with the sinks' parts, and close them."""
        for sink in self.sinks:
            self.summary.tracking |= sink.about()
        while self.sinks:
            sink = self.sinks.pop(0)
            self._call(sink, sink.close, self.summary)
            self.take([])  # its last lines, for the remaining sinks

    def _give(self, event: Event) -> None:
        for sink in list(self.sinks):
            self._call(sink, sink.on_event, event)

    def _call(self, sink: Sink, method: Any, value: Any) -> None:
        try:
            method(value)
        except Exception as error:
            if sink.essential:
                raise
            self.sinks = [other for other in self.sinks if other is not sink]
            logging.getLogger("stoker").error("%s", traceback.format_exc())
            name = type(sink).__name__
            self.say(
                f"tracking: {name} failed and is dropped; the run continues: {where_raised(error)}"
            )


class Scalars:
    """Converts the events of one run, given in their order, to metrics against the global step.

    TensorBoard and MLflow use the same names: `train/loss`, `val/acc1`, `lr`, `perf/samples_per_s`,
    `perf/input_wait_pct`, `data/quarantined`, …; docs/tracking.md lists them.
    """

    def __init__(self) -> None:
        self.step = 0
        self._books: dict[tuple[str, int], Counter[str]] = {}
        self._total = Counter[str]()

    def of(self, event: kinds.Event) -> dict[str, float]:
        """They belong to `self.step`."""
        match event:
            case kinds.StepLogged():
                self.step, elapsed = event.step, max(event.elapsed_s, 1e-9)
                values = {
                    "train/step_loss": event.loss,
                    "lr": event.lr,
                    "perf/samples_per_s": event.epoch_samples / elapsed,
                    "perf/input_wait_pct": 100 * event.wait_s / elapsed,
                }
                values |= {f"perf/{term}_ms": value for term, value in event.terms_ms.items()}
                if event.grad_norm is not None:
                    values["train/grad_norm"] = event.grad_norm
                return values
            case kinds.EpochEnded() | kinds.MetricsLogged():
                self.step = event.step
                return {name: value for name, value in event.metrics.items() if value is not None}
            case kinds.RecordsCounted():
                # An epoch that is trained anew replaces its books.
                self._total.subtract(self._books.pop((event.split, event.epoch), {}))
                books = {"data/quarantined": event.quarantined, "data/repeated": event.repeated}
                self._books[event.split, event.epoch] = Counter(books)
                self._total.update(books)
                return dict(self._total)
            case kinds.Resumed():
                self.step = event.step
            case kinds.CheckpointWritten(seconds=float(seconds)):
                return {"perf/checkpoint_s": seconds}
            case kinds.HostCpu():
                return {
                    f"system/{host}/cpu_utilization_percentage": cpu
                    for host, cpu in event.hosts.items()
                } | {
                    f"system/{host}/gpu_{number}_utilization_percentage": use
                    for host, gpus in event.gpus.items()
                    for number, use in enumerate(gpus)
                }
        return {}


class Board(Sink):
    """A run's curves for TensorBoard, written with its own writer, which does not import PyTorch."""

    def __init__(self, run_dir: Path) -> None:
        self.scalars = Scalars()
        self._folder = run_dir / "tensorboard"
        self._writer: Any = None

    def on_event(self, event: Event) -> None:
        found, resumed = self.scalars.of(event), isinstance(event, kinds.Resumed)
        if not (found or resumed):
            return  # so that the first step does not wait for these imports
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = self._writer = self._writer or EventFileWriter(str(self._folder))
        if found:
            point = summary_pb2.Summary.Value
            values = summary_pb2.Summary(
                value=[point(tag=tag, simple_value=y) for tag, y in found.items()]
            )
            writer.add_event(
                event_pb2.Event(wall_time=event.time, step=self.scalars.step, summary=values)
            )
        if resumed:
            # Points after the checkpoint are drawn again.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            step = self.scalars.step + 1
            writer.add_event(event_pb2.Event(wall_time=event.time, step=step, session_log=start))

    def close(self, summary: Summary) -> None:
        if self._writer is not None:
            self._writer.close()
