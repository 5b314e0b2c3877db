"""Train worker and head: explains in one line how a script failed, and on which rank first. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

LOG = "logs/script-rank-{rank}.log"
TRACEBACK = "Traceback (most recent call last):"
UNCAUGHT = 1
"""Exit code of Python after an uncaught exception."""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)\b")
_RANK = re.compile(r"^\[rank\d+\]: ?")
"""Prefix that PyTorch adds to traceback lines with several ranks."""
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (closed|refused|was|reset)|ECONNRE|DistBackendError"
    r"|DistNetworkError|DistStoreError|remote process exited|socket timeout",
    re.IGNORECASE,
)
"""Errors on the other ranks after one has died."""


@dataclass(frozen=True)
class Exit:
    """How a rank's script ended."""

    rank: int
    code: int
    """As in `subprocess`: negative for a signal."""
    asked: bool = False
    """Whether it received SIGTERM before."""
    line: str = ""
    """Last line of its traceback, with file and line in the script."""

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.asked

    @property
    def lost_a_peer(self) -> bool:
        return bool(_LOST_PEER.search(self.line))


def reason_of(script: str, end: Exit) -> str:
    """One line with the reason of a failure."""
    log = LOG.format(rank=end.rank)
    where = f"(rank {end.rank}); see {log}"
    if end.code < 0:
        name = signal_name(-end.code)
        hint = ", as when memory runs out" if name == "SIGKILL" else ""
        return f"{script} was killed by {name}{hint} {where}"
    if end.line:
        return f"{end.line} {where}"
    return f"{script} exited with code {end.code} {where}"


def signal_name(number: int) -> str:
    """Name of a signal: 9 → SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """The root failure among exits in order of arrival.

    When a rank dies, the others fail with closed connections, and their exits may arrive first.
    """
    failed = [end for end in exits if end.failed]
    causes = [end for end in failed if not end.lost_a_peer]
    return next(iter([*causes, *failed]), None)


def last_error(output: str, script: str) -> str:
    """Last line of the last traceback: `ValueError: no (train.py:12)`; "" if there is none."""
    lines = [_RANK.sub("", line) for line in output.splitlines()]
    begins = [at for at, line in enumerate(lines) if line.strip() == TRACEBACK]
    if not begins:
        errors = [line for line in lines if _ERROR.match(line)]
        return errors[-1].strip() if errors else ""
    place, block = "", lines[begins[-1] + 1 :]
    for line in block:
        if found := re.match(r'\s+File "(?:.*/)?([^/"]+)", line (\d+)', line):
            if not place or found[1] == script:
                place = f" ({found[1]}:{found[2]})"
        elif line and not line[0].isspace():
            return f"{' '.join(line.split())}{place}"
    return ""
