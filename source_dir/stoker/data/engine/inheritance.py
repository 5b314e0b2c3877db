"""Head: ready blocks of an attempt that was replaced, for the attempt after it; pure.

After a lost train worker, training returns to a checkpoint. The blocks from there to where it was are made
again, those beyond it are still ready.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from stoker.data.engine.items import Line, ReadyBlock, Ticket

if TYPE_CHECKING:
    from stoker.data.engine.planner import Planner

Shards = dict[int, dict[int, ReadyBlock]]
"""Ready blocks by shard and by index in it."""


class Inheritance:
    """Head: part of the planner.

    Args:
        before: of the replaced attempt; None: there is nothing to inherit.
    """

    def __init__(self, before: Planner | None) -> None:
        self._tickets: dict[int, Ticket] = before.tickets if before else {}
        self._passes: dict[tuple[str, int], Shards] = {}
        for stream in before.attempt.open_streams() if before else ():
            split, epoch = stream.account.split, stream.account.epoch
            if before and before.passes.has_shards(split):
                early = [block for line in before.lines if line.stream is stream for block in line.early()]
                shards: Shards = defaultdict(dict)
                for block in (*stream.blocks.values(), *early):
                    shards[block.report.shard][block.report.nth] = block
                self._passes[split, epoch] = shards

    def hand_over(self, line: Line, tickets: dict[int, Ticket]) -> list[int]:
        """Put the ready blocks of a pass into its line, in place of the work of making them.

        Of a shard it takes those that follow what training has consumed without a gap.

        Args:
            line: of the pass, with its shards.
            tickets: receives those with which Ray makes lost blocks again.

        Returns:
            The shards with such blocks.
        """
        ready = self._passes.pop((line.plan.split, line.plan.epoch), {})
        taken = line.inherit(ready) if ready else []
        for block in taken:
            tickets[block.ticket] = ticket = self._tickets[block.ticket]
            ticket.item.line, ticket.limit, ticket.inherited = line, ticket.made, True
        return list(dict.fromkeys(block.report.shard for block in taken))
