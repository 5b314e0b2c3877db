"""Head: decides what chain workers do next; part of an attempt, guarded by the coordinator's lock.

Ray Data carries tickets to chain workers. A worker that starts a ticket claims its work here, so the planner
decides what to read next, where, and what to retry elsewhere as late as possible: by what train workers
need and which host asks. Blocks are delivered in their order within the shard and, if `data.order` is exact,
in the order of the shards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, takewhile
from typing import Any

from stoker.messages import BlockReport, Care, Claim, Failure, Origin, Shard, Told
from stoker.read.sources import reread_wait_s
from stoker.serve import items
from stoker.serve.affinity import LOOK_AHEAD
from stoker.serve.inheritance import Inheritance
from stoker.serve.items import Held, Item, Line, Numbered, ReadyBlock, Ticket
from stoker.serve.listing import Lister
from stoker.serve.passes import pack_work
from stoker.serve.pool import Pool, is_hungry
from stoker.serve.preparing import Preparing
from stoker.serve.recovery import Recovery

OPEN_PER_SLOT = 3
"""Tickets per slot: one in progress, the others hide the scheduler's round."""
LOST_TICKET_S = 20.0
"""An unclaimed ticket this old waits for a process that no longer exists; it is replaced."""
OVERFULL = 1.25
"""Above this multiple of the budget, work in progress ends after its next block."""


class Planner:
    """Head: see the module.

    Args:
        attempt: whose passes are produced.
        pool: the hosts.
        budget_bytes: of ready blocks; above it and beyond two steps, nothing more starts.
        numbers: numbers tickets and tasks, over all attempts.
        lister: lists what passes read; None: the attempt adds lines and their shards.
        before: of the attempt that this one replaces; its ready blocks are used.
    """

    def __init__(
        self,
        attempt: Any,
        pool: Pool,
        budget_bytes: int,
        numbers: count[int],
        lister: Lister | None = None,
        before: Planner | None = None,
    ) -> None:
        self.attempt, self.pool, self.budget_bytes, self._lister = attempt, pool, budget_bytes, lister
        self.passes, self.affinity = attempt.passes, attempt.keeping
        self.exact, self.recovery = self.passes.config.data.order == "exact", Recovery(attempt, pool)
        self.lines: list[Line] = []
        self.again: list[Item] = []
        """Items to retry, on another host if possible."""
        self.active: dict[int, Item] = {}
        """Items in progress, by ticket."""
        self.working: dict[str, int] = {}
        """Ticket in progress at each chain worker."""
        self.inheritance = Inheritance(before)
        self.tickets = self.inheritance.tickets
        """Work given to each ticket of an open pass."""
        self.coming: dict[Origin, tuple[Line, ReadyBlock]] = {}
        """Reported blocks that have not arrived."""
        self.shard_s: dict[str, float] = {}
        """Smoothed seconds per shard of a split."""
        self._issued: dict[int, float] = {}
        """Unclaimed tickets and when they were issued."""
        self._preparing, self._numbers, self.early = Preparing(pool), numbers, Held()
        """`early`: blocks reported but not delivered."""

    def close(self) -> None:
        """Stop: the attempt is over."""
        if self._lister:
            self._lister.close()

    def advance(self) -> None:
        """End passes that are complete and start the next ones; raises why one cannot be listed or ended."""
        for line in [line for line in self.lines if self._listed(line) and line.ended()]:
            self.lines.remove(line)
            self.attempt.produced(line.stream)
        if self._lister:
            self._lister.open(self.lines)

    def look(self, now: float) -> list[str]:
        """Called periodically: take back late work; the chain workers whose processes hang and must be ended.

        Raises:
            DataError: late work has failed on every host.
        """
        self.advance()  # Ray Data may hold back the ticket source
        self.pool.avoided = self.recovery.patience.avoided(now)
        if self.affinity is not None:
            self.affinity.hosts_are(self.pool.hosts)
        overdue, hung = self.recovery.overdue(self.active, self.again, now)
        for ticket in overdue:
            self._take_back(ticket, 0.0)
        return hung

    def issue(self) -> list[int]:
        """Tickets to issue now."""
        self.advance()
        now = time.monotonic()
        self._issued = {n: at for n, at in self._issued.items() if now - at < LOST_TICKET_S}
        room = OPEN_PER_SLOT * self.pool.slots - len(self.active)
        wanted = min(room, self._claimable(room, now)) - len(self._issued)
        tickets = [next(self._numbers) for _ in range(wanted)]
        self._issued |= dict.fromkeys(tickets, now)
        return tickets

    def _claimable(self, most: int, now: float) -> int:
        """How many items could start now, counted up to `most`."""
        found = sum(item.not_before <= now for item in self.again)
        for line in self.startable():
            if found >= most:
                break
            found += -(-len(line.work) // self._most(line, len(line.work))) if line.work else 0
        return found

    def claim(self, number: int, node: str, process: str) -> Claim | None:
        """A chain worker starts a ticket: its work, or None if there is none.

        Args:
            number: of the ticket.
            node: where it runs.
            process: id of its actor.
        """
        ticket = self.tickets.get(number)
        if ticket is None:
            issued = self._issued.pop(number, None) is not None
            before = self.working.get(process)
            if before is not None and not self.active[before].shards:
                self._done(before)  # the call that said so is late, or was lost with its process
            # A process that died at a ticket gets that ticket back before any other.
            item = self._next(node, process) if issued and process not in self.working else None
            if item is None:
                return None
            self.tickets[number] = ticket = Ticket(item, list(item.shards), list(item.store))
            self.active[number] = item
        item = ticket.item
        if number in self.active and node not in self.pool.hosts:
            self._take_back(number, 0.0)  # Ray restarted it on a host that may not preprocess
        if number in self.active:
            self.working.pop(item.process, None)
            item.begun(node, process)
            self.working[process] = number
        elif not ticket.made:
            return None
        split, wait_s = item.line.plan.split, 0.0
        names = self.recovery.names_records(item, node)
        before, ticket.claims, ticket.node = ticket.claims, ticket.claims + 1, node
        if before or names:
            start = self.attempt.task_starts(split, item.name, before)
            if start is None:
                return None
            names, wait_s = start.names, start.wait_s
        known = dict(self.attempt.suspects.of(split))
        last_try = reread_wait_s(OSError(), item.failures) is None
        care = Care(item.name, self.attempt.number, known, names, last_try)
        return Claim(item.line.plan, pack_work(ticket.shards, ticket.store), care, wait_s, ticket.limit)

    def upcoming(self, number: int, process: str) -> Shard | None:
        """A chain worker starts the last shard of a ticket: the one that it will probably get next."""
        item, line = self.active.get(number), next(self.startable(), None)
        if item is None or line is None or not line.work or self.affinity is not None:
            return None
        other = line.plan.split != item.line.plan.split
        return None if other else self._preparing.announce(line.work, process)[1]

    def _next(self, node: str, process: str) -> Item | None:
        """The next item for a chain worker."""
        now = time.monotonic()
        for item in self.again:
            if item.not_before <= now and self.pool.may_work(node, item.tried):
                self.again.remove(item)
                return item
        if not self.pool.may_work(node):
            return None
        for line in self.startable():
            if line.work:
                return self._begin(line, node, process)
        return None

    def startable(self) -> Iterator[Line]:
        """Passes that can start more work now, most urgent first."""
        return takewhile(lambda line: self._listed(line) and self._wanted(line), self.lines)

    def _listed(self, line: Line) -> bool:
        """Whether shards of a pass are known; ready blocks of the attempt before take their place."""
        listed = line.listed()
        for shard in self.inheritance.hand_over(line, self.tickets, self.early) if listed else ():
            self._deliver(line, shard)
        return listed

    def _begin(self, line: Line, node: str, process: str) -> Item:
        split, work, most = line.plan.split, line.work, self._most(line, len(line.work))
        if self.affinity is None:
            shards, store = self._preparing.take(work, process, most), [False] * most
        else:
            # In exact order, blocks that come early must wait, so limit how far ahead a host may choose.
            far = 1 if line.stream.rows_ahead < line.stream.step_rows else 2 * self.pool.slots
            look = min(far, LOOK_AHEAD) if self.exact else LOOK_AHEAD
            shards, store = self.affinity.take_work(split, work, node, most, look)
        name = f"{self.recovery.what(split, shards)} (task {next(self._numbers)})"
        line.begin(shards)
        line.under_way += 1
        line.shards_under_way += len(shards)
        return Item(line, name, shards, store)

    def _most(self, line: Line, left: int) -> int:
        return items.shards_per_item(left, self.pool.slots, self.shard_s.get(line.plan.split), line.single)

    def _wanted(self, line: Line) -> bool:
        stream, under_way = line.stream, line.shards_under_way * line.plan.block_records
        short = stream.rows_ahead + under_way < 2 * stream.step_rows
        return short or self._held_bytes() < self.budget_bytes

    @property
    def hungry(self) -> bool:
        """Whether so little is ready that training hosts must help."""
        room = self._held_bytes() < self.budget_bytes / 2
        return bool(self.lines) and is_hungry(self.attempt.open_streams(), room)

    def _held_bytes(self) -> int:
        return items.in_budget(
            [self.early, *(s.held for s in self.attempt.open_streams())], self.budget_bytes
        )

    def reported(self, number: int, report: BlockReport, origin: Origin, told: Told) -> bool:
        """A chain worker has made a block that arrives through Ray Data; whether it continues.

        Args:
            number: of its ticket.
            report: of the block.
            origin: identifies its reference.
            told: about the worker's host.
        """
        if (ticket := self.tickets.get(number)) is None:
            return False
        if ticket.inherited:
            return origin[1] + bool(report.rows) < ticket.made
        item, line = ticket.item, ticket.item.line
        if self.affinity is not None:
            self.affinity.used(told.node, told.usage)
        self.recovery.took(line.plan.split, told.node, report)
        new = line.report(block := ReadyBlock(report, told.node, ticket=number))
        if report.rows and (new or number in self.active):
            ticket.reported(origin[1])
        if new and report.rows:
            self.coming[origin] = (line, block)
            self.early.add(block)
        elif new:
            self._deliver(line, report.shard)
        if number not in self.active:
            return True  # remade; `Ticket.limit` ends it
        for shard in item.reported(report):
            self._close(line, shard)
        overfull = not line.single and self._held_bytes() > OVERFULL * self.budget_bytes
        if item.shards and overfull and not self._needed(item):
            line.work.extendleft(reversed(self.hand_back(number)))
            return False
        return True

    def hand_back(self, number: int) -> list[Numbered]:
        """End a ticket after what it has delivered; returns the shards left."""
        ticket, item = self.tickets[number], self.active[number]
        ticket.limit, shards, item.shards = ticket.made, item.shards, []
        self._done(number)
        return shards

    def _needed(self, item: Item) -> bool:
        """Whether the next two steps wait for this item."""
        line = item.line
        if self.exact and line.turns and line.turns[0] not in {number for number, _, _ in item.shards}:
            return False
        return line.stream.rows_ahead < 2 * line.stream.step_rows

    def arrived(self, origin: Origin, reference: Any) -> ReadyBlock | None:
        """A block has arrived; None: it is a duplicate, or no longer needed."""
        line, block = self.coming.pop(origin, (None, None))
        if line is not None and block is not None:
            block.reference = reference
            line.arrived(block)
            self._deliver(line, block.report.shard)
        return block

    def leave(self, number: int) -> Item:
        """Remove a ticket from those in progress."""
        item = self.active.pop(number)
        if self.working.get(item.process) == number:
            del self.working[item.process]
        return item

    def _close(self, line: Line, shard: int) -> None:
        line.close(shard)
        self._deliver(line, shard)

    def _deliver(self, line: Line, number: int) -> None:
        for block in line.deliverable(number):
            if block.reference is not None:
                self.early.add(block, -1)
            self.attempt.deliver(line.stream, block)

    def ended(self, number: int) -> None:
        """A chain worker has finished its work."""
        if number in self.active:
            self._done(number)

    def _done(self, number: int) -> None:
        item = self.leave(number)
        line, split = item.line, item.line.plan.split
        line.under_way -= 1
        line.shards_under_way -= item.count
        for shard, _, _ in item.shards:
            self._close(line, shard)
        seconds = item.seconds / item.count
        self.shard_s[split] = max(0.8 * self.shard_s.get(split, seconds) + 0.2 * seconds, 1e-6)
        self.attempt.suspects.ended(item.name)

    def failed(self, number: int, failure: Failure, made: int) -> float:
        """A chain worker failed at its work after so many blocks; how long to wait before it tries again.
        Only if Ray has it make lost blocks again, which no other call can; 0: the work was requeued.

        Raises:
            DataError: it has failed for good.
        """
        ticket, wait_s = self.tickets.get(number), 0.0
        if ticket is not None and made < ticket.made:
            wait_s = self.recovery.failed_again(number, ticket, failure, self.coming, self.lines)
        if number in self.active and not wait_s:
            self._take_back(number, self.recovery.failed(self.active[number], failure))
        return wait_s

    def _take_back(self, number: int, wait_s: float) -> None:
        """Requeue the undelivered part of a ticket."""
        ticket = self.tickets[number]
        item, ticket.limit = ticket.item, ticket.made
        if not item.shards:
            self._done(number)
            return
        self.leave(number)
        item.tried.add(item.node)
        item.not_before = time.monotonic() + wait_s
        self.again.append(item)

    def reconciled(self, stream: Any) -> None:
        """A pass is over: drop its blocks."""
        self.tickets = {n: t for n, t in self.tickets.items() if t.item.line.stream is not stream}
        self.coming = {o: c for o, c in self.coming.items() if c[0].stream is not stream}
