"""Finds records that kill the process that works on them.

Ray restarts a task whenever its process dies, without limit, so a record that kills its process would do so
forever. A restarted task therefore reports here first. From its third start on, it reports each record before
starting it; the record in progress at two deaths is quarantined, in all later passes too. Blame
ends once the task is complete. If no single record is to blame, the run ends after a few deaths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.errors import DataError

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
    """A task whose process died or that missed its deadline."""

    deaths: int = 0
    unnamed: int = 0
    """Deaths with no record to blame."""
    key: str = ""
    """The record in progress; empty: none."""
    doing: str = "starting"
    blamed: list[tuple[str, str]] = field(default_factory=list)
    """Split and key of the record in progress at each death; none once the work is complete."""
    ended: bool = False
    """The work is complete; it starts again only if its blocks were lost with their host."""


class Suspects:
    """Finds records that kill the process that works on them. One per run, guarded by the service's lock."""

    def __init__(self) -> None:
        self.deadly: dict[str, dict[str, str]] = {}
        """By split: key of a quarantined record → reason."""
        self.tasks: dict[str, Suspect] = {}

    def of(self, split: str) -> dict[str, str]:
        return self.deadly.setdefault(split, {})

    def starts(self, task: str, split: str, retry: int) -> tuple[float, bool]:
        """How long a task waits that was started before, and whether it reports each record then."""
        suspect = self.tasks.get(task)
        if suspect is None:
            self.tasks[task] = suspect = Suspect(deaths=retry, unnamed=retry)
            if not retry:
                return 0.0, True
        elif suspect.ended:
            suspect.ended = False
        else:
            suspect.deaths += 1
            self._blame(suspect, split)
        if suspect.unnamed >= UNNAMED_DEATHS:
            raise DataError(
                f"{task}: its process died {suspect.deaths} times, the last time {suspect.doing}: look there"
                " for a crash in native code, or give hosts more memory",
                key="chain_worker.died",
            )
        suspect.key, suspect.doing = "", "starting"
        # A single death usually means a lost host: restart at once.
        quarantined = self.of(split)
        open_cases = sum(of == split and key not in quarantined for of, key in self._blamed())
        waits = suspect.unnamed + open_cases - PLAIN_STARTS
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**waits) if waits >= 0 else 0.0
        return wait_s, suspect.deaths >= PLAIN_STARTS or bool(quarantined)

    def _blame(self, suspect: Suspect, split: str) -> None:
        if not suspect.key:
            suspect.unnamed += 1
            return
        suspect.blamed.append((split, suspect.key))
        if self._blamed().count((split, suspect.key)) >= NAMED_DEATHS:
            self.of(split)[suspect.key] = REASON

    def _blamed(self) -> list[tuple[str, str]]:
        return [record for suspect in self.tasks.values() for record in suspect.blamed]

    def begins(self, task: str, split: str, key: str) -> str:
        """A task is about to start a record: why it must not; empty: it may."""
        if reason := self.of(split).get(key):
            return reason
        self.does(task, f"at record {key}")
        self.tasks[task].key = key
        return ""

    def does(self, task: str, what: str) -> None:
        suspect = self.tasks.setdefault(task, Suspect())
        suspect.key, suspect.doing = "", what

    def ended(self, task: str) -> None:
        if (suspect := self.tasks.get(task)) is not None:
            suspect.ended, suspect.unnamed, suspect.blamed = True, 0, []

    def doing(self, task: str) -> str:
        suspect = self.tasks.get(task)
        return suspect.doing if suspect else ""
