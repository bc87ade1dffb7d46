"""The graph of a model by torch.export, with any number and size of images."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from flambeau.errors import InputError
from flambeau.export.formats.quiet import quiet
from flambeau.export.served_model import ServedModel
from flambeau.user_code import first_line, is_function, line_of

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
        with quiet(), torch.no_grad():
            program = torch.export.export(model, arguments, dynamic_shapes=free, strict=False)
    except Exception as error:  # what a model of the user's raises, and torch's many own exceptions
        raise InputError(
            f"torch.export cannot make a graph of this model{_place(model, error)}: {first_line(error)}\n"
            "A forward() whose path depends on values, or on the number of images, has no graph: "
            "see https://docs.pytorch.org/docs/stable/export.html"
        ) from error
    for node in program.graph.nodes:
        # source lines of this machine, with their places: a third of a small file
        node.meta.pop("stack_trace", None)
    return program


def _place(model: ServedModel, error: Exception) -> str:
    """The line of the user's own file that an error has come through."""
    name = model.origin.get("model", "")
    if not is_function(name):
        return ""
    path = Path(name.rpartition(":")[0])
    number = line_of(path, error)
    return f" ({path}, line {number})" if number else ""
