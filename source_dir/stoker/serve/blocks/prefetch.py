"""Train worker and script: threads that ask for the items of a pass in order and fetch several at once.

An item is the batch of a rank's step, or a block of a loader; its owner knows how to ask for it and fetch it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

ASKED_AT_ONCE = 8
"""Maximum items per call to the service: a call costs about a millisecond of CPU."""
LOOK_S = 1.0
ALL = sys.maxsize
Given = TypeVar("Given")
Item = TypeVar("Item")


class LateError(Exception):
    """Nothing came in time, or no thread is left to fetch it."""


class Prefetcher(Generic[Given, Item]):
    """See the module.

    Args:
        name: of its threads.
        ask: called with a number, a count and `fetched`: what the service gives of up to so many items from
            that number on, as far as they are ready; None after the last item. All items before `fetched` are
            here, so their blocks may go. One call at a time.
        fetch: turns what the service gave, and when (`time.perf_counter()`), into the item.
        threads: how many items to fetch at once.
        limit: how many items to ask for ahead of the consumer; may change.
        loaded: how many of them to fetch ahead.
        first: number of the first item.
        wanted: how many items the consumer wants so far; see `want`.
        left: each thread's last call.
    """

    def __init__(
        self,
        name: str,
        ask: Callable[[int, int, int], Sequence[Given] | None],
        fetch: Callable[[Given, float], Item],
        *,
        threads: int,
        limit: int,
        loaded: int = ALL,
        first: int = 0,
        wanted: int = ALL,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self.limit = limit
        self._ask_service, self._fetch, self._left = ask, fetch, left
        self._most_loaded, self._wanted = loaded, wanted
        self._changed = threading.Condition()
        self._given: deque[tuple[int, Given, float]] = deque()
        """Items that the service gave and that nobody fetches yet, and since when."""
        self._fetching: set[int] = set()
        self._loaded: dict[int, Any] = {}
        """Items, or why there are none."""
        self._next = self._asked = first
        """The item that the consumer takes next, and the next one to ask for."""
        self._asking = False
        """Whether a thread is asking the service."""
        self._over = self._ended = False
        """Whether the consumer wants no more; whether the service has no more."""
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether a thread runs; none does in a fork of the process."""
        return any(thread.is_alive() for thread in self._threads)

    def want(self) -> None:
        """The consumer wants one item more."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def take(self, seconds: float) -> Item | None:
        """The next item; None after the last, or when this pass has ended.

        Raises:
            LateError: it did not come within so many seconds.
            BaseException: whatever asking or fetching raised.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._next not in self._loaded:
                if self._over:
                    return None
                left = deadline - time.monotonic()
                if left <= 0 or not self.alive:
                    raise LateError
                self._changed.wait(min(left, LOOK_S))
            # In this order, an item that an interrupt loses is missing, and the next one comes.
            number, self._next = self._next, self._next + 1
            item = self._loaded.pop(number)
            self._changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        taken: Item | None = item
        return taken

    def end(self, join_s: float = 0.0) -> None:
        """Stop: the consumer needs no more items.

        Args:
            join_s: how long to wait for the threads.
        """
        with self._changed:
            self._over = True
            self._loaded.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + join_s
        for thread in self._threads if join_s else ():
            thread.join(max(deadline - time.monotonic(), 0))

    def _work(self) -> None:
        """Thread: ask, fetch and store items until the pass ends."""
        try:
            while (given := self._next_given()) is not None:
                number, answer, since = given
                try:
                    item: Any = self._fetch(answer, since)
                except BaseException as error:
                    item = error
                self._put(number, item)
                if isinstance(item, BaseException):
                    return
        finally:
            self._left()

    def _next_given(self) -> tuple[int, Given, float] | None:
        """An item to fetch; asks for more if no thread does. None if none is needed or left."""
        while True:
            with self._changed:
                while not (self._over or self._may_fetch() or self._may_ask() or self._is_last()):
                    self._changed.wait(LOOK_S)
                if self._over or self._is_last():
                    return None
                if self._may_fetch():
                    self._fetching.add(self._given[0][0])
                    return self._given.popleft()
                self._asking = True
                first, fetched = self._asked, min([self._asked, *self._fetching])
                most = min(ASKED_AT_ONCE, self._room(), self._wanted - first)
            self._ask(first, most, fetched)

    def _may_fetch(self) -> bool:
        return bool(self._given) and self._given[0][0] < self._next + self._most_loaded

    def _may_ask(self) -> bool:
        """Ask when all that was given is fetched or being fetched, and there is room enough for a call."""
        idle = not (self._asking or self._ended or self._given)
        return idle and self._asked < self._wanted and self._room() >= min(ASKED_AT_ONCE, self.limit // 2)

    def _is_last(self) -> bool:
        return self._ended and not self._given

    def _room(self) -> int:
        return self.limit - (self._asked - self._next)

    def _ask(self, first: int, most: int, fetched: int) -> None:
        """Ask for more; holds no lock, so that the consumer can take loaded items meanwhile."""
        answers: Sequence[Given] | None = None
        failure: BaseException | None = None
        try:
            answers = self._ask_service(first, most, fetched)
        except BaseException as error:
            failure = error
        now = time.perf_counter()
        with self._changed:
            self._given += [(first + i, answer, now) for i, answer in enumerate(answers or ())]
            self._asked += len(answers or ())
            self._asking, self._ended = False, answers is None
            self._changed.notify_all()
        if self._ended:
            self._put(first, failure)

    def _put(self, number: int, item: Any) -> None:
        with self._changed:
            self._fetching.discard(number)
            if not self._over:
                self._loaded[number] = item
            self._changed.notify_all()
