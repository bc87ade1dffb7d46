"""A row for each part of a step, on all ranks in the order of the parts."""

import torch
import torch.distributed as dist
from torch import Tensor

from flambeau.parallel.ranks import Ranks
from flambeau.recipes.parallel.fixed_order_sum import parts_of


class RowsOfParts:
    """Rows that are under way from all ranks to all; all of them make one.

    Args:
        mine: (n, ...), a row for each part of this rank; what is beyond those that are dealt does not count.
        ranks: that share the parts.
        parts: of a step, at most.
        dealt: parts of this step.
    """

    def __init__(self, mine: Tensor, ranks: Ranks, *, parts: int, dealt: int) -> None:
        owned = (parts_of(rank, ranks.world, parts) for rank in range(ranks.world))
        self._shares = [len(range(own.start, min(own.stop, dealt))) for own in owned]
        self._everyones = [mine]
        self._arriving = None
        if ranks.world > 1:
            sent = mine.new_zeros(max(self._shares), *mine.shape[1:])
            there = self._shares[ranks.rank]
            sent[:there] = mine[:there]
            self._everyones = [torch.empty_like(sent) for _ in self._shares]
            self._arriving = dist.all_gather(self._everyones, sent, async_op=True)

    def arrived(self) -> Tensor:
        """(dealt, ...); waits for them."""
        if self._arriving is not None:
            self._arriving.wait()
        pairs = zip(self._everyones, self._shares, strict=True)
        return torch.cat([rows[:share] for rows, share in pairs])
