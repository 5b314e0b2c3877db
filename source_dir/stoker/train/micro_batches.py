"""Train worker: a batch of long rows in parts that fit into memory: `data.max_tokens`."""

from __future__ import annotations

from stoker.chain.columns import LENGTH_SUFFIX, padded_length
from stoker.errors import DataError, UsageError
from stoker.recipe import Batch
from stoker.serve.opening import pads_of
from stoker.train.state import Worker, count_records


class MicroBatches:
    """Train worker: divides batches as they come from the feed.

    Raises:
        UsageError: the model's layers talk to other ranks, whose batches may have fewer parts.
    """

    def __init__(self, worker: Worker) -> None:
        self.recipe, self.limit = worker.recipe, worker.config.data.max_tokens
        if self.limit is None:
            return
        self.pads = pads_of(worker.recipe)
        from torch.nn import SyncBatchNorm

        if worker.world_size > 1 and any(isinstance(m, SyncBatchNorm) for m in worker.model.modules()):
            raise UsageError(
                "data.max_tokens: the model has SyncBatchNorm, which waits for all train workers, and they"
                " divide their batches each in its own way; use BatchNorm or no max_tokens"
            )

    def of(self, batch: Batch) -> list[tuple[Batch, float]]:
        """Parts of a batch and their shares in its loss; the batch itself where it is small enough.

        Rows of similar length are together, the longest ones first; their order is that of the batch. Each
        part is padded as the feed pads: to its own longest row.

        Raises:
            DataError: a single row is too long.
            UsageError: the recipe's `loss_weight` of a batch is not the sum of its parts'.
        """
        rows = count_records(batch)
        if self.limit is None or not rows:
            return [(batch, 1.0)]
        widths = {
            name: [padded_length(n, pad) for n in batch[name + LENGTH_SUFFIX].tolist()]
            for name, pad in self.pads.items()
            if name + LENGTH_SUFFIX in batch
        }
        if not widths:  # a split may have other columns
            return [(batch, 1.0)]
        longest = [max(row) for row in zip(*widths.values(), strict=True)]
        if rows * max(longest) <= self.limit:
            return [(batch, 1.0)]
        if max(longest) > self.limit:
            raise DataError(f"a row of {max(longest)} tokens came, more than data.max_tokens={self.limit}")
        parts = [self._part(batch, group, widths) for group in grouped(longest, self.limit)]
        weights = [float(self.recipe.loss_weight(part)) for part in parts]
        whole = float(self.recipe.loss_weight(batch))
        if abs(sum(weights) - whole) > 1e-4 * abs(whole):
            raise UsageError(
                f"{type(self.recipe).__name__}.loss_weight is {whole:g} for a batch and {sum(weights):g} for"
                " its parts together; data.max_tokens needs a sum over records, such as a number of tokens"
            )
        shares = [weight / whole if whole else 1 / len(parts) for weight in weights]
        return list(zip(parts, shares, strict=True))

    def _part(self, batch: Batch, group: list[int], widths: dict[str, list[int]]) -> Batch:
        import torch

        part: Batch = {}
        for name, values in batch.items():
            if not torch.is_tensor(values):
                part[name] = [values[row] for row in group]
                continue
            part[name] = values[torch.tensor(group, device=values.device)]
            if name in widths:
                part[name] = part[name][:, : max(widths[name][row] for row in group)].contiguous()
        return part


def grouped(lengths: list[int], limit: int) -> list[list[int]]:
    """Train worker: rows in as few groups as have rows × longest within a limit, the longest rows first.

    Args:
        lengths: of the rows, none beyond the limit.
        limit: of each group.
    """
    falling = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    while falling:
        # Rows without values, which come last, take no room.
        most = limit // (lengths[falling[0]] or 1)
        groups.append(sorted(falling[:most]))
        falling = falling[most:]
    return groups
