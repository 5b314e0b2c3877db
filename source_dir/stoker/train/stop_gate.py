"""Train worker: lets all train workers stop after the same step, the first that none has begun.

A thread waits at the head for a request to stop. When it comes, each train worker holds its next step back,
reports the step it has begun, and learns the furthest of all: the last one of the run. Until then a step
costs one uncontended lock. Ranks that average gradients are at most one step apart, so that the run ends
after the step that is under way.
"""

from __future__ import annotations

import threading
from typing import Any

from stoker.protocol import StepKey

ASK_S = 0.5
"""How often the thread checks whether training has ended."""


class StopGate:
    def __init__(self, coordinator: Any, attempt: int, rank: int) -> None:
        self.reason = ""
        """Why the run stops; set with the request."""
        self._coordinator, self._attempt, self._rank = coordinator, attempt, rank
        self._lock = threading.Lock()
        self._begun: StepKey | None = None
        self._held = False
        self._agreed, self._closed = threading.Event(), threading.Event()
        self._last: StepKey | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="stop", daemon=True)
        self._thread.start()

    def enter(self, step: StepKey) -> bool:
        """Whether this step may begin; after a request to stop, waits until all ranks have agreed."""
        with self._lock:
            if not self._held:
                self._begun = step
                return True
        self._agreed.wait()
        if self._error is not None:
            raise self._error
        if self._last is None:  # no rank had begun any: this one is for all of them the first
            self._last = step
        return step <= self._last

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            reason = ""
            while not reason:
                reason = self._answer(self._coordinator.await_stop.remote(self._attempt))
                if self._closed.is_set():
                    return
            with self._lock:
                self.reason, self._held, begun = reason, True, self._begun
            which = (self._attempt, self._rank, begun)
            self._last = self._answer(self._coordinator.agree_stop.remote(*which))
        except Exception as error:  # the attempt is over, or the head is lost
            self._held, self._error = True, error
        finally:
            self._agreed.set()

    def _answer(self, call: Any) -> Any:
        import ray

        while not ray.wait([call], timeout=ASK_S)[0]:
            if self._closed.is_set():
                return None
        return ray.get(call)
