"""The model that a command line names (a name, FILE.py:FUNCTION or a run), and example inputs for it."""

import re
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.data.stores.address import is_address
from flambeau.errors import InputError, nearest
from flambeau.inspection.model_catalog import (
    DEFAULT_SIZE,
    made_for,
    model_with_values,
    model_without_values,
)
from flambeau.trainer.parts.model import build_model
from flambeau.trainer.prediction.trained_model import load_trained
from flambeau.user_code import is_function

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
_MOST_DIMENSIONS = 12
_MOST_NUMBERS = 2**33  # 32 GiB of float32; nothing is allocated


def named_model(
    name: str,
    inputs: Sequence[str],
    *,
    batch: int,
    values: bool,
    trust: bool,
    say: Callable[[str], None],
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model (a name, FILE.py:FUNCTION or a run), and args and kwargs for it on the meta device.

    Without `inputs` (as of --input) images of the model's size. `values`: weights need values. `trust`: run
    the model's file that a run names, wherever it comes from.
    """
    args, kwargs = _example_inputs(inputs)
    model, (channels, side) = _loaded(
        name, tuple(args[0].shape) if args else (), values=values, trust=trust, say=say
    )
    if not args and not kwargs:
        args, kwargs = _example_inputs([f"{batch},{channels},{side},{side}"])
    return model, args, kwargs


def _loaded(
    name: str, shape: tuple[int, ...], *, values: bool, trust: bool, say: Callable[[str], None]
) -> tuple[nn.Module, tuple[int, int]]:
    """The model with (channels, side) of its images; `shape` is that of the first input, if there is one."""
    if is_address(name) or Path(name).is_dir():
        trained = load_trained(name, trust=trust, say=say)
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


def _example_inputs(words: Sequence[str]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Args and kwargs from '1,3,224,224', 'mask=1,77:bool' or 'batch.ids=1,77:int64' (a dict)."""
    args: list[Tensor] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, separator, shape = word.rpartition("=")
        if not separator:
            args.append(_example(shape, word))
            continue
        *outer, last = name.split(".")
        if not re.fullmatch(r"[^\W\d]\w*(\.\w+)*", name):
            raise InputError(f"--input {word}: {name!r} is no name of an argument")
        entries = kwargs
        for part in outer:
            entries = entries.setdefault(part, {})
            if not isinstance(entries, dict):
                raise InputError(f"--input {word}: {part!r} is given as a tensor, too")
        if last in entries:
            raise InputError(f"--input {word}: {name!r} is given twice")
        entries[last] = _example(shape, word)
    return tuple(args), kwargs


def _example(text: str, word: str) -> Tensor:
    sizes, _, dtype = text.partition(":")
    if not re.fullmatch(r"\d{1,10}(,\d{1,10})*", sizes):
        raise InputError(
            f"--input {word}: give sizes such as 1,3,224,224; with a dtype 1,77:int64; by name mask=1,77:bool"
        )
    if dtype and dtype not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise InputError(
            f"--input {word}: no dtype {dtype!r}{nearest(dtype, _DTYPES)} (known: {known})"
        )
    shape = [int(size) for size in sizes.split(",")]
    if 0 in shape:
        raise InputError(f"--input {word}: sizes must be at least 1")
    if len(shape) > _MOST_DIMENSIONS or prod(shape) > _MOST_NUMBERS:
        raise InputError(
            f"--input {word}: at most {_MOST_DIMENSIONS} sizes and {_MOST_NUMBERS:,} numbers"
        )
    return torch.empty(shape, dtype=_DTYPES[dtype or "float32"], device="meta")
