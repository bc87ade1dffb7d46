"""What a run does between its steps: resume, write what is due, roll back, stop and end."""

import contextlib
import os
import weakref

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.preemption import FLAG
from flambeau.parallel.ranks import Ranks
from flambeau.parallel.watchdog.heartbeat import SAVING
from flambeau.run.folder.checkpointer import Restored
from flambeau.run.folder.published_weights import Result, finished
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.loop.evaluation_mode import BETWEEN_PARTS
from flambeau.run.loop.memory_guard import MemoryGuard
from flambeau.run.loop.nan_guard import NanGuard
from flambeau.run.loop.rank_checks import check_shares
from flambeau.run.loop.recorder import Recorder
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.state import ResumableState, TransientState
from flambeau.run.loop.training_step import TrainingStep
from flambeau.run.options.run_options import RunOptions


class Lifecycle:
    """All ranks call each method, at the same steps.

    Attributes:
        finalizer: releases what the run holds; None until the run holds anything.
    """

    def __init__(
        self,
        folder: RunFolder,
        state: ResumableState,
        loop: TransientState,
        parts: RunParts,
        ranks: Ranks,
        *,
        recorder: Recorder,
        nan_guard: NanGuard,
        memory: MemoryGuard,
        step: TrainingStep,
        options: RunOptions,
    ) -> None:
        self._folder = folder
        self._state = state
        self._loop = loop
        self._parts = parts
        self._ranks = ranks
        self._recorder = recorder
        self._nan_guard = nan_guard
        self._memory = memory
        self._step = step
        self._replays = options.replay_from is not None  # writes nothing
        self._extend = options.extend
        self.finalizer: weakref.finalize[[int], object] | None = None

    @property
    def is_over(self) -> bool:
        """No step is left."""
        return self._state.stopped or self._state.step >= self._parts.plan.total_steps

    @property
    def holds(self) -> bool:
        """The run has not been closed."""
        return self.finalizer is not None and self.finalizer.alive

    def resume(self) -> Result | None:
        """Continue from the newest whole checkpoint, if any; returns the result of a finished run."""
        self._state.extend = (
            self._recorder.extended
        )  # a checkpoint, if there is one, says it exactly
        restored = self._recorder.newest()
        say = self._parts.progress.say
        if restored is not None:
            self.load(restored)
            if self._state.position and self._parts.loader.are_shares:
                check_shares(restored.meta["exactness"].get("processes", 1), self._ranks.world)
        if not self._begin_extension():
            result = self._ranks.first(lambda: finished(self._folder, say=say))
            if result is not None:
                return result
        if restored is not None:
            self._recorder.say_resumed(restored)
            self._memory.say_resumed()
        self._recorder.open_metrics(restored)
        return None

    def load(self, restored: Restored) -> None:
        """Return to a checkpoint."""
        state = self._state
        state.load(restored)
        if not self._ranks.is_first:
            state.leave_to_first()
        next_event = self._parts.plan.next_event(state.step)
        self._loop.restart(saved_step=state.step, next_event=next_event)
        state.window.restart_clock()
        self._recorder.saver.last_good = restored.name

    def _begin_extension(self) -> bool:
        """Let a finished run continue if `extend` asks for more steps than its checkpoint was trained for.

        Called after each load, because the checkpoint may be from before the extension.

        Returns:
            Whether the run now continues beyond its former end.

        Raises:
            InputError: the run is not finished, or is to be shorter than it was trained for.
        """
        state = self._state
        plan = self._parts.plan
        say = self._parts.progress.say
        before, now = plan.extension(state.extend), plan.extension(self._extend)
        steps = plan.total_steps - now + before
        self._ranks.first(lambda: self._check_extension(steps, now - before))
        state.extend = self._extend
        if now == before:
            if plan.extension(self._recorder.extended) > now:
                say(
                    f"the run is not extended by {self._recorder.extended}: none of that was trained"
                )
            self._recorder.extended = self._extend
            return False
        early = f", which ended at step {state.step}," if state.step < steps else ""
        state.stopped = False
        state.best.improved_at = state.step  # patience starts over
        # Before config.toml is updated: a start that is killed in between then finds a run at its former end,
        # not one that looks finished at its new length.
        self._ranks.first(lambda: self._folder.result.unlink(missing_ok=True))
        left = format((plan.total_steps - state.step) / plan.steps_per_epoch, ".3g")
        say(
            f"the run of {steps} steps{early} is extended by {self._extend}: from step {state.step} to "
            f"{plan.total_steps}, {left} {'epoch' if left == '1' else 'epochs'}; the learning rate is that "
            f"of a run of {plan.total_steps} steps, so now {self._parts.schedule(state.step):.4g} of its peak"
        )
        return True

    def _check_extension(self, steps: int, more: int) -> None:
        """Refuse to extend a run before its end, or to make it shorter than it was trained for.

        Args:
            steps: of the run without `more`.
        """
        state = self._state
        is_over = state.stopped or state.step >= steps
        if more < 0:
            what = "" if is_over else f", of which it has trained {state.step} of {steps} steps"
            now = f"extend = {state.extend!r}" + (", or more" if is_over else "")
            raise InputError(
                f"the run has been extended by {state.extend}{what}: give {now}; or "
                f"{self._folder.advice.start_again}"
            )
        if more and not is_over:
            raise InputError(
                f"extend = {self._extend!r} is for a finished run, and this one stands at step {state.step} "
                f"of {steps}: let it finish first"
            )

    def begin_epochs(self) -> None:
        """Before the first epoch of `run.epochs()`."""
        state = self._state
        plan = self._parts.plan
        if state.step == 0 and state.position == 0:
            self.save(wait=True)  # so that a folder that cannot hold a checkpoint fails now
        self._parts.progress.start(state, plan, world=self._ranks.world)
        self._loop.next_event = plan.next_event(state.step)
        state.window.restart_clock()

    def _roll_back(self, steps_before: int) -> None:
        """Return from a bad step to the newest checkpoint, or raise NotFinite."""
        self._loop.stream = None
        why = self._nan_guard.roll_back(steps_before, self._recorder, self.load)
        self._begin_extension()
        if self._step.sync is not None:
            self._step.sync.roll_back()
        self._parts.progress.say(why)

    def _agree_to_stop(self) -> None:
        """Exchange whether any rank has called `run.stop`."""
        self._state.stopped |= any(self._ranks.gather(self._loop.stop_requested))

    def end_batch(self) -> None:
        """After the loop's body for a batch: if that ended a step, do what is due."""
        micro, self._loop.done = self._loop.done, None
        if micro is None:
            return
        if self._loop.stop_requested and self._ranks.world == 1:
            self._agree_to_stop()
        if self._state.step >= self._loop.next_event or micro.ends_epoch:
            self._at_event(micro)
        self.preempt_if_signalled()

    def _at_event(self, micro: MicroBatch) -> None:
        """Write the line or the checkpoint that is due after this step."""
        step = self._state.step
        plan = self._parts.plan
        if plan.has_line(step, micro):
            self.flush()
            if self._state.step != step:
                return  # rolled back
        # At the end of an epoch the checkpoint waits for the evaluation: it may be the best.
        due = step % plan.save_every == 0 or self._state.best.step == step
        if due and not micro.ends_epoch and not self.is_over:
            self.save()  # may roll back, too
        self._loop.next_event = plan.next_event(self._state.step)

    def flush(self) -> None:
        """Write the line of the steps since the last one; roll back or stop if one was not finite."""
        window = self._state.window
        self._parts.bad.report()
        window.settle(self._ranks, step=self._state.step)
        if window.empty:
            return
        row, halted_steps = self._state.read_window(self._loop.halted_steps)
        if halted_steps:
            self._roll_back(self._state.step - halted_steps)
            return
        self._recorder.write(row)
        self._parts.progress.note(row)

    def record(self, figures: dict[str, float]) -> None:
        """Write the line of an evaluation; the best so far gets a checkpoint when the loop's body is done."""
        state, loop = self._state, self._loop
        state.metrics = figures
        if not loop.is_partial:
            state.best.see(figures, step=state.step)
        elif state.best.metric in figures:
            self._parts.progress.say_once(BETWEEN_PARTS)
        self._parts.schedule.note(figures)
        self._recorder.write_evaluation(figures)
        if loop.is_partial or state.best.step != state.step:
            return
        if loop.done is not None:
            loop.next_event = state.step
        elif state.position < state.data_length and not self.is_over:
            self.save()  # a step comes next

    def end_epoch(self) -> None:
        """After the loop's body for an epoch."""
        state = self._state
        say = self._parts.progress.say
        step = self._state.step
        self.end_batch()  # if the body left its batches with `break`
        if state.step < step:
            return  # rolled back: the rest of that epoch comes next
        self._agree_to_stop()
        if state.position < state.data_length and not self.is_over:
            raise RuntimeError("the loop left `for ... in run.batches()` before its end")
        self._parts.schedule.end_epoch(say=say)
        state.best.end_epoch(say=say, training=state.window.logged, is_last=self.is_over)
        state.epoch, state.position = state.epoch + 1, 0
        due = state.step % self._parts.plan.save_every == 0 or self.is_over
        if due or state.best.step == state.step:
            self.save()
        self.preempt_if_signalled()

    def preempt_if_signalled(self) -> None:
        """Stop with a checkpoint if a signal has arrived; all ranks stop at the same call."""
        signal = self._ranks.stop_signal()
        if signal is None or self._replays:
            return
        # Workers first: they were signalled too, and wait only for a while.
        self._loop.stream = None
        if self._recorder.has_time_to_save(another=self._loop.saved_step != self._state.step):
            self.save(wait=True)
            self._parts.progress.say_saved(signal, step=self._state.step, folder=self._folder.path)
        ending = FLAG.answer()
        self.close()
        raise ending

    def save(self, *, wait: bool = False) -> None:
        """Copy the state and start to write a checkpoint; with `wait`, until it is on the disk."""
        self._ranks.beat(SAVING)
        if bool(self._parts.amp.halted):
            self.flush()
        if not self._replays and self._loop.saved_step != self._state.step:
            self._parts.bad.report()
            self._state.settle(self._ranks)
            self._agree_to_stop()
            self._loop.saved_step = self._state.step
            self._recorder.save()
        if wait:
            self._recorder.wait_for_all()

    def close(self) -> None:
        """Wait for the checkpoint being written, and release what the run holds."""
        self._loop.stream = None
        self._parts.progress.close()
        try:
            self._recorder.end_saves()
        finally:
            if self.finalizer is not None:
                self.finalizer()


def closed_when_dropped(
    owner: object, resources: contextlib.ExitStack
) -> "weakref.finalize[[int], object]":
    """Release resources when the finalizer is called or the owner is dropped.

    A forked process inherits copies of both, and must not release anything.
    """

    def close(process: int) -> None:
        if os.getpid() == process:
            resources.close()

    finalizer = weakref.finalize(owner, close, os.getpid())
    finalizer.atexit = False
    return finalizer
