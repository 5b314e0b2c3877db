"""Chain worker: names what it begins, so that the head knows it when the process has died."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from stoker.data.messages import BadRecord, Care, Record, Shard
from stoker.data.sources.base import Source, listing_of, one_by_one

ANSWER_S = 60.0


class Witness:
    """Chain worker: the coordinator's ear, where a task has died before. Each call waits until it was heard.

    Args:
        coordinator: the actor.
        care: which task this is.
        split: of its records.
    """

    def __init__(self, coordinator: Any, care: Care, split: str) -> None:
        self._coordinator, self._of = coordinator, (care.attempt, split, care.task)

    def begins(self, key: str) -> str:
        """A record is about to begin: why it shall not; empty: it may."""
        return str(self._ask("record_begins", key))

    def does(self, what: str) -> None:
        """What comes next, if not the work on one record."""
        self._ask("task_does", what)

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        call = getattr(self._coordinator, method).remote(*self._of, *arguments)
        return ray.get(call, timeout=ANSWER_S)


class Guard:
    """Chain worker: keeps quarantined records from being read and preprocessed, and names the others.

    Args:
        known: key → reason of the quarantined ones.
        witness: hears of each record; None: of none.
    """

    def __init__(self, known: Mapping[str, str], witness: Witness | None) -> None:
        self._known, self._witness = known, witness

    def refuses(self, key: str) -> str:
        """Why a record shall not be begun; empty: it may."""
        if reason := self._known.get(key, ""):
            return reason
        return self._witness.begins(key) if self._witness else ""

    def read(self, source: Source, shard: Shard, order: Any) -> Iterator[Record | BadRecord]:
        """The records of a shard; those that are quarantined are not even read, where the source can tell."""
        listing = listing_of(source, shard)
        if listing is None:
            return source.read(shard, order)
        return one_by_one(source, listing, lambda key: None, self.refuses)

    def watch(
        self, records: Iterator[Record | BadRecord], alone: Callable[[Record], Any], first: int
    ) -> Iterator[Record | BadRecord]:
        """Let no quarantined record pass.

        Args:
            records: of a shard.
            alone: preprocesses one record, whose result is thrown away: where each is named, it is tried by
                itself first, so that it is known which of a block's records kills the process.
            first: records before this one are not preprocessed.
        """
        for number in count():
            if self._witness:
                self._witness.does(f"reading record {number} of its shard")
            record = next(records, None)
            if record is None:
                return
            if isinstance(record, BadRecord) or number < first:
                yield record
                continue
            key = record["key"]
            if reason := self.refuses(key):
                yield BadRecord(key, reason)
                continue
            if self._witness:
                with contextlib.suppress(Exception):  # what the chain raises, it raises again
                    alone(copy.deepcopy(record))
            yield record

    def together(self, block: Iterable[Record | BadRecord]) -> Iterable[Record | BadRecord]:
        """The records of a block, which are about to be preprocessed together."""
        if self._witness is None:
            return block
        block = list(block)
        keys = [record.key if isinstance(record, BadRecord) else record["key"] for record in block]
        self._witness.does(f"preprocessing the records {keys[0]} … {keys[-1]} together")
        return block
