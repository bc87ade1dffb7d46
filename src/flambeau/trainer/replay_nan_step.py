"""Replays the step that stopped a run, and says where in the model it goes wrong first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from flambeau.errors import InputError
from flambeau.run.folder.micro_batches_file import MicroBatches
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.loop.nan_guard import BadStep
from flambeau.trainer.fit import Training
from flambeau.trainer.parts.data import reopen_data
from flambeau.trainer.settings.stored_settings import from_stored
from flambeau.trainer.trial_training import trial_training


def replay_nan_step(path: Path, *, trust: bool = False, say: Callable[[str], None]) -> int:
    """Run from the checkpoint before the step to the step itself, exactly as the run did.

    0 if the step was bad again, 1 if not; NotFinite: an earlier one is. `trust`: as for `load_trained`.
    """
    bad = BadStep.read(path)
    folder = RunFolder(path.parent)
    stored = folder.read_config()
    if stored is None or "model" not in stored:
        raise InputError(f"{path} is not in the folder of a `flambeau train` run, and needs that")
    if bad.checkpoint is None:
        raise InputError(f"{path} names no checkpoint to start from")
    if not (folder.checkpoints / bad.checkpoint).exists():
        raise InputError(
            f"{bad.checkpoint}, from which {path.name} would be run again, has been removed since (--keep)"
        )
    settings = from_stored(stored, folder.config)
    prepared = reopen_data(
        settings, folder.dataset, folder.permission(stored, trust=trust, say=say)
    )
    with trial_training(
        prepared,
        replay_from=folder.checkpoints / bad.checkpoint,
        micro_batch=MicroBatches.read(folder.path).training,
    ) as training:
        state = training.run.state
        say(f"from step {state.step} to step {bad.step} of {folder.path}")
        state.lr_scale = bad.lr_scale
        findings = _run_to(training, bad)
    for finding in findings:
        say(finding)
    samples = ", ".join(bad.samples[:3]) + (" ..." if len(bad.samples) > 3 else "")
    say(
        f"step {bad.step} is {'bad again' if findings else 'not bad this time'}; its samples: {samples}"
    )
    return 0 if findings else 1


def _run_to(training: Training, bad: BadStep) -> list[str]:
    """What is not finite in the bad step, in order of occurrence."""
    run = training.run

    def loss_of(batch: Any) -> Tensor:
        return training.loss_of(*batch, step=run.state.step)

    for _ in run.epochs():
        for step in run.steps(loss_of, halves=False):
            if step < bad.step:
                continue
            if not run.state.is_bad:
                return []
            return run.nan_guard.explain(step - 1) or ["a gradient or its norm is NaN or infinite"]
    raise InputError(f"the run has no step {bad.step}")
