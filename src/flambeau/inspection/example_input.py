"""Example inputs of a model, from the words of a command line: sizes, and a dtype that is not float32."""

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from flambeau.errors import InputError, nearest

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
_MOST_NUMBERS = 2**33  # 32 GiB of float32, which are not allocated


def example_inputs(words: Sequence[str]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of a model without values, on the meta device.

    Args:
        words: '1,3,224,224', '1,77:int64', 'mask=1,77:bool' for an argument by name, 'batch.ids=1,77:int64'
            for an entry of one that is a dict.

    Raises:
        InputError: words of another form.
    """
    args: list[Tensor] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, found, shape = word.rpartition("=")
        if not found:
            args.append(_example(shape, word))
            continue
        *outer, last = name.split(".")
        if not re.fullmatch(r"[^\W\d]\w*(\.\w+)*", name):
            raise InputError(f"--input {word}: {name!r} is no name of an argument")
        place = kwargs
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise InputError(f"--input {word}: {part!r} is given as a tensor, too")
        if last in place:
            raise InputError(f"--input {word}: {name!r} is given twice")
        place[last] = _example(shape, word)
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
