"""Head: which records kill the process that works on them; pure.

Ray starts a task again whenever its process dies, without end, so a record that kills it would do so for
ever. A task that was started again therefore asks here first. From its third start on it names each record
before it begins it; the record that was begun last when the process died twice is quarantined, in all
passes from then on. What cannot be put down to one record ends the run after a few deaths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from stoker.data.messages import Start
from stoker.errors import DataError

PLAIN_STARTS = 2
"""A task whose process has died so often names its records; sooner where its split has deadly ones."""
NAMED_DEATHS = 2
"""Deaths for which one record is to blame before it is quarantined: one may be chance."""
UNNAMED_DEATHS = 6
"""Deaths of one task for which no record is to blame before the run ends."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 20.0
"""A process that is started again waits first, so that a host that is short of memory recovers; and one that
is killed again while it waits has begun no record."""
REASON = (
    f"its process died {NAMED_DEATHS} times while this record was read or preprocessed"
    " (killed for memory, or a crash in native code)"
)


@dataclass
class Suspect:
    """Head: a task whose process has died, or which did not answer in time."""

    deaths: int = 0
    unnamed: int = 0
    """Deaths for which no record is to blame."""
    key: str = ""
    """The record that it has begun; empty: none."""
    doing: str = "starting"
    """What it was doing when it last said so."""
    ended: bool = False
    """It has given all it had; Ray starts it again where its blocks were lost with their host."""


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
        """A task starts, which has been started before or shall name its records.

        Args:
            task: its name, the same each time.
            split: of its records.
            retry: how often it was started before; 0: never, it names its records from the beginning.

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
        # After a single death, which is most often a lost host's, it starts at once.
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
        """Deaths for which records of a split are to blame that are not quarantined yet."""
        return sum(n for (of, key), n in self._named.items() if of == split and key not in self.of(split))

    def begins(self, task: str, split: str, key: str) -> str:
        """A task is about to begin a record: why it shall not; empty: it may."""
        if reason := self.of(split).get(key):
            return reason
        self.does(task, f"at record {key}")
        self.tasks[task].key = key
        return ""

    def does(self, task: str, what: str) -> None:
        """What a task does next that is not the work on one record."""
        suspect = self.tasks.setdefault(task, Suspect())
        suspect.key, suspect.doing = "", what

    def ended(self, task: str) -> None:
        """A task has given all it had."""
        if (suspect := self.tasks.get(task)) is not None:
            suspect.ended, suspect.unnamed = True, 0

    def doing(self, task: str) -> str:
        """What a task was doing when it last said so; empty: it says nothing."""
        suspect = self.tasks.get(task)
        return suspect.doing if suspect else ""
