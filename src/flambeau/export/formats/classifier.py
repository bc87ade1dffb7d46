"""What every file of an exported model is, once it is opened."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from flambeau.export.served_model import ServedModel
from flambeau.provenance import Permission

Classifier: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Pixels (N, H, W, C) uint8 and full size (2,) int64, as of `ServedModel`, to logits (N, K) float32."""


@dataclass(frozen=True)
class ModelFormat:
    """One kind of file.

    Attributes:
        name: what --format takes.
        file: its name in the folder.
        require: given the name of the run's model, raises InputError where the machine lacks what writes or
            opens the file, or the format cannot hold that model.
        write: writes the module to a path. Raises InputError where the model or the machine cannot.
        open: opens a file, for so many threads. What is code in it runs only with the permission. Raises
            InputError where it is damaged, may not be run, or what reads it is not installed.
        check: looks at what a file holds without running it, and says why it is no plain model; None where
            there is nothing to see but its bytes.
        is_code: the file is a program of this processor.
    """

    name: str
    file: str
    require: Callable[[str], None]
    write: Callable[[ServedModel, Path], None]
    open: Callable[[Path, int, Permission], Classifier]
    check: Callable[[Path], str | None] | None = None
    is_code: bool = False


def first_output(module: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> Classifier:
    """Of what gives logits and probabilities, the logits."""

    def classify(pixels: Tensor, full_size: Tensor) -> Tensor:
        with torch.inference_mode():
            return module(pixels.contiguous(), full_size)[0]

    return classify
