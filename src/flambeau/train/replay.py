"""Runs the step again that stopped a run, and says where in the model it goes wrong first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flambeau.data.errors import InputError
from flambeau.train.config import from_stored
from flambeau.train.fit import Training, set_up
from flambeau.train.folder import RunFolder
from flambeau.train.not_finite import BadStep, NotFinite
from flambeau.train.resolve import reopen_data

_SHOWN = 8  # lines about what is not finite; a bad loss makes every gradient so


def replay_step(path: Path, *, say: Callable[[str], None]) -> int:
    """Go from the checkpoint before the step to the step itself, exactly as the run did.

    Args:
        path: the file that the stopped run has written.
        say: takes lines for the user.

    Returns:
        0 if the step was bad again, 1 if it was not.

    Raises:
        InputError: the file, the run or its data are not there any more.
    """
    bad = BadStep.read(path)
    folder = RunFolder(path.parent)
    stored = folder.read_config()
    if stored is None or "model" not in stored:
        raise InputError(f"{path} is not in the folder of a `flambeau train` run, and needs that")
    if bad.checkpoint is None:
        raise InputError(f"{path} names no checkpoint to start from")
    settings = from_stored(stored, folder.config)
    train, val, facts = reopen_data(settings, folder.dataset)
    training = set_up(
        settings,
        facts,
        train,
        val,
        folder=folder.path,
        replay_from=folder.checkpoints / bad.checkpoint,
    )
    run = training.run
    say(f"from step {run.state.step} to step {bad.step} of {folder.path}")
    try:
        findings = _run_to(training, bad.step)
    finally:
        run.close()
    for finding in findings[:_SHOWN]:
        say(finding)
    if len(findings) > _SHOWN:
        say(f"... and {len(findings) - _SHOWN} more")
    samples = ", ".join(bad.samples[:3]) + (" ..." if len(bad.samples) > 3 else "")
    say(
        f"step {bad.step} is {'bad again' if findings else 'not bad this time'}; its samples: {samples}"
    )
    return 0 if findings else 1


def _run_to(training: Training, step: int) -> list[str]:
    """What is not finite in this step, in the order in which it happens."""
    run, findings = training.run, list[str]()
    for _ in run.epochs():
        for images, targets in run.batches():
            last = run.state.step == step - 1
            handles = _watch(training.model, findings) if last else []
            loss = training.loss_of(images, targets)
            if last and not torch.isfinite(loss):
                findings.append(f"the loss is {loss.item()}")
            try:
                run.step(loss)
            except NotFinite:
                assert last
            for handle in handles:
                handle.remove()
            if run.state.step == step:
                return findings
    raise InputError(f"the run has no step {step}")


def _watch(model: nn.Module, findings: list[str]) -> list[RemovableHandle]:
    """Hooks that note the first module with an output, and every parameter with a gradient, not finite."""

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not findings and not torch.isfinite(output).all():
                findings.append(
                    f"forward: the output of '{name}' ({type(module).__name__}) is not finite"
                )

        return hook

    def gradient_of(name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if not torch.isfinite(gradient).all():
                findings.append(f"backward: the gradient of '{name}' is not finite")

        return hook

    leaves = [(n, m) for n, m in model.named_modules() if not list(m.children())]
    handles = [m.register_forward_hook(after(n)) for n, m in leaves]
    return handles + [
        p.register_hook(gradient_of(n)) for n, p in model.named_parameters() if p.requires_grad
    ]
