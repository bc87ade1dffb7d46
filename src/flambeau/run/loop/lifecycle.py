"""What a run does between its steps: resume, write what is due, roll back, stop and end."""

import contextlib
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.preemption import FLAG, PAUSE_AFTER, pause_after
from flambeau.parallel.ranks import Ranks
from flambeau.parallel.watchdog.heartbeat import SAVING
from flambeau.run.folder.checkpointer import Restored
from flambeau.run.folder.pause_file import write_pause
from flambeau.run.folder.published_weights import Result, finished
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.loop.memory_guard import MemoryGuard
from flambeau.run.loop.nan_guard import NanGuard
from flambeau.run.loop.rank_checks import check_shares
from flambeau.run.loop.recorder import Recorder
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.state import Place, ResumableState, TransientState
from flambeau.run.loop.training_step import TrainingStep
from flambeau.run.options.run_options import RunOptions

_BETWEEN_PARTS = (
    "an evaluation between the micro-batches of a step chooses no best weights: evaluate after "
    "run.step(loss), where run.state.step has changed"
)
_REPEATED = (
    "an evaluation before run.batches() is not repeated by a resume in mid-epoch: it has its line"
)
_AFTER_THE_END = (
    "an evaluation after the run has ended is shown, and is not in metrics.jsonl: its place is in the loop "
    "over run.epochs()"
)


@dataclass
class Lifecycle:
    """All ranks call each method, at the same steps.

    Attributes:
        finalizer: releases what the run holds, if anything yet.
        is_finished: the folder's run is finished, and not continued.
        pause_after: epochs after which the run stops with a checkpoint; None for all.
    """

    folder: RunFolder
    state: ResumableState
    loop: TransientState
    parts: RunParts
    ranks: Ranks
    recorder: Recorder
    nan_guard: NanGuard
    memory: MemoryGuard
    training_step: TrainingStep
    options: RunOptions
    finalizer: "weakref.finalize[[int], object] | None" = None
    is_finished: bool = False
    pause_after: int | None = field(default_factory=pause_after)

    @property
    def is_over(self) -> bool:
        return self.state.stopped or self.state.step >= self.parts.plan.total_steps

    @property
    def holds(self) -> bool:
        return self.finalizer is not None and self.finalizer.alive

    def resume(self) -> Result | None:
        """Continue from the newest whole checkpoint, if any; returns the result of a finished run."""
        self.state.extend = self.recorder.extended  # a checkpoint, if there is one, says it exactly
        restored = self.recorder.newest()
        say = self.parts.progress.say
        if restored is not None:
            self.load(restored)
            if self.state.position and self.parts.loader.are_shares:
                check_shares(restored.meta["exactness"].get("processes", 1), self.ranks.world)
        if not self._begin_extension():
            result = self.ranks.first(lambda: finished(self.folder, say=say))
            if result is not None:
                self.is_finished = True
                self.recorder.note_use()
                self.recorder.complete(result)
                return result
        if restored is not None:
            self.recorder.say_resumed(restored)
            self.memory.say_resumed()
        self.recorder.open_metrics(restored)
        return None

    def load(self, restored: Restored) -> None:
        state = self.state
        state.load(restored)
        if not self.ranks.is_first:
            state.leave_to_first()
        next_event = self.parts.plan.next_event(state.step)
        self.loop.restart(saved_step=state.step, next_event=next_event)
        state.window.restart_clock()
        self.recorder.saver.last_good = restored.name

    def _begin_extension(self) -> bool:
        """Let a finished run continue if `extend` asks for more steps than its checkpoint was trained for.

        Called after each load, because the checkpoint may be from before the extension. InputError: the run
        is not finished, or is to be shorter than it was trained for.
        """
        state = self.state
        plan = self.parts.plan
        say = self.parts.progress.say
        before, now = plan.extension(state.extend), plan.extension(self.options.extend)
        steps = plan.total_steps - now + before
        self.ranks.first(lambda: self._check_extension(steps, now - before))
        state.extend = self.options.extend
        if now == before:
            if plan.extension(self.recorder.extended) > now:
                say(
                    f"the run is not extended by {self.recorder.extended}: none of that was trained"
                )
            self.recorder.extended = self.options.extend
            return False
        early = f", which ended at step {state.step}," if state.step < steps else ""
        state.stopped = False
        state.best.improved_at = state.step  # patience starts over
        # Before config.toml is updated: a start that is killed in between then finds a run at its former end,
        # not one that looks finished at its new length.
        self.ranks.first(lambda: self.folder.result.unlink(missing_ok=True))
        left = format((plan.total_steps - state.step) / plan.steps_per_epoch, ".3g")
        say(
            f"the run of {steps} steps{early} is extended by {state.extend}: from step {state.step} to "
            f"{plan.total_steps}, {left} {'epoch' if left == '1' else 'epochs'}; the learning rate is that "
            f"of a run of {plan.total_steps} steps, so now {self.parts.schedule(state.step):.4g} of its peak"
        )
        return True

    def _check_extension(self, steps: int, more: int) -> None:
        """Refuse to extend a run of `steps` before its end, or to make it shorter than it was trained for."""
        state = self.state
        is_over = state.stopped or state.step >= steps
        if more < 0:
            what = "" if is_over else f", of which it has trained {state.step} of {steps} steps"
            now = f"extend = {state.extend!r}" + (", or more" if is_over else "")
            raise InputError(
                f"the run has been extended by {state.extend}{what}: give {now}; or "
                f"{self.folder.advice.start_again}"
            )
        if more and not is_over:
            raise InputError(
                f"extend = {self.options.extend!r} is for a finished run, and this one stands at step "
                f"{state.step} of {steps}: let it finish first"
            )

    def begin_epochs(self) -> None:
        state = self.state
        plan = self.parts.plan
        self.loop.next_event = plan.next_event(state.step)
        if state.step == 0 and state.position == 0:
            self.save()
            self.loop.next_event = 1  # where the run waits for this checkpoint
        self.parts.progress.start(state, plan, world=self.ranks.world)
        state.window.restart_clock()

    def start_epoch(self) -> int:
        """Start or continue an epoch; returns its number."""
        self.loop.place = Place.EPOCH
        if not self.state.position:
            self.recorder.note_length(self.state.epoch)
        return self.recorder.start_epoch()

    def begin_batches(self) -> None:
        self.loop.place = Place.BATCHES
        if self.state.position < self.state.data_length:
            self.recorder.note_length(None)  # a resume repeats no evaluation in mid-epoch

    def has_evaluated_before(self) -> bool:
        """Whether this place of the loop was passed before a stop, so that its evaluation has its line.

        A resume in mid-epoch repeats what stands before `run.batches()`.
        """
        if not self._takes_lines:
            return False
        is_repeated = {
            Place.OUTSIDE: self.loop.saved_step >= 0,
            Place.EPOCH: self.state.position > 0,
            Place.BATCHES: False,
        }[self.loop.place]
        if is_repeated:
            self.parts.progress.say_once(_REPEATED)
        return is_repeated

    @property
    def _takes_lines(self) -> bool:
        return self.holds and not self.is_finished

    def _roll_back(self, steps_before: int) -> None:
        """Return from a bad step to the newest checkpoint, or raise NotFinite."""
        self.loop.stream = None
        why = self.nan_guard.roll_back(steps_before, self.recorder, self.load)
        self._begin_extension()
        if self.training_step.sync is not None:
            self.training_step.sync.roll_back()
        self.parts.progress.say(why)

    def _agree_to_stop(self) -> None:
        """Exchange whether any rank has called `run.stop`."""
        self.state.stopped |= any(self.ranks.gather(self.loop.stop_requested))

    def end_batch(self) -> None:
        """After the loop's body for a batch: if that ended a step, do what is due."""
        micro, self.loop.done = self.loop.done, None
        if micro is None:
            return
        if self.loop.stop_requested and self.ranks.world == 1:
            self._agree_to_stop()
        if self.state.step >= self.loop.next_event or micro.ends_epoch:
            self._at_event(micro)
        self.preempt_if_signalled()

    def _at_event(self, micro: MicroBatch) -> None:
        """Write the line or the checkpoint that is due after this step."""
        step = self.state.step
        plan = self.parts.plan
        if step == 1:
            with self.state.window.paused():
                self.recorder.wait_for_all()  # a folder that cannot hold a checkpoint fails now
        if plan.has_line(step, micro):
            self.flush()
            if self.state.step != step:
                return  # rolled back
        # At the end of an epoch the checkpoint waits for the evaluation: it may be the best.
        due = step % plan.save_every == 0 or self.state.best.step == step
        if due and not micro.ends_epoch and not self.is_over:
            self.save()  # may roll back, too
        self.loop.next_event = plan.next_event(self.state.step)

    def flush(self) -> None:
        """Write the line of the last steps; roll back or stop if one was not finite."""
        window = self.state.window
        self.parts.bad.report()
        window.settle(self.ranks, step=self.state.step)
        if window.empty:
            return
        row, halted_steps = self.state.read_window()
        if halted_steps:
            self._roll_back(self.state.step - halted_steps)
            return
        self.recorder.write(row)
        self.parts.progress.note(row)

    def record(self, figures: dict[str, float]) -> None:
        """Write an evaluation's line; the best so far gets a checkpoint after the loop's body."""
        state, loop = self.state, self.loop
        state.metrics = figures
        if not self._takes_lines:
            self.parts.progress.say_once(_AFTER_THE_END)
            self.recorder.show_evaluation(figures)
            return
        if not loop.is_partial:
            state.best.see(figures, step=state.step)
        elif state.best.metric in figures:
            self.parts.progress.say_once(_BETWEEN_PARTS)
        self.parts.schedule.note(figures)
        self.recorder.write_evaluation(figures)
        if loop.is_partial or state.best.step != state.step:
            return
        if loop.done is not None:
            loop.next_event = state.step
        elif state.position < state.data_length and not self.is_over:
            self.save()  # a step comes next

    def note_predictions(self, describe: Callable[[int], str]) -> None:
        """Keep for the report what an evaluation has logged as `predictions`, if anything."""
        if self._takes_lines and not self.loop.is_partial:
            self.recorder.note_predictions(describe)

    def end_epoch(self) -> None:
        state = self.state
        say = self.parts.progress.say
        step = self.state.step
        self.end_batch()  # if the body left its batches with `break`
        if state.step < step:
            return  # rolled back: the rest of that epoch comes next
        self._agree_to_stop()
        if state.position < state.data_length and not self.is_over:
            raise RuntimeError("the loop left `for ... in run.batches()` before its end")
        self.parts.schedule.end_epoch(say=say)
        state.best.end_epoch(say=say, training=state.window.logged, is_last=self.is_over)
        state.epoch, state.position = state.epoch + 1, 0
        self.nan_guard.write_rollbacks(self.recorder)
        due = state.step % self.parts.plan.save_every == 0 or self.is_over
        if due or state.best.step == state.step:
            self.save()
        self.preempt_if_signalled()

    @property
    def _pause_here(self) -> int | None:
        """The epochs of PAUSE_AFTER, if they are done and others are left."""
        epochs = self.pause_after
        is_between = self.state.position == 0 and not self.is_over
        return epochs if epochs is not None and is_between and self.state.epoch >= epochs else None

    def preempt_if_signalled(self) -> None:
        """Stop with a checkpoint if a signal has arrived; all ranks stop at the same call."""
        signal = self.ranks.stop_signal()
        if self.options.replay_from is not None:
            return
        pause = None if signal is not None else self._pause_here
        if pause is not None:
            signal = f"{PAUSE_AFTER}={pause}"
        if signal is None:
            return
        # Workers first: they were signalled too, and wait only for a while.
        self.loop.stream = None
        if self.training_step.check is not None:
            self.training_step.check.say_summary(is_end=False)
        another = self.loop.saved_step != self.state.step
        if pause is not None or self.recorder.has_time_to_save(another=another):
            is_due = self.state.step % self.parts.plan.save_every == 0 or self.is_over
            self.save(wait=True, is_planned=is_due)
            self.parts.progress.say_saved(signal, step=self.state.step, folder=self.folder.path)
        if pause is not None:
            self.ranks.first(lambda: write_pause(self.folder.path, pause))
        ending = FLAG.answer()
        self.close()
        raise ending

    def save(self, *, wait: bool = False, is_planned: bool = True) -> None:
        """Copy the state and start to write a checkpoint; with `wait`, until it is on the disk.

        `is_planned`: a run that nobody stops makes it, too.
        """
        self.ranks.beat(SAVING)
        if bool(self.parts.amp.halted):
            self.flush()
        if is_planned:
            self.state.planned = self.state.step
        if self.options.replay_from is None and self.loop.saved_step != self.state.step:
            self.parts.bad.report()
            self.state.settle(self.ranks)
            self._agree_to_stop()
            self.loop.saved_step = self.state.step
            self.recorder.save()
        if wait:
            self.recorder.wait_for_all()

    def close(self) -> None:
        """Wait for the checkpoint being written, and release what the run holds."""
        self.loop.stream = None
        self.parts.progress.close()
        try:
            self.recorder.end_saves()
        finally:
            if self.finalizer is not None:
                self.finalizer()


def closed_when_dropped(
    owner: object, resources: contextlib.ExitStack
) -> "weakref.finalize[[int], object]":
    """Release resources when the finalizer is called or the owner is dropped.

    A forked process must not release its copies.
    """

    def close(process: int) -> None:
        if os.getpid() == process:
            resources.close()

    finalizer = weakref.finalize(owner, close, os.getpid())
    finalizer.atexit = False
    return finalizer
