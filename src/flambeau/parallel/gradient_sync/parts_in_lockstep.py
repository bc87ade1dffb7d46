"""Parts of a step that need each other in their SyncBatchNorm layers, some or all of them in one process.

Each part has for itself what it would have in a process of its own: gradients and buffers.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.lockstep import Lockstep, UnevenMeetings
from flambeau.parallel.gradient_sync.rows_of_parts import RowsOfParts
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.parallel.sync_batchnorm import SyncBatchNorm


class PartsInLockstep:
    """Lets all SyncBatchNorm layers of a model normalize over all parts of a step, whoever computes them.

    Args:
        model: the same on all ranks; its layers must not have process groups of their own.
        ranks: that share the parts.
        parts: of a step.

    Attributes:
        keeps: what else each part has for itself.
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
        # Of all layers: a recomputation puts copies into them.
        self._holders = [m._buffers for m in model.modules() if m._buffers]
        self._dealt: int | None = None  # parts of the step under way
        self._origins: list[int] | None = None

    def before_batch(self, micro: MicroBatch) -> None:
        """The first part of this rank updates the buffers of the model, the others copies of them."""
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
        """Compute a part as far as it does not need later ones; with the last one, all of them to their ends.

        Args:
            work: its forward and backward pass, and whatever else belongs to it.
            micro: its batch.

        Raises:
            InputError: the parts do not pass through the same layers.
        """
        try:
            self._lockstep.do(work, is_last=micro.ends_batch)
        except BaseException:
            self.end_step()
            raise

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[list[int]]:
        """Around parts that are looked at, and not trained on; a bad one may leave its backward pass out.

        Yields:
            In the end, the parts that were the first to give something not finite, from 1.
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
        """The model keeps the buffers that the first part has updated, as has the first part of each rank."""
        for holder, first in zip(self._holders, self._first, strict=True):
            holder.update(first)
        self._dealt = None

    def close(self) -> None:
        """No part follows for now; some of a step may wait for one that could not be read."""
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
            for holder, own in zip(self._holders, buffers, strict=True):
                holder.update(own)

        return put_back

    def _meet(self, own: Tensor) -> Tensor:
        """Called by a layer with what belongs to its part: (...) to (K, ...) of all parts of the step."""
        if self._dealt is None:  # outside of training
            return own.unsqueeze(0)
        if not self._lockstep.is_running:
            raise InputError(
                f"parts = {self._parts}: with SyncBatchNorm the parts of a step need each other in the "
                "forward pass, and the body of a loop is done for one after the other: write `for _ in "
                "run.steps(loss_of)`, whose loss_of(batch) gives the loss of a batch"
            )
        return self._lockstep.meet(own, self._of_all_parts)

    def _of_all_parts(self, own: list[Tensor]) -> Tensor:
        assert self._dealt is not None
        mine = torch.stack(own)
        if self._origins == []:
            bad = ~torch.isfinite(mine).flatten(1).all(1)
            self._origins += [part + 1 for part in bad.nonzero().flatten().tolist()]
        rows = RowsOfParts(mine, self._ranks, parts=self._parts, dealt=self._dealt)
        return rows.arrived()


def _copies(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if b is None else b.clone() for name, b in buffers.items()}
