"""An evaluation: averaged weights in evaluation mode, and everything as before at its end."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from flambeau.data.loading.loader import Loader
from flambeau.data.loading.user_dataloader import UserDataLoader
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.setup.seeding import rng_state, set_rng_state
from flambeau.recipes.training.ema import EMA
from flambeau.recipes.training.metrics import MeanOnDevice
from flambeau.run.loop.memory_guard import MemoryGuard
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.state import TransientState

BETWEEN_PARTS = (
    "an evaluation between the micro-batches of a step chooses no best weights: evaluate after "
    "run.step(loss), where run.state.step has changed"
)


def evaluated_batches(
    loader: Loader | UserDataLoader,
    parts: RunParts,
    loop: TransientState,
    *,
    ranks: Ranks,
    model: nn.Module,
    ema: EMA | None,
    guard: MemoryGuard,
    means: dict[int, dict[str, MeanOnDevice]],
    may_stop: bool,
) -> Iterator[Any]:
    """The batches of a loader, each sample once, with the model in evaluation mode.

    Args:
        ema: its average, which the model has meanwhile.
        guard: cuts batches that do not fit.
        means: receives the logged means: all under 0, or by part where the batches are parts of a step.
        may_stop: `run.stop()` or a signal ends the evaluation early.
    """
    is_sharded = parts.shards is not None
    progress = parts.progress
    with progress.evaluates(), evaluation_mode(model, ema, say=progress.say):
        ranks.beat("evaluating")
        for micro in parts.reader.to_device(loader.stream(epoch=0, position=0, epochs=1)):
            if not micro.size and not is_sharded:
                continue  # all samples were unreadable
            loop.evaluated = means.setdefault(micro.sum_key, {})
            for data in guard.evaluated_parts(micro, loader):
                ranks.beat("evaluating")
                yield data
            if may_stop and not is_sharded and ranks.stops_next:
                break  # the run stops, and the figures are not recorded


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """Restore all random generators at the end."""
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
        say: takes a line for the user if the loop is left early.
    """
    modes = [(module, module.training) for module in model.modules()]
    averaged = contextlib.nullcontext() if ema is None else ema.applied()
    model.eval()
    try:
        # Not inference_mode: a model may cache tensors that training then needs gradients through.
        with averaged, torch.no_grad():
            yield
    except GeneratorExit:
        say("the loop left `for ... in run.evaluate(...)` before its end: none of it is recorded")
        raise
    finally:
        for module, training in modes:  # one by one: some may be in evaluation mode for good
            module.training = training
