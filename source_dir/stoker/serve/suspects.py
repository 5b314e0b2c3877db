"""Head: finds records that kill the process that works on them; pure.

Ray restarts a task whenever its process dies, without limit, so a record that kills its process would do so
forever. A restarted task therefore reports here first. From its third start on, it reports each record before
starting it; the record in progress at two deaths is quarantined, in all later passes too. If no single record
is to blame, the run ends after a few deaths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from stoker.errors import DataError
from stoker.messages import Start

PLAIN_STARTS = 2
"""Deaths after which a task reports each record; fewer if its split has deadly records."""
NAMED_DEATHS = 2
"""Deaths during one record before it is quarantined: one may be chance."""
UNNAMED_DEATHS = 6
"""Deaths of one task, with no record to blame, before the run ends."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 20.0
"""Delay before a restarted process begins, so that a host that is short of memory recovers. A process killed
during the delay has started no record."""
REASON = (
    f"its process died {NAMED_DEATHS} times while this record was read or preprocessed"
    " (killed for memory, or a crash in native code)"
)


@dataclass
class Suspect:
    """Head: a task whose process died or that missed its deadline."""

    deaths: int = 0
    unnamed: int = 0
    """Deaths with no record to blame."""
    key: str = ""
    """The record in progress; empty: none."""
    doing: str = "starting"
    """Its last reported activity."""
    ended: bool = False
    """It is complete; Ray restarts it only if its blocks were lost with their host."""


class Suspects:
    """Head: one per run; the coordinator guards it with its lock. See the module."""

    def __init__(self) -> None:
        self.deadly: dict[str, dict[str, str]] = {}
        """By split: key of a quarantined record → reason."""
        self.tasks: dict[str, Suspect] = {}
        self._named: Counter[tuple[str, str]] = Counter()

    def of(self, split: str) -> dict[str, str]:
        """The quarantined records of a split: key → reason."""
        return self.deadly.setdefault(split, {})

    def starts(self, task: str, split: str, retry: int) -> Start:
        """Handle the start of a task that was started before or must report its records.

        Args:
            task: its name, the same each time.
            split: of its records.
            retry: number of earlier starts; 0: none, it reports its records from the beginning.

        Raises:
            DataError: its process has died too often, and no record is to blame.
        """
        suspect = self.tasks.get(task)
        if suspect is None:
            self.tasks[task] = suspect = Suspect(deaths=retry, unnamed=retry)
            if not retry:
                return Start(0.0, True)
        elif suspect.ended:
            suspect.ended = False
        else:
            suspect.deaths += 1
            self._blame(suspect, split)
        if suspect.unnamed >= UNNAMED_DEATHS:
            raise DataError(
                f"{task}: its process died {suspect.deaths} times, the last time {suspect.doing}, and no"
                " record is to blame: look for a crash in native code in the chain, or give hosts more memory"
            )
        suspect.key, suspect.doing = "", "starting"
        # A single death usually means a lost host: restart at once.
        waits = suspect.unnamed + self._open_cases(split) - PLAIN_STARTS
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**waits) if waits >= 0 else 0.0
        return Start(wait_s, suspect.deaths >= PLAIN_STARTS or bool(self.of(split)))

    def _blame(self, suspect: Suspect, split: str) -> None:
        if not suspect.key:
            suspect.unnamed += 1
            return
        self._named[split, suspect.key] += 1
        if self._named[split, suspect.key] >= NAMED_DEATHS:
            self.of(split)[suspect.key] = REASON

    def _open_cases(self, split: str) -> int:
        """Deaths caused by records of a split that are not quarantined yet."""
        return sum(n for (of, key), n in self._named.items() if of == split and key not in self.of(split))

    def begins(self, task: str, split: str, key: str) -> str:
        """A task is about to start a record: why it must not; empty: it may."""
        if reason := self.of(split).get(key):
            return reason
        self.does(task, f"at record {key}")
        self.tasks[task].key = key
        return ""

    def does(self, task: str, what: str) -> None:
        """Record an activity of a task other than work on one record."""
        suspect = self.tasks.setdefault(task, Suspect())
        suspect.key, suspect.doing = "", what

    def ended(self, task: str) -> None:
        """A task is complete."""
        if (suspect := self.tasks.get(task)) is not None:
            suspect.ended, suspect.unnamed = True, 0

    def doing(self, task: str) -> str:
        """Last reported activity of a task; empty: it reports none."""
        suspect = self.tasks.get(task)
        return suspect.doing if suspect else ""
