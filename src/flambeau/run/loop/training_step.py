"""The training step: backward, and at the end of a global batch clip, step, update the EMA and count.

`state.amp` is flambeau.recipes.training.amp_step, which scales, clips, and skips steps that are not finite.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.parallel.gradient_sync.fixed_parts import FixedParts
from flambeau.parallel.gradient_sync.interface import GradientSync
from flambeau.parallel.gradient_sync.lockstep import Keep
from flambeau.parallel.gradient_sync.parts_in_lockstep import PartsInLockstep
from flambeau.run.loop.lr_schedule import LRSchedule
from flambeau.run.loop.resumable_state import ResumableState
from flambeau.run.loop.transient_state import TransientState

_OWN_BACKWARD = (
    "run.step(loss) does backward, the optimizer's step and zero_grad itself, and another backward pass "
    "has been through this batch or these parameters: remove loss.backward(); where it is of another loss, "
    "as in a GAN, detach what that takes from the model, or call optimizer.zero_grad() before run.step"
)
_NO_GRADIENT = (
    "the loss does not depend on any parameter of the optimizer: it was computed under torch.no_grad() or "
    "from detached values, all of them are frozen, or the model was changed since the optimizer was made"
)


@dataclass
class TrainingStep:
    """One step of a run. Nothing here waits for the device.

    Attributes:
        state: of the run: its model, optimizer, precision, average and position.
        loop: counts the steps that were not finite.
        schedule: of the learning rate.
        world: how many processes there are.
        sync: shares the gradients between processes; None in one, where even calls of nothing are felt in
            a step of 100 us.
        together: computes the parts of a step beside each other, where they need each other; else None.
    """

    state: ResumableState
    loop: TransientState
    schedule: LRSchedule
    world: int
    sync: GradientSync | None = None
    together: PartsInLockstep | None = None

    def share(self, sync: GradientSync | None, *keeps: Keep) -> None:
        """Share the gradients from here on.

        Args:
            sync: that does it.
            keeps: what a batch has for itself, where several are under way at once.
        """
        self.sync = sync
        self.together = sync.together if isinstance(sync, FixedParts) else None
        if self.together is not None:
            self.together.keeps += [self._keep, *keeps]

    def _keep(self) -> Callable[[], None]:
        state = self.state
        put_back_loop = self.loop.keep()
        micro = state.micro

        def put_back() -> None:
            put_back_loop()
            state.micro = micro

        return put_back

    def start_epoch(self) -> None:
        """Before the first batch of an epoch."""
        if self.sync is not None:
            self.sync.start_epoch()

    def share_statistics(self) -> None:
        """Before an evaluation: the same buffers and averages on all ranks."""
        if self.sync is not None:
            self.sync.share_statistics(self.state.ema.shadow if self.state.ema else {})

    def __call__(self, loss: Tensor, micro: MicroBatch) -> None:
        """Count the loss of a micro-batch, and finish the step if the global batch ends with it.

        Args:
            loss: 0-d, the mean over the samples of the micro-batch.
            micro: the batch that it was computed from.

        Raises:
            ValueError: the loss is not 0-d.
        """
        if not isinstance(loss, Tensor) or loss.dim():
            got = tuple(loss.shape) if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"the loss must be 0-d, a tensor, a mean over the batch; got {got}")
        state = self.state
        if micro.part == 1:
            # The first of each group: to look at all costs microseconds, and a backward pass reaches most.
            for group in state.optimizer.param_groups:
                if group["params"] and group["params"][0].grad is not None:
                    raise RuntimeError(_OWN_BACKWARD)
        # Gradients are to be the sum of the shares: over the ranks they are averaged, over parts added.
        averaged = 1 if micro.dealt else self.world
        try:
            state.amp.backward(loss, weight=averaged * micro.size / micro.total)
        except RuntimeError as error:
            if "second time" in str(error):
                raise RuntimeError(_OWN_BACKWARD) from error
            if not loss.requires_grad:
                raise RuntimeError(_NO_GRADIENT) from error
            loss.detach_()  # a loop may keep it, and with it what the pass has not yet freed
            raise
        if not micro.ends_batch:
            self.loop.end_part(ends_batch=False)
        if self.sync is not None:
            self.sync.after_part()
        losses = state.window.add_loss(loss, micro.size, ends_step=micro.ends_batch)
        state.position = micro.position
        if (
            micro.ends_batch or not micro.dealt
        ):  # all parts of a step that are dealt out have its samples
            state.order_crc = zlib.crc32(micro.indices.data, state.order_crc)
        if micro.ends_batch:
            self._finish(losses[-micro.part :])

    def _finish(self, losses: list[Tensor]) -> None:
        state = self.state
        self.loop.end_part(ends_batch=True)
        if self.sync is not None:
            losses += self.sync.after_backward(scale=state.amp.scale)
        groups = state.optimizer.param_groups
        if all(p.grad is None for group in groups for p in group["params"]):
            raise RuntimeError(_NO_GRADIENT)
        multiplier = self.schedule(state.step) * state.lr_scale
        for group in groups:
            group["lr"] = group["initial_lr"] * multiplier
        state.amp.step(watch=losses)
        self.loop.halted_steps += state.amp.halted
        if state.ema is not None:
            try:
                state.ema.update()
            except RuntimeError:
                state.check_shapes()
                raise
        state.step += 1
