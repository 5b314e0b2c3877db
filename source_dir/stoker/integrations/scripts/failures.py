"""Train worker and head: one line for how a script failed, and which rank's failure came first. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

LOG = "logs/script-rank-{rank}.log"
TRACEBACK = "Traceback (most recent call last):"
UNCAUGHT = 1
"""The exit code of a Python program that an exception ended."""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)\b")
_RANK = re.compile(r"^\[rank\d+\]: ?")
"""What PyTorch puts before the lines of a traceback where there are several ranks."""
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (closed|refused|was|reset)|ECONNRE|DistBackendError"
    r"|DistNetworkError|DistStoreError|remote process exited|socket timeout",
    re.IGNORECASE,
)
"""What the other ranks say when one has gone."""


@dataclass(frozen=True)
class Exit:
    """Train worker → head: how a rank's script ended."""

    rank: int
    code: int
    """As `subprocess` has it: negative where a signal ended it."""
    asked: bool = False
    """Whether it was sent SIGTERM before."""
    line: str = ""
    """The last line of its traceback, with file and line of the script."""

    @property
    def failed(self) -> bool:
        return self.code != 0 and not self.asked

    @property
    def lost_a_peer(self) -> bool:
        return bool(_LOST_PEER.search(self.line))


def reason_of(script: str, end: Exit) -> str:
    """Head: why a run failed, in one line."""
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
    """Anywhere: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """Head: the failure to tell people of, among exits in the order in which they came.

    A rank that dies takes the others along: what these raise about a closed connection may come first.
    """
    failed = [end for end in exits if end.failed]
    causes = [end for end in failed if not end.lost_a_peer]
    return next(iter([*causes, *failed]), None)


def last_error(output: str, script: str) -> str:
    """Train worker: the last line of the last traceback: `ValueError: no (train.py:12)`; "" without one."""
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
