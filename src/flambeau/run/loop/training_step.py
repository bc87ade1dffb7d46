"""The training step: backward; after the last micro-batch clip, step, update the EMA and count.

`state.amp` is flambeau.recipes.training.amp_step, which scales, clips, and skips steps that are not finite.
"""

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.interface import GradientSync
from flambeau.parallel.gradient_sync.lockstep import Keep
from flambeau.parallel.gradient_sync.sync_batchnorm_parts import SyncBatchNormParts
from flambeau.run.loop.first_loss import suspicious_lines
from flambeau.run.loop.lr_schedule import LRSchedule
from flambeau.run.loop.model_state import SPARSE
from flambeau.run.loop.progress_bar import ProgressBar
from flambeau.run.loop.state import ResumableState, TransientState
from flambeau.run.loop.step_check import StepCheck
from flambeau.run.loop.untrained_parameters import untrained_lines

_SECOND_BACKWARD = (
    "run.step(loss) does backward, the optimizer's step and zero_grad itself, and another backward pass "
    "has been through this batch or these parameters: remove loss.backward(); where it is of another loss, "
    "as in a GAN, detach what that takes from the model, or call optimizer.zero_grad() before run.step"
)
_NO_GRADIENT = (
    "the loss does not depend on any parameter of the optimizer: it was computed under torch.no_grad() or "
    "from detached values, all of them are frozen, or the model was changed since the optimizer was made"
)
_NEW_GROUP = (
    "the optimizer's parameters changed after Run was made, as by add_param_group: no resume could load its "
    "state; give the optimizer all groups before Run, and freeze those that come later with "
    "requires_grad_(False)"
)


@dataclass
class TrainingStep:
    """One step of a run. Nothing here waits for the device, but in the first step.

    Attributes:
        sync: exchanges gradients; None in one process, where even empty calls would be felt in a step of 100
            us.
        check: computes some steps twice; None for none.
    """

    state: ResumableState
    loop: TransientState
    schedule: LRSchedule
    progress: ProgressBar
    sync: GradientSync | None = None
    check: StepCheck | None = None
    _together: SyncBatchNormParts | None = None

    def __post_init__(self) -> None:
        self._group_sizes = [len(group["params"]) for group in self.state.optimizer.param_groups]

    def share(self, sync: GradientSync | None, *keeps: Keep) -> None:
        """Exchange the gradients from here on.

        Each of `keeps` saves a state that every batch needs for itself, and returns its restoring function,
        for batches computed together.
        """
        self.sync = sync
        if self.check is not None:
            self.check.sync = sync
        self._together = None if sync is None else sync.together
        if self._together is not None:
            self._together.keeps += [self._keep, *keeps]

    def compute(self, work: Callable[[], None], micro: MicroBatch | None) -> None:
        """Run a batch's forward and backward pass: now, or with others of the step."""
        if self._together is None or micro is None:
            work()
        else:
            self._together.do(work, micro)

    def end_computing(self) -> None:
        if self._together is not None:
            self._together.close()

    def examine(
        self,
        batches: Iterable[MicroBatch],
        examine: Callable[[MicroBatch], None],
        *,
        findings: Mapping[int, object],
    ) -> list[int]:
        """Compute the batches of a step again, to find what is not finite.

        `examine` computes one batch, and adds to `findings` by its part; after the first finding independent
        batches are skipped. Returns the parts, in order, that were not finite before they exchanged anything.
        """
        together = self._together
        if together is None:
            for micro in batches:
                if not any(findings.values()):
                    examine(micro)
            return []
        with together.examined() as origins:
            for micro in batches:
                together.before_batch(micro)
                together.do(functools.partial(examine, micro), micro)
        return origins

    def _keep(self) -> Callable[[], None]:
        state = self.state
        put_back_loop = self.loop.keep()
        micro = state.micro

        def put_back() -> None:
            put_back_loop()
            state.micro = micro

        return put_back

    def start_epoch(self) -> None:
        if self.sync is not None:
            self.sync.start_epoch()

    def share_statistics(self) -> None:
        """Before an evaluation: make buffers and averages equal on all ranks."""
        if self.sync is not None:
            self.sync.share_statistics(self.state.ema.shadow if self.state.ema else {})

    def __call__(self, loss: Tensor, micro: MicroBatch) -> bool:
        """Backward of a micro-batch's mean loss, 0-d; after the last one of a batch the optimizer's step.

        Returns whether a step is done.
        """
        if not isinstance(loss, Tensor) or loss.dim():
            got = tuple(loss.shape) if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"the loss must be 0-d, a tensor, a mean over the batch; got {got}")
        state = self.state
        if micro.part == 1:
            if [
                len(group["params"]) for group in state.optimizer.param_groups
            ] != self._group_sizes:
                raise InputError(_NEW_GROUP)
            # Only the first of each group: all would cost microseconds, and a backward pass reaches most.
            for group in state.optimizer.param_groups:
                if group["params"] and group["params"][0].grad is not None:
                    raise RuntimeError(_SECOND_BACKWARD)
            if state.step == 0:
                for line in suspicious_lines(loss):
                    self.progress.say_once(line)
        # The gradient must be the sum over shares; `sync` averages over ranks, and parts are added.
        averaged = 1 if self.sync is None else self.sync.averages_over
        try:
            state.amp.backward(loss, weight=averaged * micro.size / micro.total)
        except RuntimeError as error:
            if "second time" in str(error):
                raise RuntimeError(_SECOND_BACKWARD) from error
            if not loss.requires_grad:
                raise RuntimeError(_NO_GRADIENT) from error
            loss.detach_()  # the loop may keep the loss, and with it memory that the pass has not freed
            raise
        if not micro.ends_batch:
            self.loop.end_part(ends_batch=False)
        if self.check is not None:
            self.check.note(loss, micro)
        if self.sync is not None:
            self.sync.after_part()
        losses = state.window.add_loss(loss, micro.size, ends_step=micro.ends_batch)
        state.position = micro.position
        if micro.counts_indices:
            state.order_crc = zlib.crc32(micro.indices.data, state.order_crc)
        if not micro.ends_batch or not (self.check is None or self.check.agrees()):
            return False
        self._finish(losses[-micro.part :])
        return True

    def _finish(self, losses: list[Tensor]) -> None:
        state = self.state
        self.loop.end_part(ends_batch=True)
        if self.sync is not None:
            losses += self.sync.after_backward(scale=state.amp.scale)
        groups = state.optimizer.param_groups
        if all(p.grad is None for group in groups for p in group["params"]):
            raise RuntimeError(_NO_GRADIENT)
        if state.step == 0:
            for line in untrained_lines(state.model, state.optimizer):
                self.progress.say_once(line)
        multiplier = self.schedule(state.step) * state.lr_scale
        for group in groups:
            rate = group["initial_lr"] * multiplier
            if isinstance(group["lr"], Tensor):  # which a compiled or captured step reads
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        try:
            state.amp.step(watch=losses)
        except NotImplementedError as error:
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            if any(gradient.is_sparse for gradient in gradients):
                raise InputError(f"a gradient is sparse: {SPARSE}") from error
            raise
        if state.ema is not None:
            try:
                state.ema.update()
            except RuntimeError:
                state.check_shapes()
                raise
        state.step += 1
