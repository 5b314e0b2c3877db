"""Laptop and world: the faults of a rehearsal and when they happen. Standard library only.

kill:algo-3@20s                 20 s after the first host started
start:algo-3@/continuing/       when any host logs a matching line; for a host with join_delay never
term:all@formed+5s              5 s after the cluster has formed
partition:algo-2@/epoch 1/+2s   2 s after any host logs a matching line
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

ACTIONS = {
    "start": "start a host whose join_delay is never",
    "return": "start a host again that has ended, as a new machine of the same name",
    "kill": "lose the machine: cut its link, then kill every process on it",
    "crash": "kill only train.py, as the kernel does when memory runs out",
    "pause": "suspend every process of the host",
    "resume": "resume them",
    "partition": "cut the link",
    "heal": "restore the link",
    "slow": "limit the link to 4 Mbit/s",
    "fast": "lift that limit",
    "occupy": "let another program listen on Ray's port",
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
    """Laptop and world: one fault; `due_s` is set once its time is known."""

    action: str
    host: str
    pattern: str | None
    later_s: float
    due_s: float | None
    done: bool = False

    def see(self, line: str, now_s: float) -> None:
        """World: schedule the fault if the logged `line` matches its pattern."""
        if self.due_s is None and self.pattern is not None and re.search(self.pattern, line):
            self.due_s = now_s + self.later_s


def parse(text: str, hosts: Collection[str]) -> Fault:
    """Laptop: parse a fault from the configuration or the command line.

    Raises:
        ValueError: one line that names the expected form.
    """
    found = _FORM.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not action:host@20s, @formed+5s or @/regular expression/+5s")
    action, host = found["action"], found["host"]
    if action not in ACTIONS:
        raise ValueError(f"{text!r}: no action {action!r}; use one of {', '.join(ACTIONS)}")
    if host not in hosts and host != "all":
        raise ValueError(f"{text!r}: no host {host!r}; use one of {', '.join(hosts)}, all")
    later = float(found["later"] or 0)
    if found["at"]:
        return Fault(action, host, None, later, float(found["at"]) + later)
    pattern = FORMED if found["formed"] else found["pattern"]
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{text!r}: {pattern!r} is not a regular expression: {error}") from None
    return Fault(action, host, pattern, later, None)
