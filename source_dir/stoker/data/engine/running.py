"""Head: a pass as it is sent to hosts: what is left of it, and the tasks that are under way."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from stoker.data.coordinator.streams import Stream
from stoker.data.engine.tasks import EpochPlan
from stoker.data.preprocessing.chain import BlockReport
from stoker.data.sources.base import Piece

Numbered = tuple[int, Piece, int]
"""As `Passes.pieces` gives them: number, piece, groups to skip."""


@dataclass(eq=False)
class Running:
    """Head: pieces that were sent to a host as one task. What they have not given yet can be sent again, to
    another host, as another task: those pieces from the group on that comes next."""

    line: Line
    name: str
    """For people, and for the coordinator's own questions."""
    pieces: list[Numbered]
    """What has not been given yet."""
    store: list[bool]
    """For each of these, whether the host keeps its records."""
    per_report: int
    generator: Any = None
    """None: it waits to be sent again."""
    node: str = ""
    blocks: deque[Any] = field(default_factory=deque)
    """Blocks whose reports have not come yet."""
    waiting: deque[tuple[Any, BlockReport, str]] = field(default_factory=deque)
    """(block, report, node) of those that came before their turn, in exact order."""
    seconds: float = 0.0
    gave: bool = False
    """Whether this generator has given anything."""
    ended: bool = False
    queued: bool = False
    """Whether it waits behind others of its host, as far as one can tell from here."""
    tried: set[str] = field(default_factory=set)
    """Nodes where it went wrong."""
    failures: int = 0
    """How often it could not be read, or was lost by Ray."""
    late: int = 0
    """How often it did not answer in time."""
    not_before: float = 0.0
    quiet_since: float = field(default_factory=time.monotonic)
    """Since when it has given nothing although it was asked."""
    stuck_since: float = field(default_factory=time.monotonic)
    """The same, wherever it was tried."""

    def __post_init__(self) -> None:
        self.count = len(self.pieces)

    def sent(self, generator: Any, node: str) -> None:
        """It was sent to a host."""
        self.generator, self.node, self.gave = generator, node, False
        self.quiet_since = time.monotonic()

    def took_back(self, wait_s: float) -> Any:
        """It shall be sent again, after a while; the generator that nobody reads any more."""
        generator, self.generator = self.generator, None
        self.blocks.clear()
        self.tried.add(self.node)
        self.not_before = time.monotonic() + wait_s
        return generator

    def reported(self, report: BlockReport) -> None:
        """A block has come with its report: that much is not to be sent again."""
        while self.pieces[0][0] != report.piece:
            del self.pieces[0], self.store[0]
        number, piece, _ = self.pieces[0]
        self.pieces[0] = (number, piece, report.nth + 1)
        if report.last:
            del self.pieces[0], self.store[0]
        self.seconds += report.seconds
        self.gave = True
        self.quiet_since = self.stuck_since = time.monotonic()


@dataclass(eq=False)
class Line:
    """Head: what is left to send of a pass, and what of it is under way."""

    stream: Stream
    plan: EpochPlan
    coming: Future[deque[Numbered]]
    work: deque[Numbered] | None = None
    """Pieces in the order of the pass; None until they are listed."""
    running: deque[Running] = field(default_factory=deque)
    """In the order in which they were sent first."""

    def listed(self) -> bool:
        """Whether the pieces are known."""
        if self.work is None and self.coming.done():
            self.work = self.coming.result()
        return self.work is not None
