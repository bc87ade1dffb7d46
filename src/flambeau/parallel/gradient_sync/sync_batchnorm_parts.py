"""Parts of a step that depend on each other in SyncBatchNorm, several of them in one process.

Each part has its own gradients and buffers, as in a process of its own.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.lockstep import Lockstep, UnevenMeetings
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.parallel.fixed_order_sum import parts_of
from flambeau.recipes.parallel.sync_batchnorm import SyncBatchNorm


class GatheredRows:
    """An all-gather of one row per part, in the order of the parts; all ranks make one.

    `mine` (n, ...) has a row per part of this rank; further rows are ignored. Each rank has the parts that
    belong to the rank that stands `behind` ranks before it.
    """

    def __init__(
        self, mine: Tensor, ranks: Ranks, *, parts: int, dealt: int, behind: int = 0
    ) -> None:
        world = ranks.world
        owned = (parts_of((rank - behind) % world, world, parts) for rank in range(world))
        self._order = [(owner + behind) % world for owner in range(world)]
        self._counts = [len(range(part.start, min(part.stop, dealt))) for part in owned]
        self._rows = [mine]
        self._work = None
        if ranks.world > 1:
            sent = mine.new_zeros(max(self._counts), *mine.shape[1:])
            count = self._counts[ranks.rank]
            sent[:count] = mine[:count]
            self._rows = [torch.empty_like(sent) for _ in self._counts]
            self._work = dist.all_gather(self._rows, sent, async_op=True)

    def wait(self) -> Tensor:
        """The rows of all parts, (dealt, ...)."""
        if self._work is not None:
            self._work.wait()
        return torch.cat([self._rows[rank][: self._counts[rank]] for rank in self._order])


class SyncBatchNormParts:
    """Lets a model's SyncBatchNorm layers, without process groups, normalize over all parts of a step.

    `keeps` save and restore what else each part needs for itself.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, parts: int) -> None:
        self._ranks, self._parts = ranks, parts
        self._parameters = list(model.parameters())
        self._lockstep = Lockstep(
            self._parameters[0].device,
            most=parts,
            uneven=f"parts = {parts}: the parts of a step passed through different SyncBatchNorm layers, "
            "or more often: what a batch goes through must not depend on its samples",
        )
        self.keeps = self._lockstep.keeps
        self.keeps.append(self._keep)
        self._synced = [m for m in model.modules() if isinstance(m, SyncBatchNorm)]
        for layer in self._synced:
            layer.process_group = self._meet
        # Of all layers, because recomputed activations put copies into them.
        self._holders = [m._buffers for m in model.modules() if m._buffers]
        self._dealt: int | None = None  # parts of the current step
        self._origins: list[int] | None = None
        self.behind = 0
        """How many ranks before this one the rank stands whose parts it computes."""

    def before_batch(self, micro: MicroBatch) -> None:
        """Let the first part of this rank update the model's buffers, and the others copies of them."""
        if micro.part == 1:
            self._dealt = micro.dealt
            self._first = [dict(holder) for holder in self._holders]
            self._starts = [_copies(layer._buffers) for layer in self._synced]
            return
        for holder, first in zip(self._holders, self._first, strict=True):
            holder.update(first)
        for layer, start in zip(self._synced, self._starts, strict=True):
            layer._buffers.update(_copies(start))

    def do(self, work: Callable[[], None], micro: MicroBatch) -> None:
        """Compute a part until it needs later ones; with the last one, all of them to their ends."""
        try:
            self._lockstep.do(work, is_last=micro.ends_batch)
        except BaseException:
            self.end_step()
            raise

    @contextlib.contextmanager
    def examined(self) -> Iterator[list[int]]:
        """Around parts that are only examined; a bad one may skip its backward pass.

        Yields a list that gets, at the end, the first parts (from 1) that were not finite.
        """
        origins: list[int] = []
        self._origins = origins
        try:
            with contextlib.suppress(UnevenMeetings):
                yield origins
        finally:
            self._origins = None
            self.close()

    def end_step(self) -> None:
        """Restore the buffers that the first part has updated, as on each rank."""
        for holder, first in zip(self._holders, self._first, strict=True):
            holder.update(first)
        self._dealt = None

    def close(self) -> None:
        """End waiting parts: a later part of the step could not be read, or the loop has ended."""
        self._lockstep.close()
        if self._dealt is not None:
            self.end_step()

    def _keep(self) -> Callable[[], None]:
        gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        buffers = [dict(holder) for holder in self._holders]
        for p, _ in gradients:
            p.grad = None

        def put_back() -> None:
            for p, gradient in gradients:
                p.grad = gradient
            for holder, kept in zip(self._holders, buffers, strict=True):
                holder.update(kept)

        return put_back

    def _meet(self, part: Tensor) -> Tensor:
        """Called by a layer with the tensor of its part: (...) to (K, ...) of all parts of the step."""
        if self._dealt is None:  # outside of training
            return part.unsqueeze(0)
        if not self._lockstep.is_running:
            raise InputError(
                f"parts = {self._parts}: with SyncBatchNorm the parts of a step need each other in the "
                "forward pass, and the body of a loop is done for one after the other: write `for _ in "
                "run.steps(loss_of)`, whose loss_of(batch) gives the loss of a batch"
            )
        return self._lockstep.meet(part, self._gather)

    def _gather(self, local: list[Tensor]) -> Tensor:
        assert self._dealt is not None
        mine = torch.stack(local)
        if self._origins == []:
            bad = ~torch.isfinite(mine).flatten(1).all(1)
            self._origins += [part + 1 for part in bad.nonzero().flatten().tolist()]
        return GatheredRows(
            mine, self._ranks, parts=self._parts, dealt=self._dealt, behind=self.behind
        ).wait()


def _copies(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if b is None else b.clone() for name, b in buffers.items()}
