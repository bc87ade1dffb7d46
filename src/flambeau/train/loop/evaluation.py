"""A model as it is evaluated: the averaged weights in evaluation mode, and all as before afterwards."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from flambeau.recipes.setup.seeding import rng_state, set_rng_state
from flambeau.recipes.training.ema import EMA


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """Randomness inside neither depends on what was before nor changes what comes after."""
    generators = rng_state()
    try:
        yield
    finally:
        set_rng_state(generators)


@contextlib.contextmanager
def evaluation_mode(
    model: nn.Module, ema: EMA | None, *, say: Callable[[str], None]
) -> Iterator[None]:
    """No gradients, all modules in evaluation mode, the averaged weights in the model if there are any.

    Args:
        model: to evaluate.
        ema: its average.
        say: takes a line for the user where the loop is left early.
    """
    modes = [(module, module.training) for module in model.modules()]
    averaged = contextlib.nullcontext() if ema is None else ema.applied()
    model.eval()
    try:
        # Not inference_mode: tables that a model makes and keeps may be needed for gradients.
        with averaged, torch.no_grad():
            yield
    except GeneratorExit:
        say("the loop left `for ... in run.evaluate(...)` before its end: none of it is recorded")
        raise
    finally:
        for module, training in modes:  # one by one: some may be frozen in evaluation mode
            module.training = training
