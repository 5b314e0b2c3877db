"""Head: what happens in a run is an event; every sink takes each of them."""

from __future__ import annotations

import logging
import queue
import time
import traceback
from collections.abc import Iterable
from typing import Any

from stoker.errors import where_raised
from stoker.tracking.summary import Summary


class Sink:
    """Head: a place where a run is shown or kept; used from the driver's thread alone.

    One of your own is a class of your source folder, named in `tracking.sinks`; it is made with the run
    directory, in which `config.yaml` lies, and the configuration.
    """

    essential = False
    """Whether the run fails with it; else it is left out from then on, and a note says so."""

    def take(self, event: dict[str, Any]) -> None:
        """Take one event: its `event` names the kind, `time` is in seconds since 1970; docs/tracking.md."""

    def about(self) -> dict[str, Any]:
        """Where the run is found there, for `tracking` in summary.json."""
        return {}

    def close(self, summary: Summary) -> None:
        """The run has ended.

        Args:
            summary: complete; `status` says how.
        """


class Tracking:
    """Head: the sinks of a run, in the order in which they take an event.

    Args:
        summary: of the run; gets what sinks tell of themselves.
        sinks: the first ones; the last of them, the screen, stays the last.
    """

    def __init__(self, summary: Summary, sinks: Iterable[Sink]) -> None:
        self.summary, self.sinks = summary, list(sinks)
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def add(self, *sinks: Sink) -> None:
        """Further sinks."""
        self.sinks[-1:-1] = sinks

    def say(self, text: str) -> None:
        """Any thread: one line for people; it becomes a note with the next event."""
        self._said.put(text)

    def note(self, text: str) -> None:
        """One line for the screen, the log and the summary."""
        self._give({"time": round(time.time(), 3), "event": "note", "text": text})

    def phase(self, name: str) -> None:
        """A part of the start is done."""
        self._give({"time": round(time.time(), 3), "event": "phase", "phase": name})

    def take(self, events: Iterable[dict[str, Any]]) -> None:
        """Give events, and what was said meanwhile, to every sink."""
        for event in events:
            if event["event"] == "host_cpu":
                hosts = {self.summary.host_of(node): used for node, used in event["hosts"].items()}
                event = {**event, "hosts": hosts}
            self._give(event)
        while not self._said.empty():
            self.note(self._said.get())

    def close(self) -> None:
        """The run has ended: the summary is complete but for what sinks know."""
        for sink in self.sinks:
            self.summary.tracking |= sink.about()
        while self.sinks:
            sink = self.sinks.pop(0)
            self._call(sink, sink.close, self.summary)
            self.take([])  # what it said, to those that are left

    def _give(self, event: dict[str, Any]) -> None:
        for sink in list(self.sinks):
            self._call(sink, sink.take, event)

    def _call(self, sink: Sink, method: Any, value: Any) -> None:
        try:
            method(value)
        except Exception as error:
            if sink.essential:
                raise
            self.sinks = [other for other in self.sinks if other is not sink]
            logging.getLogger("stoker").error("%s", traceback.format_exc())
            name = type(sink).__name__
            self.say(f"tracking: {name} failed and is left out; the run goes on: {where_raised(error)}")
