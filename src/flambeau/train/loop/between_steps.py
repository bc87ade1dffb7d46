"""What a run does between two steps: lines, checkpoints, stopping, the end of an epoch and of the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.parallel.preemption import FLAG
from flambeau.parallel.ranks import Ranks
from flambeau.parallel.watchdog.heartbeat import SAVING
from flambeau.train.loop.evaluation_mode import BETWEEN_PARTS
from flambeau.train.loop.nan_guard import NanGuard
from flambeau.train.loop.recorder import Recorder
from flambeau.train.loop.resumable_state import ResumableState
from flambeau.train.loop.resumption import Resumption
from flambeau.train.loop.run_parts import RunParts
from flambeau.train.loop.training_step import TrainingStep
from flambeau.train.loop.transient_state import TransientState

if TYPE_CHECKING:
    import weakref


@dataclass
class BetweenSteps:
    """All of it happens on all ranks, at the same steps.

    Attributes:
        folder: of the run.
        state, loop, parts, ranks, recorder, resumption, nan_guard, step: of the run.
        replays: nothing is written.
        finalizer: gives back what the run holds; None until it holds anything.
    """

    folder: Path
    state: ResumableState
    loop: TransientState
    parts: RunParts
    ranks: Ranks
    recorder: Recorder
    resumption: Resumption
    nan_guard: NanGuard
    step: TrainingStep
    replays: bool
    finalizer: "weakref.finalize[[int], object] | None" = None

    @property
    def is_over(self) -> bool:
        """No step is left."""
        return self.state.stopped or self.state.step >= self.parts.plan.total_steps

    @property
    def holds(self) -> bool:
        """The run has not been closed."""
        return self.finalizer is not None and self.finalizer.alive

    def agree_to_stop(self) -> None:
        """Learn whether any rank has called `run.stop`."""
        self.state.stopped |= any(self.ranks.gather(self.loop.asks_to_stop))

    def end_batch(self) -> None:
        """Between two bodies of the loop: whatever they have done to the state of the run is complete."""
        micro, self.loop.done = self.loop.done, None
        if micro is None:
            return
        if self.loop.asks_to_stop and self.ranks.world == 1:
            self.agree_to_stop()
        if self.state.step >= self.loop.next_event or micro.ends_epoch:
            self._at_event(micro)
        self.preempt_if_asked()

    def _at_event(self, micro: MicroBatch) -> None:
        """What is due between two steps now and then: a line, a checkpoint, the end."""
        step, plan = self.state.step, self.parts.plan
        if plan.has_line(step, micro):
            self.flush()
            if self.state.step != step:
                return  # rolled back
        # At the end of an epoch the checkpoint waits for the evaluation: it may be the best.
        due = step % plan.save_every == 0 or self.state.best.step == step
        if due and not micro.ends_epoch and not self.is_over:
            self.save()  # which may go back, too
        self.loop.next_event = plan.next_event(self.state.step)

    def flush(self) -> None:
        """Write the line of the steps since the last one; stop or go back if one of them went bad."""
        window = self.state.window
        self.parts.bad.report()
        window.settle(self.ranks, step=self.state.step)
        if window.empty:
            return
        row, halted_steps = self.state.read_window(self.loop.halted_steps)
        if halted_steps:
            self.resumption.roll_back(self.state.step - halted_steps, self.nan_guard, self.step)
            return
        self.recorder.write(row)
        self.parts.progress.note(row)

    def record(self, figures: dict[str, float]) -> None:
        """Write the line of an evaluation; the best so far gets a checkpoint when the loop's body is done."""
        state, loop = self.state, self.loop
        state.metrics = figures
        if not loop.is_partial:
            state.best.see(figures, step=state.step)
        elif state.best.metric in figures:
            self.parts.progress.say_once(BETWEEN_PARTS)
        self.parts.schedule.note(figures)
        self.recorder.write_evaluation(figures)
        if loop.is_partial or state.best.step != state.step:
            return
        if loop.done is not None:
            loop.next_event = state.step
        elif state.position < state.data_length and not self.is_over:
            self.save()  # a step comes next

    def end_epoch(self) -> None:
        """The loop's body is done with an epoch, or with what of it belongs to the run."""
        state, say, step = self.state, self.parts.progress.say, self.state.step
        self.end_batch()  # of a body that left with `break`
        if state.step < step:
            return  # rolled back, and the rest of that epoch comes next
        self.agree_to_stop()
        if state.position < state.data_length and not self.is_over:
            raise RuntimeError("the loop left `for ... in run.batches()` before its end")
        self.parts.schedule.end_epoch(say=say)
        state.best.end_epoch(say=say, training=state.window.logged, is_last=self.is_over)
        state.epoch, state.position = state.epoch + 1, 0
        due = state.step % self.parts.plan.save_every == 0 or self.is_over
        if due or state.best.step == state.step:
            self.save()
        self.preempt_if_asked()

    def preempt_if_asked(self) -> None:
        """A point where the run may stop; all ranks pass the same ones and stop at the same."""
        signal = self.ranks.stop_signal()
        if signal is None or self.replays:
            return
        # Workers first: they have been signalled, too, and stay only for a while.
        self.loop.stream = None
        if self.recorder.has_time_to_save(another=self.loop.saved_step != self.state.step):
            self.save(wait=True)
            self.parts.progress.say_saved(signal, step=self.state.step, folder=self.folder)
        ending = FLAG.answer()
        self.close()
        raise ending

    def save(self, *, wait: bool = False) -> None:
        """Copy the run and start writing it: training waits for the copy, not for the disk.

        Args:
            wait: for the disk, too.
        """
        self.ranks.beat(SAVING)
        if bool(self.parts.amp.halted):
            self.flush()
        if not self.replays and self.loop.saved_step != self.state.step:
            self.parts.bad.report()
            self.state.settle(self.ranks)
            self.agree_to_stop()
            self.loop.saved_step = self.state.step
            self.recorder.save()
        if wait:
            self.recorder.wait_for_all()

    def close(self) -> None:
        """Wait for the checkpoint under way, and give back what the run holds."""
        self.loop.stream = None
        self.parts.progress.close()
        try:
            self.recorder.end_saves()
        finally:
            if self.finalizer is not None:
                self.finalizer()
