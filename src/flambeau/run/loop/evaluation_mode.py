"""A model as it is evaluated: the averaged weights in evaluation mode, and all as before afterwards."""

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
from flambeau.run.loop.transient_state import Phase, TransientState
from flambeau.run.loop.user_metrics import EvaluationMetrics

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
    """All batches of a loader, each sample once, with the model as it is evaluated.

    Args:
        loader: of the data.
        loop: learns the size of each batch.
        ranks: among which the data are shared.
        model: to evaluate.
        ema: its average, which stands in the model meanwhile.
        guard: cuts batches that do not fit.
        means: gets what is logged: all under 0, or where the batches are parts of a step, by the part.
        may_stop: a run that is asked to stop leaves the evaluation.
    """
    is_sharded = parts.shards is not None
    progress = parts.progress
    with progress.evaluates(), evaluation_mode(model, ema, say=progress.say):
        ranks.beat("evaluating")
        for micro in parts.reader.to_device(loader.stream(epoch=0, position=0, epochs=1)):
            if not micro.size and not is_sharded:
                continue  # all of them unreadable
            loop.evaluated = means.setdefault(micro.sum_key, {})
            for data in guard.evaluated_parts(micro, loader):
                ranks.beat("evaluating")
                yield data
            if may_stop and not is_sharded and ranks.stops_next:
                break  # the run stops, and its figures are not recorded


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """Randomness inside neither depends on what was before nor changes what comes after."""
    generators = rng_state()
    try:
        yield
    finally:
        set_rng_state(generators)


@contextlib.contextmanager
def beside_training(loop: TransientState, metrics: EvaluationMetrics) -> Iterator[None]:
    """Training finds its generators, and the batch whose values it logs, as they were before.

    Args:
        metrics: count what is logged inside.
    """
    kept = loop.num_samples, loop.phase, loop.held_back
    loop.phase = Phase.BETWEEN
    loop.held_back = []
    try:
        with generators_restored(), metrics.counting():
            yield
    finally:
        loop.evaluated = None
        loop.num_samples, loop.phase, loop.held_back = kept


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
