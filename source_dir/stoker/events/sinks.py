"""Head: distributes the events of a run to its sinks."""

from __future__ import annotations

import logging
import queue
import traceback
from collections.abc import Iterable
from typing import Any

from stoker.config.redaction import scrub, scrubbed
from stoker.errors import where_raised
from stoker.events.kinds import Event, HostCpu, Note, PhaseDone, event_of
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
    """The sinks of a run, in the order in which they take an event."""

    def __init__(self, summary: Summary, sinks: Iterable[Sink]) -> None:
        self.summary, self.sinks = summary, list(sinks)
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def add(self, *sinks: Sink) -> None:
        self.sinks[-1:-1] = sinks

    def say(self, text: str) -> None:
        """Any thread: queue one line for the user; it becomes a note with the next event."""
        self._said.put(text)

    def note(self, text: str) -> None:
        """Add one line to the screen, the log and the summary."""
        self._give(Note(text=scrub(text)))

    def phase(self, name: str) -> None:
        self._give(PhaseDone(phase=name))

    def take(self, records: Iterable[dict[str, Any]]) -> list[Event]:
        """Pass events, and lines queued meanwhile, to every sink."""
        events = [self._read(record) for record in records]
        for event in events:
            self._give(event)
        while not self._said.empty():
            self.note(self._said.get())
        return events

    def _read(self, record: dict[str, Any]) -> Event:
        event = event_of(scrubbed(record))
        if isinstance(event, HostCpu):
            hosts = {self.summary.host_of(node): used for node, used in event.hosts.items()}
            return event.model_copy(update={"hosts": hosts})
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
            self.say(f"tracking: {name} failed and is dropped; the run continues: {where_raised(error)}")
