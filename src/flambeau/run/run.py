"""`Run` makes a training loop exact, resumable and fast, and leaves the loop to its owner.

`Run` 让训练循环精确、可恢复且快速，而循环仍由使用者自己编写。

    run = Run("runs/mine", model, optimizer, train_data, duration="5ep", batch_size=64)
    for epoch in run.epochs():
        for images, targets in run.batches():
            run.step(cross_entropy(model(images), targets))
        for images, targets in run.evaluate(test_data):
            run.log(val_accuracy=model(images).argmax(1) == targets)

Kill it anywhere and start it again: it continues to the same bits.
Start it with torchrun: all processes together do what one would do.
"""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from flambeau.data.loading.batch_plan import Order
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.parallel.preemption import FLAG
from flambeau.parallel.ranks import Ranks, join_ranks
from flambeau.recipes.training.metrics import MeanOnDevice
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.run.folder.checkpointer import restore
from flambeau.run.folder.published_weights import Result
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.store_run import folder_and_mirror
from flambeau.run.loop.batch_reader import BatchDraws
from flambeau.run.loop.evaluation_mode import evaluation_mode, generators_restored
from flambeau.run.loop.lifecycle import Lifecycle, closed_when_dropped
from flambeau.run.loop.logged_predictions import PREDICTIONS, namer
from flambeau.run.loop.memory_guard import MemoryGuard
from flambeau.run.loop.model_builder import check_not_building
from flambeau.run.loop.nan_guard import NanGuard
from flambeau.run.loop.rank_checks import check_ranks, gathered_means
from flambeau.run.loop.recorder import Recorder
from flambeau.run.loop.run_parts import make_parts, make_state, share_model
from flambeau.run.loop.state import TransientState
from flambeau.run.loop.step_check import step_check
from flambeau.run.loop.step_metrics import add_value, cloned
from flambeau.run.loop.training_step import TrainingStep
from flambeau.run.loop.training_thread import (
    check_made_here,
    check_no_other_trains,
    training_here,
)
from flambeau.run.options.advice import Advice
from flambeau.run.options.named_schedule import NamedSchedule
from flambeau.run.options.option import declares
from flambeau.run.options.run_options import Explain, OnBad, RunOptions
from flambeau.run.options.shared_options import SharedOptions
from flambeau.run.options.tracker_names import Track
from flambeau.sandbox.inside_trial import folder_for_run

# One step, from a batch of `batches()` to the next, is in six modules: this one; loop/batch_reader.py seeds
# the generators and moves data to the device; loop/training_step.py does backward and the optimizer's step;
# loop/step_metrics.py counts the loss; loop/lifecycle.py writes what is due between two steps; and
# loop/state.py says which of them writes each field.


class Run:
    """One training run in one folder.

    `help(Run.__init__)` describes the arguments.
    """

    def _set_up(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        data: Dataset[Any] | Iterable[Any],
        **given: Any,
    ) -> None:
        place, given["mirror"] = folder_and_mirror(folder, given.get("mirror"))
        options = RunOptions.of(given)
        check_not_building()
        check_no_other_trains()
        self._maker = threading.current_thread()
        self.folder = RunFolder(folder_for_run(place), advice=options.advice or Advice())
        self.model, self.optimizer = model, optimizer
        self._replays = options.replay_from is not None
        self._has_said_clipping = False
        self._ranks = Ranks(0, 1, None) if self._replays else join_ranks()
        self._parts = parts = make_parts(
            model, optimizer, data, options, self._ranks, folder=self.folder.path, given=given
        )
        self.plan = parts.plan
        self.device = parts.amp.device
        self.progress = parts.progress
        self.result: Result | None = None
        """What the finished run has published; None before."""
        # What touches other processes, files and signals comes last, and is undone on an error.
        with contextlib.ExitStack() as resources:
            if not self._replays:
                self._ranks.begin_watch(options.stall_timeout)
                resources.callback(self._ranks.end_watch)
            check_ranks(self._ranks, parts.identity.values, parts.model, parts.loader.length)
            saved = parts.model if parts.shards is None else parts.shards[0].pieces
            self.state = make_state(parts, saved, optimizer, options)
            self._loop = TransientState()
            self._draws = BatchDraws(
                options.seed, self.device, also_python=options.parts is not None
            )
            self._in_parts = options.parts is not None
            written = None if self._replays else self.folder.path
            self._memory = MemoryGuard(
                written, self.state, self._loop, parts, ranks=self._ranks, advice=self.folder.advice
            )
            self._step = TrainingStep(self.state, self._loop, parts.schedule, parts.progress)
            self.nan_guard = NanGuard(
                written, self.state, parts, self._draws, self._ranks, self._step, options
            )
            self._recorder = Recorder(
                self.folder,
                self.state,
                parts,
                self._ranks,
                options,
                compiled=model is not parts.model,
            )
            self._lifecycle = Lifecycle(
                self.folder,
                self.state,
                self._loop,
                parts,
                self._ranks,
                self._recorder,
                self.nan_guard,
                self._memory,
                self._step,
                options,
            )
            self._begin(options, resources)

    def _begin(self, options: RunOptions, resources: contextlib.ExitStack) -> None:
        """Claim the folder, catch signals, continue from the newest checkpoint, and share the model."""
        is_compiled = self.model is not self._parts.model
        self._step.check = step_check(
            options, self.state, self._loop, self._parts, self._ranks, compiled=is_compiled
        )
        if options.replay_from is not None:
            self.state.load(restore(Path(options.replay_from)))
        else:
            resources.callback(self.folder.release)
            self._recorder.claim()
            resources.callback(FLAG.restore, self.folder)
            if not FLAG.install(self.folder):
                self.progress.say(
                    "this run is not in the main thread, where alone signals arrive: SIGTERM ends it without "
                    "a checkpoint, and it then continues from the last one"
                )
            resources.callback(self._recorder.end_mirror)
            resources.callback(self._recorder.close)
            self.result = self._lifecycle.resume()
        sync = share_model(self._parts, options, self._ranks, compiled=is_compiled)
        self._step.share(sync, self._draws.keep)
        self._lifecycle.finalizer = closed_when_dropped(self, resources.pop_all())

    @declares(_set_up)
    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        data: Dataset[Any] | Iterable[Any],
        *,
        duration: str,
        workers: int = 0,
        sampler: Order | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        on_bad: OnBad | None = None,
        retry_workers: int = 0,
        ema: float = 0.0,
        batch_size: int = 64,
        micro_batch: int | None = None,
        extend: str | None = None,
        accumulate: int = 1,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        schedule: str | NamedSchedule | Callable[[int], float] | ReduceOnPlateau = "constant",
        warmup: str = "0st",
        explain: Explain | None = None,
        clip_norm: float = 0.0,
        on_nan: str = "stop",
        seed: int = 0,
        verify_steps: str = "0",
        parts: int | None = None,
        compression: str = "none",
        stall_timeout: float = 60.0,
        metrics: Mapping[str, Any] | None = None,
        best: str = "val_accuracy",
        best_mode: Literal["max", "min"] | None = None,
        config: Mapping[str, Any] | None = None,
        builder: str | None = None,
        preprocess: Mapping[str, Any] | Callable[..., Any] | None = None,
        classes: Sequence[str] | None = None,
        settings: Mapping[str, Any] | SharedOptions | None = None,
        advice: Advice | None = None,
        attachments: Mapping[str, bytes] | None = None,
        state: Mapping[str, Any] | None = None,
        track: Track | None = None,
        bar: bool = True,
        replay_from: str | Path | None = None,
        checkpoint_every: str = "1ep",
        keep: int = 2,
        log_every: int = 50,
        stop_within: str | None = None,
        mirror: str | None = None,
    ) -> None:
        """Make the run in its folder, or continue the one that the folder holds.

        Args:
            folder: of the run; created if it is missing, continued if it holds this run; or its address in a
                store, such as s3://bucket/runs/a.
            model: on its device already; may be compiled.
            optimizer: over the model's parameters; best with `fused=True` where torch offers it.
            data: a map-style `Dataset` (anything with `[i]` and a length), or a loader of ready batches with
                a length.
            duration: length of the run, such as "90ep" (epochs) or "5000st" (steps).
            workers: processes that load a `Dataset`, per training process (from 0 to 1024).
            sampler: one of the samplers or anything with `len()` and `order(epoch)`: the samples of an epoch
                of a `Dataset`; without it, a permutation of all.
            collate: makes a batch of a list of samples of a `Dataset` (None: torch's).
            on_bad: called with the indices of samples that the `Dataset` could not read.
            retry_workers: how often to restart data workers that crash or hang before the run stops with an
                error (from 0 to 1000).
            ema: decay of an exponential moving average of the weights, such as 0.999, which is evaluated and
                published instead of the weights; 0 is off (at least 0 and below 1).
            batch_size: samples per forward pass of a `Dataset`, over all processes (at least 1).
            micro_batch: fewer samples per forward pass than `batch_size`, where memory is short; a step keeps
                `batch_size * accumulate` (None: what has fitted so far; at least 1).
            extend: continue a finished run beyond its duration by this much, such as 10ep; 0ep withdraws an
                extension that has not started.
            accumulate: forward passes whose gradients are accumulated into one optimizer step (at least 1).
            precision: precision of `autocast()`: "fp32", "bf16" or "fp16".
            schedule: learning-rate schedule: a name of `--schedule`, a function from the step (from 0) to a
                factor of the learning rate, or a `ReduceOnPlateau` that watches `best`.
            warmup: length of the linear warm-up of a named schedule, such as "5%", "2ep" or "500st".
            explain: called with the batch of a step that was not finite, the names of its samples and the
                number of steps before it, with weights and generators as they were then; what it returns is
                in the message: see `first_not_finite`.
            clip_norm: clip the norm of all gradients together to this value; 0 is off (at least 0).
            on_nan: what to do when a loss or gradient is NaN or infinite: stop, or roll back to the last
                checkpoint and halve the learning rate (one of stop, rollback).
            seed: seed of sample order, augmentation, initial weights and dropout (at least 0 and below
                2**64).
            verify_steps: compute a share of the steps twice, such as 1/100, of several processes once by
                another one, and compare the bits before the optimizer acts, to find a machine that computes
                wrong; 0 is off.
            parts: compute each step as this many fixed parts, so that the resulting bits do not depend on the
                number of processes (at least 1).
            compression: compression of the gradients that processes exchange (one of none, fp16, bf16,
                powersgd).
            stall_timeout: seconds without progress after which a hanging process or data worker is reported
                and the job ends; 0 is off (at least 0).
            metrics: metrics of evaluations that are not means, by name: objects with `update`, `compute` and
                `reset`, such as those of torchmetrics.
            best: which figure of `run.evaluate` chooses the best checkpoint.
            best_mode: "max" or "min", which values of `best` are better; a name with loss, error, perplexity
                and the like means "min", one with accuracy, f1, auc and the like "max"; any other name needs
                it (None: by the name).
            config: what else identifies the run, in TOML's types; it is a table of its own in `config.toml`,
                and a resume with another value is refused.
            builder: function FILE.py:FUNCTION that makes the model again, for what uses the finished run:
                `flambeau.load`, `predict`, `evaluate`, `features`, `export`; it needs `preprocess` and
                `classes`.
            preprocess: with `builder`: how an image becomes the input of the model: a dict of `image_size`,
                `mean`, `std`, `resize`, `interpolation` and `pixels`, or the transform of torchvision or timm
                that an evaluation uses.
            classes: names of the classes, in the order of the logits: with `builder`, and in the report.
            settings: settings of a command of your own that include the options above: `config.toml` holds
                them instead.
            advice: sentences that messages advise, in the words of a command of your own (None: those of
                Python).
            attachments: files to write into the folder of a new run: bytes by file name.
            state: objects with `state_dict` and `load_state_dict` to save in checkpoints and restore, by
                name.
            track: trackers by name, such as "tensorboard,csv", and functions of a step and its figures; none
                of them stops or delays the run.
            bar: show a progress bar on a terminal, and in a notebook a bar and a chart.
            replay_from: a checkpoint folder to start from, writing nothing anywhere.
            checkpoint_every: interval between checkpoints, such as 1ep or 500st.
            keep: number of latest checkpoints to keep, in addition to the best one (at least 1).
            log_every: optimizer steps per line of metrics.jsonl (at least 1).
            stop_within: seconds between SIGTERM and the kill, such as 30s: the run then writes a checkpoint
                only if that usually takes less time.
            mirror: address such as s3://bucket/runs/a that keeps a copy of the run, from which another
                machine goes on.

        Raises:
            InputError: the folder holds something else, or no checkpoint in it is whole.
            TypeError: an argument that does not exist, or a missing one.
        """

    def epochs(self) -> Iterator[int]:
        """The epochs from the current one to the last; then the weights are published.

        Yields:
            The number of the epoch, from 0.

        Raises:
            Preempted: SIGTERM, SIGUSR1 or SIGINT came; a checkpoint is on the disk, the exit code is 75.
            NotFinite: a loss or gradient was NaN or infinite.
            SaveFailed: a checkpoint could not be written.
            InputError: another thread trains, or has made this run.
        """
        check_made_here(self._maker)
        state, lifecycle = self.state, self._lifecycle
        with training_here(), contextlib.closing(self):
            if self.result is not None:
                return
            if not lifecycle.holds:
                raise RuntimeError("this run is closed: make it again, with Run(...), to continue")
            lifecycle.begin_epochs()
            self._say_left_clipping(sys._getframe(1).f_code)  # of the loop over this generator
            # After a resume at the end of an epoch's batches, its evaluation may still be missing.
            while not lifecycle.is_over or state.position:
                lifecycle.preempt_if_signalled()
                yield lifecycle.start_epoch()
                lifecycle.end_epoch()
            if state.stopped:
                self.progress.say(f"the run ends at step {state.step} of {self.plan.total_steps}")
            if self._step.check is not None:
                self._step.check.say_summary(is_end=True)
            if not self._replays:
                self.result = self._recorder.publish()

    def _say_left_clipping(self, code: CodeType | None) -> None:
        """Say once that a function of the loop clips gradients itself, as it did before it had a Run."""
        names = () if code is None else code.co_names
        found = next((name for name in names if name.startswith("clip_grad")), None)
        if found is None or code is None or self._has_said_clipping:
            return
        self._has_said_clipping = True
        norm = self._parts.amp.max_norm
        instead = "give Run clip_norm=" if norm is None else f"Run clips to clip_norm={norm:g}"
        self.progress.say(
            f"{found} in {code.co_name} ({code.co_filename}) does not clip this run's gradients, which are "
            f"whole only within run.step(loss): remove it; {instead}"
        )

    def stop(self) -> None:
        """End the run after the current step, as finished: its weights are published.

        The loop's body for this epoch still runs to its end. Any process may call it: all end the run at the
        next checkpoint or end of an epoch, where they agree.
        """
        self._loop.stop_requested = True

    @property
    def epochs_since_best(self) -> int:
        """Whole epochs since `best` last improved, or since the run or its extension began."""
        return (self.state.step - (self.state.best.improved_at or 0)) // self.plan.steps_per_epoch

    def batches(self) -> Iterator[Any]:
        """The remaining batches of this epoch, on the model's device.

        Before each one torch's generators are seeded by (seed, epoch, position), so a resume draws the same
        dropout. Due lines and checkpoints are written between steps; it raises what `epochs` raises.
        """
        check_made_here(self._maker)
        state = self.state
        loop = self._loop
        window = self.state.window
        sync = self._step.sync
        watch = self._ranks.watch
        lifecycle = self._lifecycle
        lifecycle.end_batch()  # if the body left an earlier `run.batches()`
        lifecycle.begin_batches()
        self._step.start_epoch()
        while state.position < state.data_length and not lifecycle.is_over:
            start = time.perf_counter()
            if watch is not None:
                watch.beat("waiting for data")
            if loop.stream is None:
                if self._parts.loader.forks:
                    self._recorder.before_fork()
                # Not a local variable: it would keep the workers alive when the run ends in this generator.
                loop.stream = self._recorder.shown(
                    self._parts.reader.to_device(
                        self._parts.loader.stream(epoch=state.epoch, position=state.position),
                        ahead=state.place is None or not state.place.is_stateful,
                    )
                )
            micro = loop.again.popleft() if loop.again else next(loop.stream)
            window.wait_s += time.perf_counter() - start
            if self._step.check is not None:
                micro = self._step.check.begin(micro)
            loop.begin(micro, step=state.step)
            state.micro = MicroBatch(None, *micro[1:])  # without its data
            self._draws.seed(state.epoch, micro)
            if watch is not None:
                watch.beat("in the forward pass")
            if sync is not None:
                sync.before_batch(micro)
            yield micro.data
            if loop.is_out_of_memory:
                self._memory.begin_again(lambda: self._lifecycle.save(wait=True), close=self.close)
                continue
            if loop.micro is not None:
                raise RuntimeError("run.step(loss) was not called for the last batch")
            lifecycle.end_batch()
        self._recorder.note_length(state.epoch)

    def steps(self, loss_of: Callable[[Any], Tensor], *, halves: bool = True) -> Iterator[int]:
        """The loop over `batches` with a function as its body: `step(loss_of(batch))` in `halving`.

        `parts` with SyncBatchNorm needs it, to compute a step's parts together.

        Args:
            loss_of: from a batch to its loss, as `step` takes it; may log values of the batch.
            halves: out of memory halves the micro-batch, as in `halving`.

        Yields:
            The number of steps done.
        """

        def do(batch: Any) -> None:
            self.step(loss_of(batch))

        self._say_left_clipping(getattr(loss_of, "__code__", None))
        try:
            for batch in self.batches():
                step = self.state.step
                micro = self._loop.micro
                with self.halving() if halves else contextlib.nullcontext():
                    self._step.compute(functools.partial(do, batch), micro)
                if self.state.step > step:
                    yield self.state.step
        finally:
            self._step.end_computing()

    def halving(self) -> contextlib.AbstractContextManager[None]:
        """Around a batch's forward pass, `step` and `log`: out of memory there halves the micro-batch.

        The step starts over with the same samples, in twice as many forward passes; values logged inside
        count once. An evaluation's batch is cut in two. Several processes leave with exit code 71 instead;
        started again, they continue from the newest checkpoint in smaller micro-batches.
        """
        return self._memory.around()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of `precision`, for the forward pass and the loss."""
        return self._parts.amp.autocast()

    def step(self, loss: Tensor) -> None:
        """Backward; at the end of a global batch also clip, step and update the average. Waits for nothing.

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
        if self._step(loss, micro):
            self._loop.done = micro
            if self._in_parts:
                self._draws.seed_after_parts(self.state.epoch, self.state.position)
            self.progress.step()

    def log(self, **values: Any) -> None:
        """Count values of the last batch; metrics.jsonl gets their mean over samples.

        Args:
            values: by name: a mean over the batch (0-d or a number), or values of each sample (N, ...); for a
                name in `metrics` what its `update` takes, such as (logits, targets). In an evaluation
                `predictions=(logits, targets, images)`, or without images, are for the report.
        """
        loop = self._loop
        metrics = self._parts.metrics
        means = loop.evaluated
        if means is None:
            means = self.state.window.means_of(*loop.part_of, is_late=loop.micro is None)
        for name, value in (cloned(values) if loop.holds_back else values).items():
            if metrics.takes(name, value):
                if name == PREDICTIONS and metrics.predictions is not None:
                    value = (loop.indices, *value)  # noqa: PLW2901
                loop.count(functools.partial(metrics.update, name, value, loop.num_samples))
            else:
                add_value(means, name, value, loop.num_samples, self.device, count=loop.count)

    def evaluate(
        self, data: Dataset[Any] | Iterable[Any], *, on_bad: OnBad | None = None
    ) -> Iterator[Any]:
        """The batches of a data set, each sample once, with the model in evaluation mode and no gradients.

        Inside, the model has any averaged weights, and what is logged becomes one line of metrics.jsonl. Its
        random draws neither depend on training nor change it.
        """
        check_made_here(self._maker)
        check_no_other_trains()
        loop = self._loop
        ranks = self._ranks
        # By part, where the batches are parts of a step; else all under 0.
        means = dict[int, dict[str, MeanOnDevice]]()
        is_within_step = loop.is_partial
        is_sharded = self._parts.shards is not None
        # Else at the end of the body: no resume repeats what comes after a step, and no checkpoint holds
        # gradients.
        can_stop = not is_within_step and loop.done is None
        if loop.will_be_repeated:
            return  # and then this evaluation, too
        if self._step.check is not None and self._step.check.skips_evaluation:
            return
        if self._lifecycle.has_evaluated_before():
            return
        if self.plan.has_line(self.state.step, loop.done) and not self.state.is_bad:
            self._lifecycle.flush()  # this line comes before that of the evaluation
        with self.state.window.paused():
            with loop.evaluating(), generators_restored(), self._parts.metrics.counting():
                loop.evaluated = means.setdefault(0, {})
                self._draws.seed_evaluation(self.state.epoch)
                self._step.share_statistics()
                loader = self._parts.reader.loader(data, evaluates=True, on_bad=on_bad)
                if loader.forks:
                    self._recorder.before_fork()
                with evaluation_mode(self.model, self.state.ema, self.progress):
                    ranks.beat("evaluating")
                    # The stream is in no variable: its workers end with this loop.
                    for micro in self._parts.reader.to_device(
                        loader.stream(epoch=0, position=0, epochs=1)
                    ):
                        if not micro.size and not is_sharded:
                            continue  # all samples were unreadable
                        loop.evaluated = means.setdefault(micro.sum_key, {})
                        for batch in self._memory.evaluated_parts(micro, loader):
                            ranks.beat("evaluating")
                            yield batch
                        if ranks.stops_next and can_stop and not is_sharded:
                            break  # the run stops, and the figures are not recorded
            figures = self._parts.metrics.figures(gathered_means(means, ranks))
            self._parts.bad.report()
            if can_stop:
                self._lifecycle.preempt_if_signalled()
            if figures:
                self._lifecycle.record(figures)
            self._lifecycle.note_predictions(namer(data, world=ranks.world))

    def close(self) -> None:
        """Wait for the checkpoint being written, stop the workers, release the folder. `epochs` calls it."""
        self._lifecycle.close()
