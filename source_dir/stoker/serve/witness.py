"""Chain worker: reports each activity before it starts, so that the head knows it if the process dies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from stoker.messages import BadRecord, Care, Record, Shard
from stoker.read.sources import Source, listing_of, one_by_one

ANSWER_S = 60.0


class Witness:
    """Chain worker: reports to the coordinator after a task has died. Each call waits for its answer.

    Args:
        coordinator: the actor.
        care: which task this is.
        split: of its records.
    """

    def __init__(self, coordinator: Any, care: Care, split: str) -> None:
        self._coordinator, self._of = coordinator, (care.attempt, split, care.task)

    def begins(self, key: str) -> str:
        """A record is about to start: why it must not; empty: it may."""
        return str(self._ask("record_begins", key))

    def does(self, what: str) -> None:
        """Report an activity other than work on one record."""
        self._ask("task_does", what)

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        call = getattr(self._coordinator, method).remote(*self._of, *arguments)
        return ray.get(call, timeout=ANSWER_S)


class Guard:
    """Chain worker: keeps quarantined records out of reading and preprocessing, and reports the others.

    Args:
        known: key → reason of the quarantined ones.
        witness: receives each record; None: report nothing.
    """

    def __init__(self, known: Mapping[str, str], witness: Witness | None) -> None:
        self._known, self._witness = known, witness

    def refuses(self, key: str) -> str:
        """Why a record must not be started; empty: it may."""
        if reason := self._known.get(key, ""):
            return reason
        return self._witness.begins(key) if self._witness else ""

    def read(self, source: Source, shard: Shard, order: Any) -> Iterator[Record | BadRecord]:
        """The records of a shard; skips reading quarantined ones if the source supports that."""
        listing = listing_of(source, shard)
        if listing is None:
            return source.read(shard, order)
        return one_by_one(source, listing, lambda key: None, self.refuses)

    def watch(
        self, records: Iterator[Record | BadRecord], alone: Callable[[Record], Any], first: int
    ) -> Iterator[Record | BadRecord]:
        """Filter out quarantined records.

        Args:
            records: of a shard.
            alone: preprocesses one record and discards the result. If records are reported, each is tried
                alone first, to find the record of a block that kills the process.
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
                with contextlib.suppress(Exception):  # the chain raises it again
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
