"""The function in a user's file that makes a model again: `builder` of a run, `--model` of a command.

N: images, C: channels, S: side of the images in pixels, K: classes.
"""

import contextlib
import hashlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.data.drop_in.declared_preprocessing import Preprocessing
from flambeau.errors import InputError
from flambeau.run.folder.checkpointer import EXTRA_STATE
from flambeau.run.loop.evaluation_mode import generators_restored
from flambeau.run.options.run_options import RunOptions
from flambeau.user_code import (
    first_line,
    load_function,
    missing_arguments,
    running_user_code,
)

_building: ContextVar[str | None] = ContextVar("building", default=None)


def build_from_file(
    name: str, *, what: str, num_classes: int, channels: int, image_size: int
) -> nn.Module:
    """Call FILE.py:FUNCTION with what it asks for of the other arguments, by name.

    `what`: how the user gave it, such as '--model'. InputError: no such function, it fails, or returns no
    module.
    """
    with _while_building(name):
        function = load_function(name, what=what)
        offered = {"num_classes": num_classes, "channels": channels, "image_size": image_size}
        parameters = inspect.signature(function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            wanted = offered
        else:
            by_name = {n for n, p in parameters.items() if p.kind is not p.POSITIONAL_ONLY}
            wanted = {k: v for k, v in offered.items() if k in by_name}
        missing = missing_arguments(function, wanted)
        if missing:
            raise InputError(
                f"{name} asks for {missing[0]!r}; it is called with any of {', '.join(offered)}, by name"
            )
        with running_user_code(Path(name.rpartition(":")[0])):
            model = function(**wanted)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} must return a torch.nn.Module, it returned {type(model).__name__}"
        )
    return model


@contextlib.contextmanager
def _while_building(name: str) -> Iterator[None]:
    token = _building.set(name)
    try:
        yield
    finally:
        _building.reset(token)


def check_not_building() -> None:
    """Refuse a run that begins when a builder's file is imported: it would train within itself."""
    name = _building.get()
    if name is not None:
        raise InputError(
            f"{name.rpartition(':')[0]} trains when it is imported, and {name} is imported to make the "
            'model\nPut what trains below `if __name__ == "__main__":`, or the function into a file of '
            "its own"
        )


def model_file_sha256(name: str) -> str | None:
    """The hash of the file in 'FILE.py:FUNCTION'; None for other names."""
    path = Path(name.rpartition(":")[0])
    if ".py:" not in name or not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def use_record(options: RunOptions) -> dict[str, Any]:
    """What config.toml says of how the model is made and used; empty without a builder."""
    if options.builder is None:
        return {}
    assert isinstance(options.preprocess, Preprocessing)
    return {
        "builder": options.builder,
        "builder_sha256": model_file_sha256(options.builder),
        "classes": [*(options.classes or ())],
        "preprocess": options.preprocess.as_table(),
    }


def check_builder(model: nn.Module, options: RunOptions) -> None:
    """Refuse a builder of another model than the trained one, or for other images or classes.

    The model is made once, on the CPU; random generators are restored.
    """
    if options.builder is None:
        return
    assert isinstance(options.preprocess, Preprocessing)
    size, channels = options.preprocess.image_size, options.preprocess.channels
    num_classes = len(options.classes or ())
    with generators_restored(), torch.device("cpu"), torch.no_grad():
        built = build_from_file(
            options.builder,
            what="builder",
            num_classes=num_classes,
            channels=channels,
            image_size=size,
        )
        _check_same(built, model, options.builder)
        try:
            logits = built.cpu().eval()(torch.zeros(1, channels, size, size))
        except Exception as error:
            raise InputError(
                f"builder = {options.builder!r}: its model fails on 1 x {channels} x {size} x {size}, which "
                f"preprocess says: {type(error).__name__}: {first_line(error)}"
            ) from error
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != (1, num_classes):
        raise InputError(
            f"builder = {options.builder!r}: its model must give logits of shape (N, {num_classes}), one per "
            f"name in classes; on 1 x {channels} x {size} x {size} it gives {shape}"
        )


def _check_same(built: nn.Module, model: nn.Module, name: str) -> None:
    there = built.state_dict()
    here = model.state_dict()
    why = None
    for key in (*here, *there):
        if key.endswith(EXTRA_STATE):
            raise InputError(
                f"builder = {name!r}: '{key}' is not a tensor, so model.safetensors does not hold it, and "
                "the model could not be made again from that file; leave builder out"
            )
        if key not in there:
            why = f"it has no '{key}'"
        elif key not in here:
            why = f"its '{key}' is not in the model of this run"
        elif there[key].shape != here[key].shape:
            shapes = tuple(there[key].shape), tuple(here[key].shape)
            why = f"its '{key}' is {shapes[0]}, and {shapes[1]} in the model of this run"
        if why is not None:
            raise InputError(f"builder = {name!r} makes another model than this run trains: {why}")
