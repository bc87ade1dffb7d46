"""An evaluation: averaged weights in evaluation mode, and everything as before at its end."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from flambeau.recipes.setup.seeding import rng_state, set_rng_state
from flambeau.recipes.training.ema import EMA
from flambeau.run.loop.progress_bar import ProgressBar


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    generators = rng_state()
    try:
        yield
    finally:
        set_rng_state(generators)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module, ema: EMA | None, progress: ProgressBar) -> Iterator[None]:
    """No gradients, all modules in evaluation mode, any averaged weights in the model."""
    modes = [(module, module.training) for module in model.modules()]
    averaged = contextlib.nullcontext() if ema is None else ema.applied()
    model.eval()
    try:
        # Not inference_mode: a model may cache tensors that training then needs gradients through.
        with progress.evaluates(), averaged, torch.no_grad():
            yield
    except GeneratorExit:
        progress.say(
            "the loop left `for ... in run.evaluate(...)` before its end: none of it is recorded"
        )
        raise
    finally:
        for module, training in modes:  # one by one: some may be in evaluation mode for good
            module.training = training
