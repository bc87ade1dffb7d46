"""The life of a run: where it continues, what happens between two steps, how it goes back, stops and ends."""

import contextlib
import os
import weakref

from flambeau.data.loading.micro_batch import MicroBatch
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
from flambeau.run.loop.resumable_state import ResumableState
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.training_step import TrainingStep
from flambeau.run.loop.transient_state import TransientState


class Lifecycle:
    """All of it happens on all ranks, at the same steps.

    Args:
        replays: nothing is written.

    Attributes:
        finalizer: gives back what the run holds; None until it holds anything.
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
        replays: bool,
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
        self._replays = replays
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
        """Go on from the newest checkpoint that is whole, if there is any; the result of a finished run."""
        found = self._recorder.newest()
        say = self._parts.progress.say
        if found is not None:
            self.go_to(found)
            if self._state.position and self._parts.loader.are_shares:
                check_shares(found.meta["exactness"].get("processes", 1), self._ranks.world)
        if not self._recorder.begin_extension(self._parts.schedule):
            result = self._ranks.first(lambda: finished(self._folder, say=say))
            if result is not None:
                return result
        if found is not None:
            self._recorder.say_where(found)
            self._memory.say_where()
        self._recorder.open_metrics(found)
        return None

    def go_to(self, found: Restored) -> None:
        """Stand where a checkpoint was taken."""
        state = self._state
        state.load(found)
        if not self._ranks.is_first:
            state.leave_to_first()
        next_event = self._parts.plan.next_event(state.step)
        self._loop.restart(saved_step=state.step, next_event=next_event)
        state.window.restart_clock()
        self._recorder.saver.last_good = found.name

    def _roll_back(self, steps_before: int) -> None:
        """Go back from a bad step to the newest checkpoint, or stop.

        Raises:
            NotFinite: if the run stops.
        """
        self._loop.stream = None
        why = self._nan_guard.roll_back(steps_before, self._recorder, self.go_to)
        self._recorder.begin_extension(self._parts.schedule)
        if self._step.sync is not None:
            self._step.sync.roll_back()
        self._parts.progress.say(why)

    def _agree_to_stop(self) -> None:
        """Learn whether any rank has called `run.stop`."""
        self._state.stopped |= any(self._ranks.gather(self._loop.asks_to_stop))

    def end_batch(self) -> None:
        """Between two bodies of the loop: whatever they have done to the state of the run is complete."""
        micro, self._loop.done = self._loop.done, None
        if micro is None:
            return
        if self._loop.asks_to_stop and self._ranks.world == 1:
            self._agree_to_stop()
        if self._state.step >= self._loop.next_event or micro.ends_epoch:
            self._at_event(micro)
        self.preempt_if_asked()

    def _at_event(self, micro: MicroBatch) -> None:
        """What is due between two steps now and then: a line, a checkpoint, the end."""
        step = self._state.step
        plan = self._parts.plan
        if plan.has_line(step, micro):
            self.flush()
            if self._state.step != step:
                return  # rolled back
        # At the end of an epoch the checkpoint waits for the evaluation: it may be the best.
        due = step % plan.save_every == 0 or self._state.best.step == step
        if due and not micro.ends_epoch and not self.is_over:
            self.save()  # which may go back, too
        self._loop.next_event = plan.next_event(self._state.step)

    def flush(self) -> None:
        """Write the line of the steps since the last one; stop or go back if one of them went bad."""
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
        """The loop's body is done with an epoch, or with what of it belongs to the run."""
        state = self._state
        say = self._parts.progress.say
        step = self._state.step
        self.end_batch()  # of a body that left with `break`
        if state.step < step:
            return  # rolled back, and the rest of that epoch comes next
        self._agree_to_stop()
        if state.position < state.data_length and not self.is_over:
            raise RuntimeError("the loop left `for ... in run.batches()` before its end")
        self._parts.schedule.end_epoch(say=say)
        state.best.end_epoch(say=say, training=state.window.logged, is_last=self.is_over)
        state.epoch, state.position = state.epoch + 1, 0
        due = state.step % self._parts.plan.save_every == 0 or self.is_over
        if due or state.best.step == state.step:
            self.save()
        self.preempt_if_asked()

    def preempt_if_asked(self) -> None:
        """A point where the run may stop; all ranks pass the same ones and stop at the same."""
        signal = self._ranks.stop_signal()
        if signal is None or self._replays:
            return
        # Workers first: they have been signalled, too, and stay only for a while.
        self._loop.stream = None
        if self._recorder.has_time_to_save(another=self._loop.saved_step != self._state.step):
            self.save(wait=True)
            self._parts.progress.say_saved(signal, step=self._state.step, folder=self._folder.path)
        ending = FLAG.answer()
        self.close()
        raise ending

    def save(self, *, wait: bool = False) -> None:
        """Copy the run and start writing it: training waits for the copy, not for the disk.

        Args:
            wait: for the disk, too.
        """
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
        """Wait for the checkpoint under way, and give back what the run holds."""
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
    """Give resources back when this is called, or when their owner is dropped; never in a forked process.

    Args:
        owner: of them.
        resources: their copies in a forked process belong to nobody.
    """

    def close(process: int) -> None:
        if os.getpid() == process:
            resources.close()

    finalizer = weakref.finalize(owner, close, os.getpid())
    finalizer.atexit = False
    return finalizer
