"""What a format of exported models provides, and the function that an opened file is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from flambeau.exports.served_model import ServedModel
from flambeau.provenance import Permission

Classifier: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Pixels (N, H, W, C) uint8, or float32 levels of 16 bits, and full size (2,) int64, as of `ServedModel`,
to logits (N, K) float32."""


@dataclass(frozen=True)
class ModelFormat:
    """A format of exported models.

    Attributes:
        require: takes the model's name; InputError: this machine cannot write or open the format, or it
            cannot hold the model.
        write: writes a model to a path; InputError: not possible.
        open: opens a file for a number of threads; code in it runs only with the permission. InputError:
            damaged, may not be run, or a missing package.
        check: why a file, which is not run, is no plain model; None: no such check.
        is_code: the file is machine code.
    """

    name: str
    file: str
    require: Callable[[str], None]
    write: Callable[[ServedModel, Path], None]
    open: Callable[[Path, int, Permission], Classifier]
    check: Callable[[Path], str | None] | None = None
    is_code: bool = False


def first_output(module: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> Classifier:
    """A function that returns the logits of a module that returns (logits, probabilities)."""

    def classify(pixels: Tensor, full_size: Tensor) -> Tensor:
        with torch.inference_mode():
            return module(pixels.contiguous(), full_size)[0]

    return classify
