"""Replays a run of `flambeau train` step by step, from a checkpoint or its beginning; writes nothing."""

import contextlib
import dataclasses
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.compare.recorded_facts import RecordedFacts
from flambeau.compare.saved_states import (
    checkpoint_of,
    first_loss_difference,
    read_state,
    step_losses,
    steps_of,
)
from flambeau.compare.step_events import StepEvents
from flambeau.errors import InputError
from flambeau.provenance import Permission
from flambeau.recipes.checkpoints.atomic_checkpoint import CheckpointDamaged
from flambeau.recipes.setup.environment import environment
from flambeau.run.folder.checkpointer import Restored
from flambeau.run.folder.identity import changes, exactness_facts
from flambeau.run.folder.json_file import whole_number
from flambeau.run.folder.micro_batches_file import MicroBatches
from flambeau.run.folder.run_folder import RunFolder
from flambeau.trainer.fit import batch_loss, set_up
from flambeau.trainer.parts.data import Prepared, reopen_data
from flambeau.trainer.parts.device import pick_device, use_float32
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.stored_settings import from_stored
from flambeau.trainer.trial_training import trial_training

_MAX_THREADS = 256  # that a file may request
_MACHINE_FACTS = (
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "cudnn",
    "driver",
    "cuda_build",
    "gpus",
    "cpu",
    "cpu_features",
)


@dataclass(frozen=True)
class Batch:
    """Input of a forward pass, as the loss gets it; `ends_step`: the step's last."""

    step: int
    names: Sequence[str]
    images: Tensor
    targets: Tensor
    ends_step: bool


class ReplayedRun:
    """One of two runs, replayed from where they were equal.

    Args:
        start: step of the checkpoint to start from; None: the beginning.
        temporary: a folder for its checkpoint; the caller removes it.

    Attributes:
        recorded: the run's first checkpoint after the start, if any.
        recorded_start: that of step 0, to compare the beginning with; None if missing or `start` is given.

    Raises:
        InputError: why the run cannot be replayed.
        CheckpointDamaged: one of these has changed since it was saved.
    """

    def __init__(
        self, facts: RecordedFacts, start: int | None, temporary: Path, permission: Permission
    ) -> None:
        self.facts = facts
        self._resources = contextlib.ExitStack()
        folder = facts.folder
        if not facts.is_command:
            raise InputError(
                f"{folder.path} is of a script with its own Run, whose model and data are not in the folder"
            )
        settings = settings_of(folder)
        later = [step for step in steps_of(folder.path) if step > (start or 0)]
        self.recorded = _checkpoint(folder.path, later[0]) if later else None
        begins = start is None and 0 in steps_of(folder.path)
        self.recorded_start = _checkpoint(folder.path, 0) if begins else None
        prepared = reopen_data(settings, folder.dataset, permission)
        self.classes = prepared.facts.classes
        self._train = prepared.train
        self._settings = settings
        first = None if start is None else checkpoint_of(folder.path, start)
        self._check_extension(first)
        if first is None:
            first = _beginning(prepared, temporary)
        try:
            trial = trial_training(
                prepared, replay_from=first, micro_batch=_micro_batch(folder.path, start, first)
            )
            self._training = self._resources.enter_context(trial)
        except InputError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"{first} cannot be put into its model: {why}") from error
        self._run = run = self._training.run
        if self.recorded is not None:  # a rollback lowers the rate from its checkpoint on
            run.state.lr_scale = self.recorded.state.get("lr_scale", run.state.lr_scale)
        self.device = pick_device(settings.device)
        self.is_compiled = settings.compile != "none"
        self.events = StepEvents(self._training.model, modules=not self.is_compiled)
        self.losses: dict[int, list[float]] = {}
        self._threads = self._recorded_threads()
        self._batches = self._all_batches()

    @property
    def step(self) -> int:
        return self._run.state.step

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._run.state.model.named_buffers())

    @property
    def parameters(self) -> list[str]:
        """Names of the optimizer's parameters, in its order."""
        names = {id(p): name for name, p in self._run.state.model.named_parameters()}
        groups = self._run.optimizer.param_groups
        return [names.get(id(p), "?") for group in groups for p in group["params"]]

    def advance(self, *, watched: bool) -> Batch | None:
        """One forward and backward pass, and any step that it ends; None at the end; NotFinite as there."""
        torch.set_num_threads(self._threads)
        use_float32(self._settings.precision, self.device)
        if not watched:
            self.events.close()
        self.events.start()
        pair = next(self._batches, None)
        if pair is None:
            return None
        images, targets = pair
        state = self._run.state
        step = state.step + 1
        names = self._names()
        kept = images.to("cpu", copy=True), targets.to("cpu", copy=True)
        with self.events.forward():
            loss = batch_loss(self._training, images, targets)
        if watched:
            self.events.add("loss", "", "", loss)
        self.losses.setdefault(step, []).append(float(loss.detach().float()))
        self._run.step(loss)
        return Batch(step, names, *kept, ends_step=state.step >= step)

    def state(self) -> Restored:
        now = self._run.state.snapshot(metrics=(0, 0), exactness={})
        ema = None if now.ema is None else dict(now.ema)
        return Restored("replay", dict(now.model), ema, dict(now.state), dict(now.meta))

    def loss_difference(self) -> tuple[int, tuple[float, float]] | None:
        """The first step whose loss differs from the recorded one: (step, (recorded, now))."""
        if self.recorded is None:
            return None
        recorded = step_losses(self.recorded, accumulate=self._settings.accumulate)
        return first_loss_difference(recorded, self.losses)

    def machine_changes(self) -> list[str]:
        """How this machine differs from the training's, as 'cpu X then, Y now'."""
        then = dict(self._exactness())
        here = exactness_facts(self.device, compiled=self.is_compiled)
        now = {**here, "threads": self._threads}
        if "processes" in then:  # else a run in parts, whose bits do not depend on them
            now["processes"] = 1
        changed = changes(then, now) if then else []
        meta = {} if self.recorded is None else self.recorded.meta
        # The run reduced its micro-batch when memory ran out.
        if (fitted := whole_number(meta.get("micro_batch"))) is not None:
            changed += changes(
                {"micro_batch": fitted}, {"micro_batch": self._run.state.micro_batch}
            )
        report = environment()
        report |= report.pop("packages")
        known = {name: self.facts.environment.get(name) for name in _MACHINE_FACTS}
        more = changes(known, {name: report[name] for name in _MACHINE_FACTS})
        return changed + [text for text in more if text not in changed]

    def close(self) -> None:
        self.events.close()
        self._batches.close()
        self._resources.close()

    def _all_batches(self) -> Generator[Any]:
        run = self._run
        model = self._training.model
        normalize = self._training.normalize
        for _ in run.epochs():
            yield from run.batches()
            if self._settings.plateau is None:
                continue  # nothing in the training depends on an evaluation
            for images, targets in run.evaluate(self._training.val):
                with run.autocast():
                    logits = model(normalize(images))
                run.log(**self._training.task.evaluation_figures(logits, targets))

    def _names(self) -> list[str]:
        """Of the images of the batch that waits for its step."""
        micro = self._run.state.micro
        if micro is None:
            return []
        names = self._train.names
        return [names[index] for index in micro.indices[micro.local].tolist()]

    def _exactness(self) -> Any:
        """What decided the bits of the run up to its next checkpoint."""
        meta = {} if self.recorded is None else self.recorded.meta
        recorded = meta.get("exactness")
        return recorded if isinstance(recorded, dict) else self.facts.exactness

    def _recorded_threads(self) -> int:
        threads = self._exactness().get("threads")
        most = min(_MAX_THREADS, 8 * (os.cpu_count() or 1))
        is_count = isinstance(threads, int) and 1 <= threads <= most
        return threads if is_count else torch.get_num_threads()

    def _check_extension(self, first: Path | None) -> None:
        """Refuse steps before an extension, which had the schedule of a shorter run."""
        wanted = self._settings.extend
        if wanted is not None and (
            first is None or read_state(first).state.get("extend") != wanted
        ):
            raise InputError(
                f"{self.facts.folder.path} was extended by {wanted} later, and its steps before that had the "
                "schedule of the shorter run"
            )


def settings_of(folder: RunFolder) -> ResolvedSettings:
    """The settings of a run, without those that change no number.

    Data in a store are kept where this user keeps them, and not where the run says, which may be another's.
    """
    stored = from_stored(folder.read_existing(), folder.config)
    if stored.sync_bn and stored.parts is not None:
        raise InputError(
            f"{folder.path} has parts and sync_bn, so all parts of a step were under way at once, and a "
            "replay looks at one after the other"
        )
    return dataclasses.replace(
        stored, download=False, workers=0, retry_workers=0, cache=None, cache_size=None
    )


def _micro_batch(run: Path, start: int | None, first: Path) -> int | None:
    """Samples per forward pass in the steps after a checkpoint; None if the settings decide."""
    fitting = MicroBatches.read(run)
    if fitting.step <= (start or 0) + 1:
        return fitting.training
    return None if start is None else whole_number(read_state(first).state.get("micro_batch"))


def _checkpoint(run: Path, step: int) -> Restored:
    """A checkpoint of a run whose step is that of its name."""
    folder = checkpoint_of(run, step)
    state = read_state(folder)
    if state.state.get("step") != step or not isinstance(state.state.get("lr_scale", 1.0), float):
        raise CheckpointDamaged(folder, "training_state.pt", f"is not of step {step}")
    return state


def _beginning(prepared: Prepared, folder: Path) -> Path:
    """The checkpoint of step 0 that a new run with these settings writes."""
    run = set_up(prepared.but(shard="none"), folder=folder, bar=False).run
    run.progress.silent = True
    epochs = run.epochs()
    next(epochs)
    epochs.close()  # type: ignore[attr-defined]
    return checkpoint_of(folder, 0)
