"""`Run` makes a training loop exact, resumable and fast, and leaves the loop to its owner.

`Run` 让训练循环精确、可恢复且快速，而循环仍由使用者自己编写。

    run = Run("runs/mine", model, optimizer, train_data, duration="5ep", batch_size=64)
    for epoch in run.epochs():
        for images, targets in run.batches():
            run.step(cross_entropy(model(images), targets))
        for images, targets in run.evaluate(test_data):
            run.log(val_accuracy=model(images).argmax(1) == targets)

Kill it anywhere and start it again: it goes on to the same bits.
Start it by torchrun: all processes together do what one would do.
"""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.parallel.preemption import FLAG
from flambeau.parallel.ranks import Ranks, join_ranks
from flambeau.parallel.watchdog.heartbeat import SAVING
from flambeau.recipes.training.metrics import MeanOnDevice
from flambeau.train.build.device import generators_of
from flambeau.train.checkpoints.checkpointer import restore
from flambeau.train.checkpoints.published_weights import Result
from flambeau.train.checkpoints.run_folder import RunFolder
from flambeau.train.loop.batch_reader import BatchDraws
from flambeau.train.loop.evaluation_mode import BETWEEN_PARTS, beside_training, evaluated_batches
from flambeau.train.loop.memory_guard import MemoryGuard
from flambeau.train.loop.nan_guard import NanGuard
from flambeau.train.loop.rank_checks import check_ranks, gathered_means
from flambeau.train.loop.recorder import Recorder
from flambeau.train.loop.resources import closed_when_dropped
from flambeau.train.loop.resumption import Resumption
from flambeau.train.loop.run_parts import make_parts, make_state, share_model
from flambeau.train.loop.step_metrics import add_value
from flambeau.train.loop.training_step import TrainingStep
from flambeau.train.loop.transient_state import TransientState
from flambeau.train.settings.run_options import OnBad, RunKeywords, RunOptions


class Run:
    """One training run in one folder.

    Args:
        folder: of the run; made if missing, continued if it holds this run.
        model: on its device already.
        optimizer: over the model's parameters; best with `fused=True` where torch offers it.
        data: a map-style Dataset, or a loader with a length that makes ready batches.
        options: by name, those of `RunOptions` (train/settings/run_options.py); `duration` is needed.

    Raises:
        InputError: the folder holds something else, or no checkpoint in it is whole.
        TypeError: an argument that there is not.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        data: Dataset[Any] | Iterable[Any],
        **options: Unpack[RunKeywords],
    ) -> None:
        self._options = told = RunOptions.of(options)
        self.folder = RunFolder(Path(folder))
        self.model, self.optimizer = model, optimizer
        self._replays = told.replay_from is not None
        self._ranks = Ranks(0, 1, None) if self._replays else join_ranks()
        self._parts = parts = make_parts(
            model, optimizer, data, told, self._ranks, folder=self.folder.path, given=options
        )
        self.plan, self.device, self.progress = parts.plan, parts.amp.device, parts.progress
        self.result: Result | None = None
        """What the finished run has published; None while it is not finished."""
        # What other processes, files and signals are asked for comes last, and is given back on an error.
        with contextlib.ExitStack() as resources:
            if not self._replays:
                self._ranks.begin_watch(told.stall_timeout)
                resources.callback(self._ranks.end_watch)
            check_ranks(self._ranks, parts.identity, parts.model, parts.loader.length)
            saved = parts.model if parts.shards is None else parts.shards[0].pieces
            self.state = make_state(parts, saved, optimizer, told)
            self._loop = TransientState(torch.zeros((), device=self.device))
            self._draws = BatchDraws(told.seed, generators_of(self.device))
            written = None if self._replays else self.folder.path
            self._nan_guard = NanGuard(
                written, self.state, parts, draws=self._draws, ranks=self._ranks, options=told
            )
            self._memory = MemoryGuard(written, self.state, self._loop, parts, ranks=self._ranks)
            self._step = TrainingStep(self.state, self._loop, parts.schedule, self._ranks.world)
            self._recorder = Recorder(
                self.folder, self.state, ranks=self._ranks, options=told, plan=self.plan,
                compiled=model is not parts.model, progress=self.progress,
                layout=None if parts.shards is None else parts.shards[1],
            )  # fmt: skip
            self._resumption = Resumption(
                self.folder, self.state, self._loop, parts, self._recorder, self._ranks, self._memory
            )  # fmt: skip
            if told.replay_from is not None:
                self.state.load(restore(Path(told.replay_from)))
            else:
                resources.callback(self.folder.release)
                self._recorder.claim(parts.model, parts.identity, told.attachments or {})
                resources.callback(FLAG.restore, self.folder)
                FLAG.install(self.folder)
                resources.callback(self._recorder.close)
                self.result = self._resumption.resume()
                self._step.sync = share_model(parts, told, self._ranks, say=self.progress.say)
            self._finalizer = closed_when_dropped(self, resources.pop_all())

    def epochs(self) -> Iterator[int]:
        """Epochs from where the run stands to its end; then the weights are published.

        Yields:
            The number of the epoch, from 0.

        Raises:
            Preempted: SIGTERM, SIGUSR1 or SIGINT came; a checkpoint is on the disk, the exit code is 75.
            NotFinite: a loss or gradient was NaN or infinite.
            SaveFailed: a checkpoint could not be written.
        """
        state = self.state
        try:
            if self.result is not None:
                return
            if not self._finalizer.alive:
                raise RuntimeError("this run is closed: make it again, with Run(...), to continue")
            if state.step == 0 and state.position == 0:
                self._save(wait=True)  # the trial: better to learn now that the folder takes none
            self.progress.start(state, self.plan, world=self._ranks.world)
            self._loop.next_event = self.plan.next_event(state.step)
            self.state.window.restart_clock()
            # A position in an epoch means that its evaluation may still be owed.
            while not self._is_over or state.position:
                self._preempt_if_asked()
                yield self._recorder.start_epoch()
                self._end_epoch()
            if state.stopped:
                self.progress.say(f"the run ends at step {state.step} of {self.plan.total_steps}")
            if not self._replays:
                self.result = self._recorder.publish()
        finally:
            self.close()

    def stop(self) -> None:
        """End the run here, as a finished one, which publishes its weights and is not trained again.

        The step under way is the last, and the rest of the epoch's loop body is done. Of several processes
        any may call it: the run then ends at the next checkpoint or end of an epoch, where they agree.
        """
        self._loop.asks_to_stop = True

    @property
    def epochs_since_best(self) -> int:
        """Whole epochs since `best` was better than ever before, or the run began, or its extension."""
        return (self.state.step - (self.state.best.improved_at or 0)) // self.plan.steps_per_epoch

    @property
    def _is_over(self) -> bool:
        return self.state.stopped or self.state.step >= self.plan.total_steps

    def _agree_to_stop(self) -> None:
        self.state.stopped |= any(self._ranks.gather(self._loop.asks_to_stop))

    def batches(self) -> Iterator[Any]:
        """The rest of this epoch, batch after batch, on the model's device.

        Before each one torch's generators are seeded by (seed, epoch, position), so a resume has the dropout
        of a run that was never stopped. Between two steps it writes what is due, and raises as `epochs` says.
        """
        state, loop, window = self.state, self._loop, self.state.window
        sync, watch = self._step.sync, self._ranks.watch
        self._end_batch()  # of a body that left an earlier `run.batches()`
        self._step.start_epoch()
        while state.position < state.data_length and not self._is_over:
            start = time.perf_counter()
            if watch is not None:
                watch.beat("waiting for data")
            if loop.stream is None:
                self._recorder.before_fork()
                # In no variable here, which would keep its workers when the run ends in this generator.
                loop.stream = self._recorder.shown(self._parts.stream(state.epoch, state.position))
            micro = next(loop.stream)
            window.wait_s += time.perf_counter() - start
            loop.begin(micro, step=state.step)
            state.micro = MicroBatch(None, *micro[1:])  # without its data
            self._draws.seed(state.epoch, micro)
            if watch is not None:
                watch.beat("in the forward pass")
            if sync is not None:
                sync.before_batch(micro)
            yield micro.data
            if loop.is_short:
                self._memory.begin_again(lambda: self._save(wait=True), close=self.close)
                continue
            if loop.micro is not None:
                raise RuntimeError("run.step(loss) was not called for the last batch")
            self._end_batch()
        self._recorder.end_batches()

    def halving(self) -> contextlib.AbstractContextManager[None]:
        """Around a batch's forward pass, `step` and `log`: out of memory there halves the micro-batch.

        The step begins again with the same samples, in twice as many forward passes; nothing that was logged
        inside counts twice. A batch of an evaluation is cut in two. Of several processes all leave with exit
        code 71 instead: started again, they go on from the newest checkpoint in smaller micro-batches.
        """
        return self._memory.around()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of `precision` for the forward pass and the loss."""
        return self._parts.amp.autocast()

    def step(self, loss: Tensor) -> None:
        """Backward; at the end of a global batch also clip, step, average and count. Waits for nothing.

        Args:
            loss: 0-d, the mean over the samples of the last batch.

        Raises:
            ValueError: the loss is not 0-d.
        """
        micro = self._loop.micro
        if micro is None:
            raise RuntimeError("run.step(loss) belongs in `for ... in run.batches()`, once a batch")
        self._loop.micro = None
        self._ranks.beat("in backward and the optimizer's step")
        self._step(loss, micro)
        if micro.ends_batch:
            self._loop.done = micro
            self.progress.step()

    def log(self, **values: Any) -> None:
        """Count values of the last batch; their mean over samples is the figure in metrics.jsonl.

        Args:
            values: by name; a mean over the batch (0-d or a number), or values of each sample (N, ...). By
                the name of one of `metrics`: what its update takes, such as (logits, targets).
        """
        loop, metrics = self._loop, self._parts.metrics
        means = loop.evaluated
        if means is None:
            means = self.state.window.means_of(*loop.part_of, is_late=loop.micro is None)
        for name, value in values.items():
            if name in metrics:
                loop.count(functools.partial(metrics.update, name, value, loop.num_samples))
            else:
                add_value(means, name, value, loop.num_samples, self.device, count=loop.count)

    def evaluate(
        self, data: Dataset[Any] | Iterable[Any], *, on_bad: OnBad | None = None
    ) -> Iterator[Any]:
        """All batches of a data set, each sample once, with the model in evaluation and no gradients.

        The averaged weights stand in the model meanwhile, if there are any. What is logged meanwhile
        becomes one line of metrics.jsonl. Randomness in here neither depends on training nor changes it.
        """
        ema, loop, means = self.state.ema, self._loop, dict[int, dict[str, MeanOnDevice]]()
        if loop.is_short:
            return  # the batch comes again, and then this
        if self.plan.has_line(self.state.step, loop.done) and not self.state.is_bad:
            self._flush()  # before the line of the evaluation
        with self.state.window.paused():
            with beside_training(loop, self._parts.metrics):
                loop.evaluated = means.setdefault(0, {})
                self._draws.seed_evaluation(self.state.epoch)
                self._step.share_statistics()
                loader = self._parts.reader.loader(data, evaluates=True, on_bad=on_bad)
                if loader.forks:
                    self._recorder.before_fork()
                yield from evaluated_batches(
                    loader, self._parts, loop,
                    ranks=self._ranks, model=self.model, ema=ema, guard=self._memory, means=means,
                )  # fmt: skip
            figures = self._parts.metrics.figures(gathered_means(means, self._ranks))
            self._parts.bad.report()
            if not loop.is_partial:  # else at the end of the step: gradients are in no checkpoint
                self._preempt_if_asked()
            if figures:
                self._record(figures)

    def close(self) -> None:
        """Wait for the checkpoint under way, stop the workers, release the folder. `epochs` does it."""
        self._loop.stream = None
        self.progress.close()
        try:
            self._recorder.end_saves()
        finally:
            self._finalizer()

    def _end_batch(self) -> None:
        """Between two bodies of the loop: whatever they have done to the state of the run is complete."""
        micro, self._loop.done = self._loop.done, None
        if micro is None:
            return
        if self._loop.asks_to_stop and self._ranks.world == 1:
            self._agree_to_stop()
        if self.state.step >= self._loop.next_event or micro.ends_epoch:
            self._at_event(micro)
        self._preempt_if_asked()

    def _at_event(self, micro: MicroBatch) -> None:
        """What is due between two steps now and then: a line, a checkpoint, the end."""
        step = self.state.step
        if self.plan.has_line(step, micro):
            self._flush()
            if self.state.step != step:
                return  # rolled back
        # At the end of an epoch the checkpoint waits for the evaluation: it may be the best.
        due = step % self.plan.save_every == 0 or self.state.best.step == step
        if due and not micro.ends_epoch and not self._is_over:
            self._save()  # which may go back, too
        self._loop.next_event = self.plan.next_event(self.state.step)

    def _flush(self) -> None:
        """Write the line of the steps since the last one; stop or go back if one of them went bad."""
        window = self.state.window
        self._parts.bad.report()
        window.settle(self._ranks, step=self.state.step)
        if window.empty:
            return
        row, halted_steps = self.state.read_window(self._loop.halted_steps)
        if halted_steps:
            self._resumption.roll_back(self.state.step - halted_steps, self._nan_guard, self._step)
            return
        self._recorder.write(row)
        self.progress.note(row)

    def _record(self, figures: dict[str, float]) -> None:
        """Write the line of an evaluation; the best so far gets a checkpoint when the loop's body is done."""
        self.state.metrics = figures
        if not self._loop.is_partial:
            self.state.best.see(figures, step=self.state.step)
        elif self._options.best in figures:
            self.progress.say_once(BETWEEN_PARTS)
        self._parts.schedule.note(figures)
        self._recorder.write_evaluation(figures)
        if self._loop.is_partial or self.state.best.step != self.state.step:
            return
        if self._loop.done is not None:
            self._loop.next_event = self.state.step
        elif self.state.position < self.state.data_length and not self._is_over:
            self._save()  # a step comes next

    def _end_epoch(self) -> None:
        """The loop's body is done with an epoch, or with what of it belongs to the run."""
        state, say, step = self.state, self.progress.say, self.state.step
        self._end_batch()  # of a body that left with `break`
        if state.step < step:
            return  # rolled back, and the rest of that epoch comes next
        self._agree_to_stop()
        if state.position < state.data_length and not self._is_over:
            raise RuntimeError("the loop left `for ... in run.batches()` before its end")
        self._parts.schedule.end_epoch(say=say)
        state.best.end_epoch(say=say, training=state.window.logged, is_last=self._is_over)
        state.epoch, state.position = state.epoch + 1, 0
        due = state.step % self.plan.save_every == 0 or self._is_over
        if due or state.best.step == state.step:
            self._save()
        self._preempt_if_asked()

    def _preempt_if_asked(self) -> None:
        """A point where the run may stop; all ranks pass the same ones and stop at the same."""
        signal = self._ranks.stop_signal()
        if signal is None or self._replays:
            return
        # Workers first: they have been signalled, too, and stay only for a while.
        self._loop.stream = None
        if self._recorder.has_time_to_save(another=self._loop.saved_step != self.state.step):
            self._save(wait=True)
            self.progress.say_saved(signal, step=self.state.step, folder=self.folder.path)
        ending = FLAG.answer()
        self.close()
        raise ending

    def _save(self, *, wait: bool = False) -> None:
        """Copy the run and start writing it: training waits for the copy, not for the disk."""
        self._ranks.beat(SAVING)
        if bool(self._parts.amp.halted):
            self._flush()
        if not self._replays and self._loop.saved_step != self.state.step:
            self._parts.bad.report()
            self.state.settle(self._ranks)
            self._agree_to_stop()
            self._loop.saved_step = self.state.step
            self._recorder.save()
        if wait:
            self._recorder.wait_for_all()
