"""The files of a run: metrics.jsonl, checkpoints, published weights, events, trackers."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from flambeau.data.drop_in.declared_preprocessing import Preprocessing
from flambeau.errors import InputError
from flambeau.parallel.preemption import FLAG
from flambeau.parallel.ranks import FailedElsewhere, Ranks
from flambeau.parallel.shard_layout import is_sharded
from flambeau.recipes.setup.environment import environment
from flambeau.run.folder.checkpointer import Checkpointer, Restored, SaveFailed
from flambeau.run.folder.events_log import EventsLog
from flambeau.run.folder.identity import POWERSGD_FORGETS, changes, exactness_facts
from flambeau.run.folder.metrics_log import MetricsLog
from flambeau.run.folder.mirror import Mirror, fetch
from flambeau.run.folder.published_weights import Result, publish
from flambeau.run.folder.report_file import write_run_report
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.store_run import in_store
from flambeau.run.loop.logged_predictions import EvaluationFile
from flambeau.run.loop.model_builder import use_record
from flambeau.run.loop.notebook_chart import NotebookChart
from flambeau.run.loop.progress_bar import ProgressBar, peak_bytes
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.state import ResumableState
from flambeau.run.loop.step_plan import StepPlan
from flambeau.run.options.durations import parse_seconds
from flambeau.run.options.run_options import RunOptions
from flambeau.run.options.shared_options import SharedOptions
from flambeau.sandbox.inside_trial import in_trial
from flambeau.terminal import clock

if TYPE_CHECKING:
    from flambeau.run.trackers.run_trackers import RunTrackers

_MAX_PARTS = 40  # of a model, in environment.json


class Recorder:
    """Writes and reads a run's files: rank 0, or each rank for its shards."""

    def __init__(
        self,
        folder: RunFolder,
        state: ResumableState,
        parts: RunParts,
        ranks: Ranks,
        options: RunOptions,
        *,
        compiled: bool,
    ) -> None:
        self.saver = Checkpointer(folder.checkpoints, keep=options.keep, advice=folder.advice)
        facts = exactness_facts(state.amp.device, compiled=compiled)
        self.exactness = facts if options.parts else {**facts, "processes": ranks.world}
        """What decides the bits of a resume, besides the checkpoint."""
        self._folder, self._state, self._ranks = folder, state, ranks
        self._parts, self._options = parts, options
        self._layout = None if parts.shards is None else parts.shards[1]
        self._progress = progress = parts.progress
        self._say = progress.say
        self._epoch_lines = EpochLines(state, parts.plan, best=options.best, progress=progress)
        self._chart: NotebookChart | None = None
        if progress.is_in_notebook:
            self._chart = NotebookChart(steps_per_epoch=parts.plan.steps_per_epoch)
        self._reported: str | None = None  # name of the last reported checkpoint
        self._metrics_log: MetricsLog | None = None
        self._trackers: RunTrackers | None = None
        self._mirror: Mirror | None = None
        self._result: Result | None = None
        # A command writes its own.
        writes = ranks.is_first and not isinstance(options.settings, SharedOptions)
        self._evaluation_file: EvaluationFile | None = None
        if writes and options.replay_from is None:
            self._evaluation_file = EvaluationFile(folder.path / "evaluation.json")
        self.extended: str | None = None
        """The extension that config.toml records."""
        # By epoch, the length and the CRC-32 of metrics.jsonl before its evaluations.
        self._log_before_evaluations: dict[int, tuple[int, int]] = {}

    def claim(self) -> None:
        """Make the folder or continue it; from here on no other process writes there."""
        facts = {
            **environment(),
            "exactness": self.exactness,
            "model": model_parts(self._parts.model),
        }
        files = {"environment.json": json.dumps(facts, indent=2).encode() + b"\n"}
        files |= self._options.attachments or {}
        self._ranks.first(self._fetch_mirrored)
        stored = self._ranks.first(lambda: self._folder.claim(self._parts.identity, files))
        self._progress.events = events = EventsLog(self._folder.events, lambda: self._state.step)
        self._ranks.note_lost_ranks(self._folder.path, lambda cause: events.add(f"lost: {cause}"))
        self.extended = None if stored is None else stored.get("extend")
        if self._layout is not None:
            from flambeau.run.folder.sharded_checkpointer import ShardedCheckpointer

            root = self._folder.checkpoints
            self.saver = ShardedCheckpointer(
                root,
                self._layout,
                self._ranks,
                keep=self._options.keep,
                advice=self._folder.advice,
            )

    @property
    def _mirrored_to(self) -> str | None:
        return None if in_trial() or self._options.replay_from else self._options.mirror

    def _fetch_mirrored(self) -> None:
        # A command has done so before it read the settings of the run.
        if self._mirrored_to is not None and not isinstance(self._options.settings, SharedOptions):
            folder = self._folder.path
            is_copy = in_store(folder, self._mirrored_to) is not None
            said = fetch(folder, self._mirrored_to, is_copy=is_copy)
            if said is not None:
                self._say(said)

    def _begin_mirror(self) -> None:
        if self._mirrored_to is not None:
            self._mirror = Mirror(self._folder.path, self._mirrored_to, say=self._say)

    def end_mirror(self) -> None:
        """Wait until the mirror has everything."""
        if self._mirror is not None:
            mirror, self._mirror = self._mirror, None
            mirror.close()

    def open_metrics(self, restored: Restored | None) -> None:
        """Write lines from here on, after those that the checkpoint includes."""
        if not self._ranks.is_first:
            return
        self._folder.update_config()
        self._begin_mirror()
        if self._options.builder is not None:  # named by this user's own script
            self._folder.record_made_here()
        if restored is None:
            self._progress.log_event("the run starts")
        keep_bytes = 0 if restored is None else restored.state["metrics_bytes"]
        self._metrics_log = MetricsLog(self._folder.metrics, keep_bytes=keep_bytes)
        if self._metrics_log.missing_bytes:
            self._say(f"{self._folder.metrics} is shorter than at the checkpoint: lines are lost")
        if self._chart is not None:
            self._chart.load(self._folder.metrics)
        if self._options.track:
            self._trackers = self._make_trackers(self._metrics_log.size)

    def note_use(self) -> None:
        """Note in a finished run how its model is made and used, if given."""
        if self._ranks.is_first and self._options.builder is not None:
            self._folder.update_config(only=use_record(self._options))
            self._folder.record_made_here()

    def _make_trackers(self, size: int) -> "RunTrackers":
        """The trackers of a run with so many bytes of metrics.jsonl."""
        from flambeau.run.trackers.run_trackers import RunTrackers

        assert self._options.track
        trackers = RunTrackers(
            self._options.track,
            self._folder,
            size=size,
            is_sharded=self._layout is not None,
            say=self._say,
        )
        trackers.resumed(self._state.model, self._state.step, size)
        return trackers

    def complete(self, result: Result) -> None:
        """Tell the trackers and the mirror of a finished run what a killed process has not."""
        if not self._ranks.is_first:
            return
        self._begin_mirror()
        track = self._options.track
        if not track:
            return
        from flambeau.run.trackers.run_trackers import have_ended

        size = self._folder.metrics.stat().st_size
        if not have_ended(track, self._folder.path, size=size):
            self._make_trackers(size).close(result)

    def cut_metrics(self, restored: Restored) -> None:
        self._log_before_evaluations.clear()
        self._epoch_lines.restart()
        if self._metrics_log is not None:
            self._metrics_log.cut(restored.state["metrics_bytes"])
            if self._trackers is not None:
                size = self._metrics_log.size
                self._trackers.cut(size, step=self._state.step)
                self._trackers.resumed(self._state.model, self._state.step, size)
            if self._chart is not None:
                self._chart.load(self._folder.metrics)

    def start_epoch(self) -> int:
        self._epoch_lines.start()
        self._update_chart()
        self._progress.start_epoch()
        return self._state.epoch

    def write(self, row: Mapping[str, float]) -> None:
        self._epoch_lines.add(row)
        self._progress.emit(
            {"event": "log", "step": self._state.step, "epoch": self._state.epoch, **row}
        )
        self._append(row)

    def _append(self, row: Mapping[str, float]) -> None:
        line = {"step": self._state.step, "epoch": self._state.epoch, **row}
        if self._metrics_log is not None:
            self._check_in_place()
            self._metrics_log.write(line)
            if self._trackers is not None:
                self._trackers.grow(self._metrics_log.size)
        if self._chart is not None:
            self._chart.add(line)

    def _update_chart(self) -> None:
        if self._chart is not None:
            self._chart.draw()

    def write_evaluation(self, figures: Mapping[str, float]) -> None:
        self._append(figures)
        if self._trackers is not None:
            self._trackers.evaluated(self._state.model, self._state.step)
        self.show_evaluation(figures)

    def note_predictions(self, describe: Callable[[int], str]) -> None:
        """Write evaluation.json, if the loop has logged `predictions` of the weights to publish."""
        logged = self._parts.metrics.predictions
        if self._evaluation_file is None or logged is None or logged.facts is None:
            return
        prepared = self._options.preprocess
        facts = logged.facts(
            step=self._state.step,
            describe=describe,
            prepared=prepared if isinstance(prepared, Preprocessing) else None,
        )
        logged.facts = None
        published = self._state.results()[0].step
        self._evaluation_file.note(facts, published=published, say=self._say)

    def show_evaluation(self, figures: Mapping[str, float]) -> None:
        self._epoch_lines.evaluation(figures)
        self._update_chart()

    def note_length(self, epoch: int | None) -> None:
        """The lines from here on are of evaluations outside of `batches`, which a resume repeats."""
        if self._metrics_log is not None:
            length = self._metrics_log.size, self._metrics_log.crc32
            noted = self._log_before_evaluations
            # The first call counts: batches() may be called again in this epoch.
            self._log_before_evaluations = (
                {} if epoch is None else {epoch: noted.get(epoch, length)}
            )

    def save(self) -> None:
        if not self._ranks.is_first and self._layout is None:
            return
        self._report_saved()
        self._check_in_place()
        began = time.monotonic()
        best = self._state.best.step
        planned = self._state.planned
        metrics_log = self._metrics_log
        length = (0, 0) if metrics_log is None else (metrics_log.size, metrics_log.crc32)
        length = self._log_before_evaluations.get(self._state.epoch, length)
        self.saver.save(
            checkpoint_name(self._state.step),
            self._state.snapshot(metrics=length, exactness=self.exactness),
            best=None if best is None else checkpoint_name(best),
            rollback=None if planned is None else checkpoint_name(planned),
            before=self._before_write,
            began=began,
        )

    def _before_write(self) -> None:
        """In the thread that writes a checkpoint."""
        self._folder.check_in_place()
        if self._metrics_log is not None:
            self._metrics_log.sync()

    def has_time_to_save(self, *, another: bool) -> bool:
        """Whether a checkpoint can be on the disk within `stop_within` of the signal, on all ranks; else a
        message.

        `another`: a new one is needed.
        """
        if self._options.stop_within is None or not another:
            return True
        passed = max(self._ranks.gather(FLAG.seconds))
        left = parse_seconds(self._options.stop_within, name="stop_within") - passed
        needed = max(self._ranks.gather(self.saver.seconds_to_save()))
        if needed > left:
            self._say(
                f"no checkpoint of step {self._state.step}: it would take about {needed:.1f} s, and "
                f"{max(left, 0.0):.1f} s of stop_within = {self._options.stop_within!r} are left; the same "
                f"command goes on from {self.saver.resume_point()}"
            )
        return needed <= left

    def wait_for_all(self) -> None:
        """Wait until the checkpoint is on the disk; rank 0's failure is raised on all ranks."""
        if self._layout is not None:
            self.saver.wait()
        self._ranks.first(self.saver.wait)
        self._report_saved()

    def _report_saved(self) -> None:
        name = self.saver.last_good
        if name is not None and name != self._reported:
            self._reported = name
            path = str(self._folder.checkpoints / name)
            self._progress.emit({"event": "checkpoint", "path": path})

    def newest(self, *, upto: int | None = None) -> Restored | None:
        """The newest whole checkpoint up to step `upto`, if any; the same on all ranks."""
        newest = None if upto is None else checkpoint_name(upto)

        def restore() -> Restored | None:
            return self.saver.restore_latest(say=self._say, newest=newest)

        # Of a sharded model each rank reads its pieces.
        return restore() if self._layout is not None else self._ranks.first(restore)

    def publish(self) -> Result:
        self._epoch_lines.end()
        self._update_chart()
        self.saver.wait()
        self._report_saved()
        self._result = self._ranks.first(self._publish)
        return self._result

    def shown(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; trackers get images of the first one of a run."""
        if self._trackers is None or self._state.step or self._state.position:
            return batches
        return self._trackers.shown(self._state.model, batches)

    def before_fork(self) -> None:
        """Let threads finish that may hold a lock when workers are forked."""
        self.saver.wait()
        if self._trackers is not None:
            self._trackers.before_fork()

    def _publish(self) -> Result:
        self._check_in_place()
        result = publish(
            self._folder, self._state.results(), name_of=checkpoint_name, say=self._say
        )
        self._progress.log_event(
            f"finished: the {result.weights} weights, of step {result.step}, are published",
            peak_memory_bytes=peak_bytes(self._state.amp.device),
        )
        if self._evaluation_file is not None:
            self._evaluation_file.write(result.step, say=self._say)
        write_run_report(self._folder.path, say=self._say)
        return result

    def say_resumed(self, restored: Restored) -> None:
        """Say where a resume continues, and what keeps it from an uninterrupted run's bits."""
        self._say(f"going on from step {self._state.step} of {self._parts.plan.total_steps}")
        reasons = changes(restored.meta["exactness"], self.exactness)
        if self._ranks.world > 1 and self._options.compression == "powersgd":
            reasons.append(POWERSGD_FORGETS)
        for reason in reasons:
            self._say(f"not to the same bits: {reason}")

    def end_saves(self) -> None:
        """Wait for the checkpoint being written; if the loop was left, print a failure.

        A generator that is being closed cannot raise, nor see whether an error or `break` ended the loop.
        """
        left = isinstance(sys.exception(), GeneratorExit)
        is_open = self._metrics_log is not None  # a signal or a bad step closes it before
        try:
            self.saver.wait()
            step = self._state.step
            last_good = self.saver.last_good
            if left and is_open and not self.saver.has_failed:
                self._say(
                    f"the loop left run.epochs() at step {step}, by an error or by `break`: the run is not "
                    f"finished, and continues from {last_good} when it is started again; to end it early as "
                    "a finished one, call run.stop()"
                )
        except (SaveFailed, FailedElsewhere) as error:
            if not left:
                raise
            self._say(str(error))

    def fail(self, why: str, *, step: int) -> None:
        """End the run because of an error, with an event and a report."""
        self.close()
        if self._ranks.is_first and self._progress.events is not None:  # None in a replay
            self._progress.log_event(why, step=step)
            write_run_report(self._folder.path, say=self._say)

    def _check_in_place(self) -> None:
        """Refuse to write where the folder is gone, or another one; nothing is written there from then on."""
        try:
            self._folder.check_in_place()
        except InputError:
            self._progress.events = None
            if self._trackers is not None:
                trackers, self._trackers = self._trackers, None
                trackers.abandon()
            raise

    def close(self) -> None:
        """Close metrics.jsonl; trackers get a while to take its last lines."""
        if self._metrics_log is not None:
            self._metrics_log.close()
            self._metrics_log = None
        if self._trackers is not None:
            trackers, self._trackers = self._trackers, None
            trackers.close(self._result)


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def model_parts(model: nn.Module) -> dict[str, Any]:
    """Its class and parameter counts, and those of at most 40 children, as JSON.

    Parameters may be shared, sharded, or without a shape yet.
    """

    def count(module: nn.Module) -> tuple[int, int]:
        known = [p for p in module.parameters() if not isinstance(p, nn.UninitializedParameter)]
        return sum(p.numel() for p in known), sum(p.numel() for p in known if p.requires_grad)

    total, trained = count(model)
    parts = [[name, _class_name(part), *count(part)] for name, part in model.named_children()]
    return {
        "class": _class_name(model),
        "parameters": total,
        "trained": trained,
        "parts": parts[:_MAX_PARTS],
    }


def _class_name(module: nn.Module) -> str:
    """The user's class: FSDP derives one from its own class and the user's."""
    return (type(module).__bases__[-1] if is_sharded(module) else type(module)).__name__


_MARK = "* best"


class EpochLines:
    """Reports each epoch at its end, and each evaluation."""

    def __init__(
        self, state: ResumableState, plan: StepPlan, *, best: str, progress: ProgressBar
    ) -> None:
        self._state, self._plan, self._best, self._progress = state, plan, best, progress
        self._is_reported = True
        self.start()

    def start(self) -> None:
        """Start or continue an epoch; the previous one is reported if it was not evaluated."""
        self.end()
        self._epoch = self._state.epoch
        self._start = time.perf_counter()
        self._is_reported = False
        self.restart()

    def restart(self) -> None:
        """Average the loss from here on: the steps before are undone, or reported."""
        self._loss = 0.0
        self._num_steps = 0
        self._step = self._state.step

    def add(self, row: Mapping[str, float]) -> None:
        """Count the losses since the last line of metrics.jsonl."""
        if "train_loss" in row:
            num_steps = self._state.step - self._step
            self._loss += row["train_loss"] * num_steps
            self._num_steps, self._step = self._num_steps + num_steps, self._state.step

    def evaluation(self, figures: Mapping[str, float]) -> None:
        self._is_reported = True
        is_best = self._best in figures and self._state.best.step == self._state.step
        is_within = self._state.position < self._state.data_length
        self._report(figures, is_best=is_best, is_within=is_within)

    def end(self) -> None:
        if not self._is_reported and self._num_steps:
            self._report({}, is_best=False, is_within=False)
        self._is_reported = True

    def _report(self, figures: Mapping[str, float], *, is_best: bool, is_within: bool) -> None:
        state = self._state
        plan = self._plan
        seconds = time.perf_counter() - self._start
        epochs = math.ceil(plan.total_steps / plan.steps_per_epoch)
        parts = [f"epoch {self._epoch + 1}/{epochs}"]
        if is_within:
            parts.append(f"step {state.step}/{plan.total_steps}")
        row = {"event": "epoch", "epoch": self._epoch, "step": state.step}
        row |= {"epochs": epochs, "steps": plan.total_steps}
        if self._num_steps:
            row["train_loss"] = self._loss / self._num_steps
            parts.append(f"loss {row['train_loss']:.4f}")
        for name, figure in figures.items():
            mark = f" {_MARK}" if is_best and name == self._best else ""
            parts.append(f"{name} {figure:.4f}{mark}")
        parts.append(f"{seconds:.1f} s" if seconds < 60 else clock(seconds))
        self._progress.show("  ".join(parts), green=_MARK if is_best else "")
        self._progress.emit(
            {**row, "metrics": {**figures}, "best": is_best, "seconds": round(seconds, 3)}
        )
