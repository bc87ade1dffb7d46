"""A model by the words of a command line, a name, a function in a file or a run, and an input for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from flambeau.inspection.example_input import example_inputs
from flambeau.inspection.model_facts import (
    DEFAULT_SIZE,
    made_for,
    model_with_values,
    model_without_values,
)
from flambeau.trainer.parts.model import build_model
from flambeau.trainer.prediction.trained_model import load_trained
from flambeau.user_code import is_function


def named_model(
    name: str,
    inputs: Sequence[str],
    *,
    batch: int,
    values: bool,
    trust: bool,
    say: Callable[[str], None],
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model and its arguments, which have no values.

    Args:
        name: as the user wrote it.
        inputs: as of `example_inputs`; if there are none, images of the size that the model is made for.
        batch: how many of them.
        values: whether the model has to run.
        trust: run the file that a run names as its model, wherever the run comes from.
        say: takes lines for the user.

    Raises:
        InputError: no such model, or an input that cannot be read.
        UntrustedCode: the model of a run is in a file, which may not be run.
    """
    args, kwargs = example_inputs(inputs)
    model, (channels, side) = _loaded(
        name, tuple(args[0].shape) if args else (), values=values, trust=trust, say=say
    )
    if not args and not kwargs:
        args, kwargs = example_inputs([f"{batch},{channels},{side},{side}"])
    return model, args, kwargs


def _loaded(
    name: str, shape: tuple[int, ...], *, values: bool, trust: bool, say: Callable[[str], None]
) -> tuple[nn.Module, tuple[int, int]]:
    """With the channels and the side of images that it takes; `shape` is that of its first input."""
    if Path(name).is_dir():
        trained = load_trained(Path(name), trust=trust, say=say)
        return trained.model, (trained.facts.channels, trained.image_size)
    channels, side = (shape[1], shape[-1]) if len(shape) == 4 else (3, None)
    if is_function(name):
        side = side or DEFAULT_SIZE
        model = build_model(name, num_classes=1000, channels=channels, image_size=side)
    else:
        make = model_with_values if values else model_without_values
        model = make(name, channels=channels, image_size=side)
        side = side or made_for(name, model)
    return model, (channels, side)
