"""Training steps to measure: of a model on random numbers, or of a run on its own data."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.loader import Loader, ReadOptions
from flambeau.errors import InputError
from flambeau.inspection.watched_forward import tensors_of, with_values
from flambeau.recipes.memory.memory_budget import mean_of_all
from flambeau.run.folder.run_folder import RunFolder
from flambeau.trainer.fit import Training
from flambeau.trainer.parts.data import reopen_data
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.stored_settings import from_stored
from flambeau.trainer.trial_training import trial_training
from flambeau.user_code import first_line

Part = Callable[[str], AbstractContextManager[Any]]
"""A context manager for a named part of a step."""

WAIT = "wait for data"
"""The part of a run's step that waits for its data."""
_LONG = "1000000st"  # so that no run ends before it is measured


@dataclass(frozen=True)
class Steps:
    """Makes one training step after another.

    Attributes:
        step: makes one; its argument wraps each part.
        about: what a step is, in words.
        read: endless batches of the run's data, by so many workers, None: the run's; None for a model on
            random numbers.
        args, kwargs: of the model alone, tensors in any nesting, perhaps on 'meta'.
        has: advice of the checklist that the run follows.
    """

    step: Callable[[Part], None]
    model: nn.Module
    device: torch.device
    about: str
    read: Callable[[int | None], Generator[Any]] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    has: frozenset[str] = frozenset()


def no_part(_: str) -> AbstractContextManager[Any]:
    """Does nothing around a part of a step."""
    return contextlib.nullcontext()


def steps_of_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    fused: bool = False,
    precision: torch.dtype | None = None,
) -> Steps:
    """Forward pass, the mean of all outputs as the loss, backward pass and AdamW.

    Args:
        args, kwargs: tensors in any nesting; those on 'meta' get random values.

    Raises:
        InputError: nothing to train, or the first step fails.
    """
    model.train().to(device)
    given = with_values((tuple(args), dict(kwargs)))
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), given)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("no parameter of the model needs a gradient: there is no training step")
    optimizer = torch.optim.AdamW(parameters, fused=fused or None)

    def step(part: Part) -> None:
        with part("forward"), torch.autocast(device.type, precision, enabled=precision is not None):
            loss = mean_of_all(model(*args, **kwargs))
        with part("backward"):
            loss.backward()
        with part("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors_of((args, kwargs)))
    about = f"{type(model).__name__}, random input {shapes}, AdamW"
    steps = Steps(step, model, device, about, args=tuple(args), kwargs=kwargs)
    try:
        step(no_part)
    except Exception as error:
        raise InputError(
            f"a training step of {type(model).__name__} fails: {type(error).__name__}: {first_line(error)}"
        ) from error
    return steps


@contextlib.contextmanager
def steps_of_run(
    path: Path, *, trust: bool = False, say: Callable[[str], None] = lambda _: None
) -> Iterator[Steps]:
    """Steps as a run makes them, with its data, loss, precision and optimizer; the run is not changed.

    Weights are new, the model is not compiled, and a temporary folder is removed at the end.
    """
    folder = RunFolder(path)
    stored = folder.read_existing()
    if "model" not in stored:
        raise InputError(
            f"{path} is of a training loop of your own (the class Run): it cannot be run from here\n"
            "Give the command that trains it: flambeau doctor -- python train.py"
        )
    settings = from_stored(stored, folder.config)
    prepared = reopen_data(
        settings, folder.dataset, folder.permission(stored, trust=trust, say=say)
    )
    prepared = prepared.but(
        duration=_LONG,
        pretrained=False,
        weights=None,
        device="auto",
        shard="none",
        compression="none",
        compile="none",
        stop_within=None,
        verify_steps="0",
        mirror=None,
        parts=None
        if settings.sync_bn
        else settings.parts,  # with it parts are not computed in turn
    )
    alone = prepared.settings
    with trial_training(prepared) as training:
        pin = training.run.device.type == "cuda"

        def read(workers: int | None) -> Generator[Any]:
            reading = ReadOptions(alone.workers if workers is None else workers, pin_memory=pin)
            layout = BatchLayout(alone.batch_size)
            loader = Loader(training.train, layout, seed=1, reading=reading)
            yield from loader.stream(epoch=0, position=0)

        side = alone.image_size
        example = torch.empty(alone.batch_size, prepared.facts.channels, side, side, device="meta")
        step = _step_of(training)
        device = training.run.device
        has = {"channels_last", "pinned memory", "non_blocking"}
        if settings.precision in ("bf16", "fp16"):
            has.add("bf16")
        if any(group.get("fused") for group in training.run.optimizer.param_groups):
            has.add("fused optimizer")
        about = _about(settings)
        yield Steps(step, training.model, device, about, read, (example,), has=frozenset(has))


def _about(settings: ResolvedSettings) -> str:
    text = (
        f"{settings.model}, {settings.batch_size} images of {settings.image_size} pixels, "
        f"{settings.optimizer}, {settings.precision}, {settings.workers} workers"
    )
    # The modules of a compiled model are not called separately.
    return text if settings.compile == "none" else f"{text}, not compiled"


def _step_of(training: Training) -> Callable[[Part], None]:
    run = training.run

    def endless() -> Iterator[Any]:
        for _ in run.epochs():
            yield from run.batches()

    batches = endless()

    def step(part: Part) -> None:
        with part(WAIT):
            images, targets = next(batches)
        with part("forward"):
            loss = training.loss_of(images, targets, step=run.state.step)
        with part("backward and optimizer"):
            run.step(loss)

    return step
