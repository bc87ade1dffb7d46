"""The graph of a model by torch.export, with any number and size of images."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from flambeau.errors import InputError
from flambeau.export.served_model import ServedModel

MOST_IMAGES, LONGEST_SIDE = 4096, 65535


def example_call(model: ServedModel) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Arguments to trace the model with, and which of their sizes stay free."""
    side = model.resize.size
    # Two images and three different sides: 0, 1 and equal numbers would be frozen into the graph.
    shape = (2, side + 9, side + 23, model.channels)
    sides = {1: Dim("height", min=1, max=LONGEST_SIDE), 2: Dim("width", min=1, max=LONGEST_SIDE)}
    free = {0: Dim("images", min=1, max=MOST_IMAGES), **sides}
    arguments = torch.zeros(shape, dtype=torch.uint8), torch.tensor(shape[1:3])
    return arguments, {"pixels": free, "full_size": None}


def traced_program(model: ServedModel) -> ExportedProgram:
    """Trace the model; its numbers of images, rows and columns stay free.

    Raises:
        InputError: the network depends on values, or on the number of images, in a way that no graph holds.
    """
    arguments, free = example_call(model)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch about torch
            return torch.export.export(model, arguments, dynamic_shapes=free, strict=False)
    except Exception as error:  # what a model of the user's raises, and torch's many own exceptions
        raise InputError(
            f"torch.export cannot make a graph of this model: {_first_line(error)}\n"
            "A forward() whose path depends on values, or on the number of images, has no graph: "
            "see https://docs.pytorch.org/docs/stable/export.html"
        ) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300] or (
        type(error).__name__
    )
