"""Head: ready blocks of an attempt that was replaced, for the attempt after it; pure.

After a lost train worker, training returns to a checkpoint. The blocks from there to where it was are made
again, those beyond it are still ready.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stoker.serve.items import Held, Item, Line, ReadyBlock, Ticket

if TYPE_CHECKING:
    from stoker.serve.planner import Planner

NO_STREAM: Any = None


@dataclass
class Legacy:
    """Head: the ready blocks of one pass."""

    line: Line
    """Of no stream; names the plan."""
    shards: dict[int, dict[int, ReadyBlock]] = field(default_factory=dict)
    """By shard, and by index in it."""
    tickets: dict[int, Ticket] = field(default_factory=dict)
    """Those that made them."""


class Inheritance:
    """Head: part of the planner.

    Args:
        before: of the replaced attempt; None: there is nothing to inherit.
    """

    def __init__(self, before: Planner | None) -> None:
        self._passes: dict[tuple[str, int], Legacy] = {}
        if before is None:
            return
        self._passes |= before.inheritance._passes
        for stream in before.attempt.open_streams():
            split, epoch = stream.account.split, stream.account.epoch
            if before.passes.has_shards(split):
                early = [block for line in before.lines if line.stream is stream for block in line.early()]
                for block in (*stream.blocks.values(), *early):
                    self._take((split, epoch), block, before.tickets[block.ticket])

    def _take(self, key: tuple[str, int], block: ReadyBlock, made_by: Ticket) -> None:
        """Take over a block and its ticket, but nothing that holds the old attempt."""
        if key not in self._passes:
            self._passes[key] = Legacy(Line(NO_STREAM, made_by.item.line.plan, None, exact=False))
        legacy = self._passes[key]
        legacy.shards.setdefault(block.report.shard, {})[block.report.nth] = block
        if block.ticket not in legacy.tickets:
            item = Item(legacy.line, made_by.item.name, [], [])
            legacy.tickets[block.ticket] = replace(made_by, item=item, limit=made_by.made, inherited=True)

    @property
    def tickets(self) -> dict[int, Ticket]:
        """With these, Ray makes blocks of a lost host again, also those of passes that come later."""
        return {n: ticket for legacy in self._passes.values() for n, ticket in legacy.tickets.items()}

    def hand_over(self, line: Line, tickets: dict[int, Ticket], early: Held) -> list[int]:
        """Put the ready blocks of a pass into its line, in place of the work of making them.

        Of a shard it takes those that follow what training has consumed without a gap.

        Args:
            line: of the pass, with its shards.
            tickets: loses those whose blocks are not used.
            early: receives the blocks.

        Returns:
            The shards with such blocks.
        """
        account = getattr(line.stream, "account", None)  # only passes of recipes have one
        legacy = self._passes.pop((account.split, account.epoch), None) if account else None
        if legacy is None:
            return []
        # An epoch that was resumed may have had blocks of another size.
        taken = line.inherit(legacy.shards) if legacy.line.plan == line.plan else []
        for block in taken:
            legacy.tickets[block.ticket].item.line = line
            if block.reference is not None:
                early.add(block)
        for number, ticket in legacy.tickets.items():
            if ticket.item.line is not line:
                del tickets[number]
        return list(dict.fromkeys(block.report.shard for block in taken))
