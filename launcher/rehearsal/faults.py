"""Laptop and world: what shall go wrong in a rehearsal, and when. Standard library only.

kill:algo-3@20s                 20 s after the first host started
start:algo-3@/going on/         once any host logged a line that matches; for a host with join_delay never
term:all@formed+5s              5 s after the head has formed the cluster
partition:algo-2@/epoch 1/+2s   2 s after any host logged a line that matches
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

ACTIONS = {
    "start": "a host whose join_delay is never comes after all",
    "kill": "the machine is lost: its link is cut, then everything on it dies",
    "crash": "train.py alone is killed, as by the kernel when memory is short",
    "pause": "every process of the host stops",
    "resume": "they go on",
    "partition": "the link is cut",
    "heal": "the link works again",
    "occupy": "another program listens on Ray's port",
    "term": "SIGTERM to the host's process 1, SIGKILL after 120 s, as StopTrainingJob does",
}
FORMED = "cluster formed in"
_FORM = re.compile(
    r"(?P<action>[a-z]+):(?P<host>[\w.-]+)@"
    r"(?:(?P<at>\d+(?:\.\d+)?)s|(?P<formed>formed)|/(?P<pattern>.+)/)"
    r"(?:\+(?P<later>\d+(?:\.\d+)?)s)?"
)


@dataclass
class Fault:
    """Laptop and world: one fault; `due_s` is set once its moment is known."""

    action: str
    host: str
    pattern: str | None
    later_s: float
    due_s: float | None
    done: bool = False

    def see(self, line: str, now_s: float) -> None:
        """World: a host logged `line`; perhaps that is the moment."""
        if self.due_s is None and self.pattern is not None and re.search(self.pattern, line):
            self.due_s = now_s + self.later_s


def parse(text: str, hosts: Collection[str]) -> Fault:
    """Laptop: a fault as written in the configuration or on the command line.

    Raises:
        ValueError: in one line, with what would be right.
    """
    found = _FORM.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not action:host@20s, @formed+5s or @/regular expression/+5s")
    action, host = found["action"], found["host"]
    if action not in ACTIONS:
        raise ValueError(f"{text!r}: no action {action!r}; there are {', '.join(ACTIONS)}")
    if host not in hosts and host != "all":
        raise ValueError(f"{text!r}: no host {host!r}; there are {', '.join(hosts)} and all")
    later = float(found["later"] or 0)
    if found["at"]:
        return Fault(action, host, None, later, float(found["at"]) + later)
    pattern = FORMED if found["formed"] else found["pattern"]
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{text!r}: {pattern!r} is not a regular expression: {error}") from None
    return Fault(action, host, pattern, later, None)
