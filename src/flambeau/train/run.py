"""`Run` makes a training loop exact, resumable and fast, and leaves the loop to its owner.

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
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from flambeau.data.loading.batch_plan import Order
from flambeau.data.loading.loader import is_dataset
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.ddp import COMPRESSIONS, Replicas
from flambeau.parallel.preemption import FLAG, Preempted
from flambeau.parallel.ranks import Ranks, join_ranks
from flambeau.parallel.shard_layout import Layout, is_sharded
from flambeau.parallel.watchdog.heartbeat import SAVING
from flambeau.recipes.setup.environment import environment
from flambeau.recipes.setup.seeding import rng_state, set_rng_state
from flambeau.recipes.training.amp_step import AmpStep, Precision
from flambeau.recipes.training.ema import EMA
from flambeau.recipes.training.metrics import MeanOnDevice
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.train.build.device import generators_of
from flambeau.train.checkpoints.checkpointer import Restored, Saver, restore
from flambeau.train.checkpoints.metrics_log import Journal
from flambeau.train.checkpoints.published_weights import Best, Result, publish, published
from flambeau.train.checkpoints.run_folder import RunFolder
from flambeau.train.checkpoints.run_identity import (
    POWERSGD_FORGETS,
    changes,
    exactness_facts,
    identity_of_optimizer,
    identity_of_sampler,
)
from flambeau.train.loop.batch_reader import BatchDraws, BatchReader, OnBad
from flambeau.train.loop.lr_schedule import LearningRate
from flambeau.train.loop.nan_guard import LR_FACTOR, ROLLBACKS, Explain, NotFiniteSteps
from flambeau.train.loop.progress_bar import Progress
from flambeau.train.loop.rank_checks import BadReports, check_ranks, check_shares, gathered_means
from flambeau.train.loop.step_metrics import Window, add_value
from flambeau.train.loop.step_plan import Plan
from flambeau.train.loop.training_state import TrainingState

if TYPE_CHECKING:
    from flambeau.parallel.fsdp import Shards
    from flambeau.train.checkpoints.sharded_checkpointer import ShardedSaver

_SCALE_FLOOR = (
    2.0**-20
)  # an fp16 loss scale below it: no step has worked for long; chosen, untested
_P = ParamSpec("_P")


def _watched(start: Callable[_P, None]) -> Callable[_P, None]:
    """End the watch over the ranks if the run does not come into being."""

    @functools.wraps(start)
    def wrapper(*arguments: _P.args, **settings: _P.kwargs) -> None:
        try:
            start(*arguments, **settings)
        except BaseException:
            ranks = getattr(arguments[0], "_ranks", None)
            if ranks is not None:
                ranks.end_watch()
            raise

    return wrapper


class Run:
    """One training run in one folder.

    Args:
        folder: of the run; made if missing, continued if it holds this run.
        model: on its device already.
        optimizer: over the model's parameters; best with `fused=True` where torch offers it.
        data: a map-style Dataset, or a loader with a length that makes ready batches.
        duration: such as '90ep' or '5000st'.
        batch_size: samples a forward pass (of a Dataset), of all processes together.
        accumulate: forward passes an optimizer step. The last batch of an epoch may be smaller; each part
            is weighted so that the gradient is that of the mean loss over the whole batch.
        seed: of sample order, augmentation and dropout.
        workers: processes that read a Dataset, for each process that trains.
        precision: of `autocast()`: 'fp32', 'bf16' or 'fp16'.
        schedule: a name of `flambeau train --schedule`, or a function from the step (from 0) to the
            multiplier of the learning rate; 'plateau', or a ReduceOnPlateau, needs `best` once an epoch.
        warmup: such as '5%', '2ep', '500st'; for the named schedules.
        compression: of the gradients that processes exchange: 'none', 'fp16', 'bf16' or 'powersgd'.
        clip_norm: clip the norm of all gradients together to this; 0 does not.
        ema: decay of averaged weights, which are then evaluated and published; 0 keeps none.
        checkpoint_every: such as '1ep' or '500st'.
        keep: newest checkpoints kept, besides the best.
        log_every: steps a line of metrics.jsonl.
        best: the metric that chooses the best checkpoint.
        best_mode: 'max' or 'min', what is better.
        config: what else identifies the run, in TOML's types; a resume with another value is refused.
        attachments: files for the folder of a new run, by name.
        state: objects with state_dict and load_state_dict that belong to the run.
        collate: makes a batch of a list of samples (of a Dataset).
        sampler: one of flambeau.recipes.data.samplers, or anything with `len()` and `order(epoch)`: the
            samples of an epoch (of a Dataset), instead of a permutation of all.
        on_bad: called with the indices of samples that the dataset could not read.
        on_nan: what to do where a loss or gradient was NaN or infinite: 'stop', or 'rollback' to the newest
            checkpoint and go on with half the learning rate, three times at most.
        explain: called with the data of a bad batch and what the dataset calls its samples, the weights and
            generators as they were; says where it goes wrong. See recipes/debugging/first_not_finite.py.
        stall_timeout: seconds without progress after which a process of several, or a worker that still
            reads the same sample, is named and the job ends; 0 waits for ever.
        bar: show a progress bar on a terminal.
        replay_from: a checkpoint folder: start there, and write nothing anywhere.

    Raises:
        InputError: the folder holds something else, or no checkpoint in it is whole.
    """

    @_watched
    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        data: Dataset[Any] | Iterable[Any],
        *,
        duration: str,
        batch_size: int = 64,
        accumulate: int = 1,
        seed: int = 0,
        workers: int = 0,
        precision: Precision = "fp32",
        schedule: str | Callable[[int], float] | ReduceOnPlateau = "constant",
        warmup: str = "0st",
        compression: str = "none",
        clip_norm: float = 0.0,
        ema: float = 0.0,
        checkpoint_every: str = "1ep",
        keep: int = 2,
        log_every: int = 50,
        best: str = "val_accuracy",
        best_mode: Literal["max", "min"] = "max",
        config: Mapping[str, Any] | None = None,
        attachments: Mapping[str, bytes] | None = None,
        state: Mapping[str, Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        sampler: Order | None = None,
        on_bad: OnBad | None = None,
        on_nan: Literal["stop", "rollback"] = "stop",
        explain: Explain | None = None,
        stall_timeout: float = 60.0,
        bar: bool = True,
        replay_from: Path | None = None,
    ) -> None:
        self.folder = RunFolder(Path(folder))
        self.model, self.optimizer = model, optimizer
        self._replay = replay_from is not None
        self._ranks = Ranks(0, 1, None) if self._replay else join_ranks()
        self._ranks.begin_watch(stall_timeout)
        plain: nn.Module = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        self._shards = _shards_of(plain, self._ranks, clip_norm) if is_sharded(plain) else None
        layout = None if self._shards is None else self._shards.adopt(optimizer)
        self._amp = AmpStep(
            optimizer, precision=precision, halt=True,
            max_norm=clip_norm if clip_norm and self._shards is None else None,
            agree=self._ranks.worst if self._ranks.world > 1 else None,
        )  # fmt: skip
        self.device = self._amp.device
        self._bad = BadReports(self._ranks)
        self._reader = BatchReader(
            self.device, seed=seed, ranks=self._ranks, bad=self._bad,
            sharded=self._shards is not None, batch_size=batch_size, workers=workers,
            collate=collate, stall_timeout=stall_timeout,
        )  # fmt: skip
        self._loader = self._reader.loader(
            data, accumulate=accumulate, on_bad=on_bad, sampler=sampler
        )
        self.plan = Plan(
            steps_per_epoch=self._loader.batches_per_epoch, duration=duration,
            checkpoint_every=checkpoint_every, log_every=log_every,
        )  # fmt: skip
        self._schedule = LearningRate(
            self.plan, schedule, warmup=warmup, metric=best, mode=best_mode
        )
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        if compression not in COMPRESSIONS:
            raise InputError(f"compression must be {', '.join(COMPRESSIONS)}, got {compression!r}")
        if compression != "none" and self._shards is not None:
            raise InputError(f"compression = {compression!r} has no effect on a sharded model")
        identity = {
            "duration": duration, "batch_size": batch_size, "accumulate": accumulate, "seed": seed,
            "workers": workers, "precision": precision, "warmup": warmup, "clip_norm": clip_norm,
            "ema": ema, "checkpoint_every": checkpoint_every, "keep": keep, "log_every": log_every,
            "optimizer": identity_of_optimizer(optimizer), "compression": compression,
            "schedule": self._schedule.name, **(config or {}),
            **({} if sampler is None else {"sampler": identity_of_sampler(sampler)}),
        }  # fmt: skip
        check_ranks(self._ranks, identity, plain, self._loader.length)
        if self._shards is not None:
            plain = self._shards.pieces
        self._ema = EMA(plain, decay=ema) if ema else None
        self._window = Window(self.device)
        self._halted_steps = torch.zeros((), device=self.device)
        self.state = TrainingState(
            model=plain, optimizer=optimizer, amp=self._amp, ema=self._ema, window=self._window,
            best=Best(best, best_mode), user={**(state or {}), **self._schedule.parts()},
            data_length=self._loader.length,
        )  # fmt: skip
        self.progress = Progress(shown=bar, silent=not self._ranks.is_first)
        self._next_event = 0
        self._rollback_rows: list[dict[str, float]] = []
        self._saved_step = -1
        self._micro: MicroBatch | None = None
        self._num_samples = 0
        self._evaluated: dict[str, MeanOnDevice] | None = None
        self._stream: Iterator[MicroBatch] | None = None
        self._draws = BatchDraws(seed, generators_of(self.device))
        self._not_finite = NotFiniteSteps(
            None if self._replay else self.folder.path, self.state, self._loader, ranks=self._ranks,
            reader=self._reader, draws=self._draws, on_nan=on_nan, explain=explain,
        )  # fmt: skip
        self._exactness = exactness_facts(self.device) | {"processes": self._ranks.world}
        self._saver = Saver(self.folder.checkpoints, keep=keep)
        self._journal: Journal | None = None
        self._replicas: Replicas | Shards | None = None
        self._result: Result | None = None
        self._is_closed = False
        if replay_from is not None:
            self.state.load(restore(replay_from))
            return
        report = json.dumps({**environment(), "exactness": self._exactness}, indent=2) + "\n"
        files = {"environment.json": report.encode(), **(attachments or {})}
        self._ranks.first(lambda: self.folder.claim(identity, files))
        FLAG.install(self)
        if layout is not None:
            self._saver = _sharded_saver(self.folder.checkpoints, layout, self._ranks, keep=keep)
        self._resume(compression=compression)
        if self._shards is not None:
            self._replicas = self._shards
        elif self._ranks.world > 1:
            self._replicas = Replicas(plain, self._ranks, compression=compression)

    @property
    def result(self) -> Result | None:
        """What the finished run has published; None while it is not finished."""
        return self._result

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
            if self._result is not None:
                return
            if state.step == 0 and state.position == 0:
                self._save(wait=True)  # the trial: better to learn now that the folder takes none
            self.progress.start(done=state.step, total=self.plan.total_steps)
            self._next_event = self.plan.next_event(state.step)
            self._window.restart_clock()
            # A position in an epoch means that its evaluation may still be owed.
            while state.step < self.plan.total_steps or state.position:
                self._preempt_if_asked()
                yield state.epoch
                self._end_epoch()
            if not self._replay:
                self._saver.wait()
                self._result = self._ranks.first(self._publish)
        finally:
            self.close()

    def batches(self) -> Iterator[Any]:
        """The rest of this epoch, batch after batch, on the model's device.

        Before each one torch's generators are seeded by (seed, epoch, position), so dropout and mixup after
        a resume, or in a replay, are those of a run that was never stopped.
        """
        state = self.state
        if self._replicas is not None:
            self._replicas.start_epoch()
        while state.position < state.data_length and state.step < self.plan.total_steps:
            start = time.perf_counter()
            self._beat("waiting for data")
            if self._stream is None:
                self._saver.wait()  # workers are forked: not while the writing thread holds a lock
                self._stream = self._reader.to_device(
                    self._loader.stream(epoch=state.epoch, position=state.position)
                )
            micro = next(self._stream)
            self._window.wait_s += time.perf_counter() - start
            self._micro = micro
            self._num_samples = micro.size
            self._draws.seed(state.epoch, micro)
            self._beat("in the forward pass")
            if self._replicas is not None:
                self._replicas.before_batch(micro)
            yield micro.data
            if self._micro is not None:
                raise RuntimeError("run.step(loss) was not called for the last batch")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of `precision` for the forward pass and the loss."""
        return self._amp.autocast()

    def step(self, loss: Tensor) -> None:
        """Backward; at the end of a global batch also clip, step, average and count. Waits for nothing.

        Args:
            loss: 0-d, the mean over the samples of the last batch.

        Raises:
            ValueError: the loss is not 0-d.
            Preempted, NotFinite, SaveFailed: as `epochs` says.
        """
        micro, state = self._micro, self.state
        if micro is None:
            raise RuntimeError(
                "run.step(loss) belongs inside `for ... in run.batches()`, once a batch"
            )
        if loss.dim():
            raise ValueError(
                f"the loss must be 0-d, a mean over the batch; got {tuple(loss.shape)}"
            )
        self._micro = None
        self._beat("in backward and the optimizer's step")
        # Gradients are averaged over the ranks, and are to be the sum of their shares.
        self._amp.backward(loss, weight=self._ranks.world * micro.size / micro.total)
        losses = self._window.add_loss(loss, micro.size)
        state.position = micro.position
        state.order_crc = zlib.crc32(micro.indices.data, state.order_crc)
        if not micro.ends_batch:
            return
        watch = losses[-micro.part :]
        if self._shards is not None:
            self._shards.after_backward(scale=self._amp.scale)
            if self._amp.scale is None:
                watch = [*watch, self._shards.norm]
        elif self._replicas is not None:
            self._replicas.after_backward()
        multiplier = self._schedule(state.step) * state.lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier
        self._amp.step(watch=watch)
        self._halted_steps += self._amp.halted
        if self._ema is not None:
            self._ema.update()
        state.step += 1
        self.progress.step()
        if state.step >= self._next_event or micro.ends_epoch:
            self._at_event(ends_epoch=micro.ends_epoch)
        self._preempt_if_asked()

    def log(self, **values: Tensor | float) -> None:
        """Count values of the last batch; their mean over samples is the figure in metrics.jsonl.

        Args:
            values: by name; a mean over the batch (0-d or a number), or one value a sample (N,).
        """
        means = self._window.logged if self._evaluated is None else self._evaluated
        for name, value in values.items():
            add_value(means, name, value, self._num_samples, self.device)

    def evaluate(
        self, data: Dataset[Any] | Iterable[Any], *, on_bad: OnBad | None = None
    ) -> Iterator[Any]:
        """All batches of a data set, each sample once, with the model in evaluation and no gradients.

        The averaged weights stand in the model meanwhile, if there are any. What is logged meanwhile
        becomes one line of metrics.jsonl. Randomness in here neither depends on training nor changes it.
        """
        generators = rng_state()
        modes = [(module, module.training) for module in self.model.modules()]
        self._draws.seed_evaluation(self.state.epoch)
        means: dict[str, MeanOnDevice] = {}
        if self._replicas is not None:
            self._replicas.share_statistics(self._ema.shadow if self._ema else {})
        averaged = self._ema.applied() if self._ema is not None else contextlib.nullcontext()
        if is_dataset(data):
            self._saver.wait()  # before workers are forked, as above
        loader = self._reader.loader(data, evaluates=True, on_bad=on_bad)
        self._evaluated = means
        self.model.eval()
        try:
            with averaged, torch.inference_mode():
                stream = loader.stream(epoch=0, position=0, epochs=1)
                self._beat("evaluating")
                for micro in self._reader.to_device(stream):
                    if not micro.size and self._shards is None:
                        continue  # all of them unreadable
                    self._num_samples = micro.size
                    self._beat("evaluating")
                    yield micro.data
                    if self._shards is None and self._stops_next():
                        break
        finally:
            self._evaluated = None
            for module, training in modes:  # one by one: some may be frozen in evaluation mode
                module.training = training
            set_rng_state(generators)
        figures = gathered_means(means, self._ranks)
        self._bad.report()
        self._preempt_if_asked()
        if figures:
            self._record(figures)
        self._window.restart_clock()

    def close(self) -> None:
        """Wait for the checkpoint under way, stop the workers, release the folder. `epochs` does it."""
        self._stream = None
        self.progress.close()
        try:
            self._saver.wait()
        finally:
            if self._journal is not None:
                self._journal.close()
                self._journal = None
            self.folder.release()
            FLAG.restore(self)
            if not self._is_closed:
                self._is_closed = True
                self._ranks.end_watch()

    def _at_event(self, *, ends_epoch: bool) -> None:
        """What is due between two steps now and then: a line, a checkpoint, the end."""
        step = self.state.step
        if step % self.plan.log_every == 0 or ends_epoch or step == self.plan.total_steps:
            self._flush()
            if self.state.step != step:
                return  # rolled back
        # At the end of an epoch the checkpoint waits for the evaluation: it may be the best.
        if step % self.plan.save_every == 0 and not ends_epoch and step < self.plan.total_steps:
            self._save()  # which may go back, too
        self._next_event = self.plan.next_event(self.state.step)

    def _flush(self) -> None:
        """Write the line of the steps since the last one; stop or go back if one of them went bad."""
        self._bad.report()
        self._window.settle(self._ranks)
        if self._window.empty:
            return
        row, halted_steps = self._window.read(self._halted_steps)
        if self._amp.precision == "fp16":
            row["loss_scale"] = self._amp.loss_scale()
            halted_steps = halted_steps or int(row["loss_scale"] < _SCALE_FLOOR)
        if halted_steps:
            self._roll_back(self.state.step - halted_steps)
            return
        row["learning_rate"] = max(group["lr"] for group in self.optimizer.param_groups)
        self._write(row)
        self.progress.note(f"loss {row.get('train_loss', float('nan')):.4f}")

    def _record(self, figures: dict[str, float]) -> None:
        """Write the line of an evaluation and see whether it is the best so far."""
        self.state.metrics = figures
        self.state.best.see(figures, step=self.state.step)
        self._schedule.note(figures)
        self._write(figures)
        text = "  ".join(f"{name} {figure:.4f}" for name, figure in figures.items())
        self.progress.say(
            f"epoch {self.state.epoch + 1}, step {self.state.step}/{self.plan.total_steps}: {text}"
        )

    def _write(self, row: Mapping[str, float]) -> None:
        if self._journal is not None:
            self._journal.write({"step": self.state.step, "epoch": self.state.epoch, **row})

    def _end_epoch(self) -> None:
        """The loop's body is done with an epoch, or with what of it belongs to the run."""
        state = self.state
        if state.position < state.data_length and state.step < self.plan.total_steps:
            raise RuntimeError("the loop left `for ... in run.batches()` before its end")
        self._schedule.end_epoch(say=self.progress.say)
        state.epoch, state.position = state.epoch + 1, 0
        due = state.step % self.plan.save_every == 0 or state.step == self.plan.total_steps
        if due or state.best.step == state.step:
            self._save()
        self._preempt_if_asked()

    def _beat(self, phase: str) -> None:
        """Tell the other ranks' watches what comes next here."""
        if self._ranks.watch is not None:
            self._ranks.watch.beat(phase)

    def _stops_next(self) -> bool:
        """It is settled that the run stops at the next point where it may."""
        watch = self._ranks.watch
        return (FLAG.signal is not None) if watch is None else watch.stops_next

    def _preempt_if_asked(self) -> None:
        """A point where the run may stop; all ranks pass the same ones and stop at the same."""
        watch = self._ranks.watch
        signal = FLAG.signal if watch is None else watch.reach_point()
        if signal is None or self._replay:
            return
        # Workers first: they have been signalled, too, and stay only for a while.
        self._stream = None
        self._save(wait=True)
        self.progress.say(
            f"{signal}: saved at step {self.state.step} in {self.folder.path}; "
            "the same command goes on from here"
        )
        FLAG.answer()
        self.close()
        raise Preempted

    def _save(self, *, wait: bool = False) -> None:
        """Copy the run and start writing it: training waits for the copy, not for the disk."""
        self._beat(SAVING)
        if bool(self._amp.halted):
            self._flush()
        if not self._replay and self._saved_step != self.state.step:
            self._bad.report()
            self._window.settle(self._ranks)
            self._saved_step = self.state.step
            if self._ranks.is_first or self._shards is not None:
                self._start_saving()
        if wait:
            if self._shards is not None:
                self._saver.wait()
            self._ranks.first(self._saver.wait)

    def _start_saving(self) -> None:
        best, journal = self.state.best.step, self._journal  # which rank 0 alone writes
        size = 0 if journal is None else journal.size
        self._saver.save(
            _name(self.state.step),
            self.state.snapshot(metrics_bytes=size, exactness=self._exactness),
            best=None if best is None else _name(best),
            before=(lambda: None) if journal is None else journal.sync,
        )

    def _publish(self) -> Result:
        self._saver.wait()
        return publish(self.folder, self.state.results(), name_of=_name, say=self.progress.say)

    def _resume(self, *, compression: str) -> None:
        """Go on from the newest checkpoint that is whole, if there is any."""
        self._result = self._ranks.first(lambda: published(self.folder))
        found = self._found()
        if found is not None:
            self._load(found)
            if self.state.position and self._loader.are_shares:
                check_shares(found.meta["exactness"].get("processes", 1), self._ranks.world)
        if self._result is not None:
            return
        if found is not None:
            self.progress.say(f"going on from step {self.state.step} of {self.plan.total_steps}")
            for change in changes(found.meta["exactness"], self._exactness):
                self.progress.say(f"not to the same bits: {change}")
            if self._ranks.world > 1 and compression == "powersgd":
                self.progress.say(f"not to the same bits: {POWERSGD_FORGETS}")
        if not self._ranks.is_first:
            return
        keep_bytes = 0 if found is None else found.state["metrics_bytes"]
        self._journal = Journal(self.folder.metrics, keep_bytes=keep_bytes)
        if self._journal.missing_bytes:
            self.progress.say(
                f"{self.folder.metrics} is shorter than at the checkpoint: lines are lost"
            )

    def _load(self, found: Restored) -> None:
        self.state.load(found)
        if not self._ranks.is_first:
            self._window.leave_to_first()
        self._saver.last_good, self._saved_step = found.name, self.state.step

    def _found(self) -> Restored | None:
        if self._shards is not None:  # each rank reads its part
            return self._saver.restore_latest(say=self.progress.say)
        return self._ranks.first(lambda: self._saver.restore_latest(say=self.progress.say))

    def _roll_back(self, steps_before: int) -> None:
        """Go back from a bad step to the newest checkpoint, as a new process would, or stop."""
        self._stream, state = None, self.state
        why = self._not_finite.record(steps_before, self._saver)
        rollbacks, lr_scale = state.rollbacks + 1, state.lr_scale * LR_FACTOR
        self._beat(SAVING)  # or reading, which takes as long
        self._saver.wait()
        found = self._found()
        assert found is not None  # the one of step 0, at least
        self._load(found)
        if self._replicas is not None:
            self._replicas.go_back()
        state.rollbacks, state.lr_scale = rollbacks, lr_scale
        self._halted_steps.zero_()
        self._amp.halted.zero_()
        if self._journal is not None:
            self._journal.cut(found.state["metrics_bytes"])
        row = {"rollback": rollbacks, "bad_step": steps_before + 1, "lr_scale": lr_scale}
        self._rollback_rows.append(row)
        for row in self._rollback_rows:
            if row["rollback"] > found.state.get("rollbacks", 0):  # its line was cut off
                self._write(row)
        self.progress.go_back(done=state.step)
        self.progress.say(
            f"{why}\nrollback {rollbacks} of {ROLLBACKS}: going on from step {state.step} with "
            f"{lr_scale:g} of the learning rate"
        )
        self._next_event = self.plan.next_event(state.step)
        self._window.restart_clock()


def _shards_of(model: nn.Module, ranks: Ranks, clip_norm: float) -> "Shards":
    from flambeau.parallel.fsdp import Shards  # imports what only sharded models need

    return Shards(model, ranks, max_norm=clip_norm or None)


def _sharded_saver(root: Path, layout: Layout, ranks: Ranks, *, keep: int) -> "ShardedSaver":
    from flambeau.train.checkpoints.sharded_checkpointer import ShardedSaver

    return ShardedSaver(root, layout, ranks, keep=keep)


def _name(step: int) -> str:
    return f"step-{step:08d}"
