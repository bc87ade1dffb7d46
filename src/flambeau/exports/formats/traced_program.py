"""The graph of a model by torch.export, for any number and size of images."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from flambeau.errors import InputError
from flambeau.exports.formats.quiet import quiet
from flambeau.exports.served_model import ServedModel
from flambeau.user_code import first_line, is_function, line_of

MOST_IMAGES, LONGEST_SIDE = 4096, 65535


def example_call(model: ServedModel) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Example arguments, and which of their sizes stay dynamic."""
    side = model.resize.size
    # Two images and three different sides: 0, 1 and equal numbers would be frozen into the graph.
    shape = (2, side + 9, side + 23, model.channels)
    sides = {1: Dim("height", min=1, max=LONGEST_SIDE), 2: Dim("width", min=1, max=LONGEST_SIDE)}
    free = {0: Dim("images", min=1, max=MOST_IMAGES), **sides}
    arguments = torch.zeros(shape, dtype=model.dtype), torch.tensor(shape[1:3])
    return arguments, {"pixels": free, "full_size": None}


def traced_program(model: ServedModel) -> ExportedProgram:
    """Trace the model with dynamic numbers of images, rows and columns.

    InputError: the network's path depends on values or the number of images.
    """
    arguments, free = example_call(model)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(model, arguments, dynamic_shapes=free, strict=False)
    except Exception as error:  # of the user's model, and of torch
        raise InputError(
            f"torch.export cannot make a graph of this model{_location(model, error)}: {first_line(error)}\n"
            "A forward() whose path depends on values, or on the number of images, has no graph: "
            "see https://docs.pytorch.org/docs/stable/export.html"
        ) from error
    for node in program.graph.nodes:
        # source lines with folders of this machine: a third of a small file
        node.meta.pop("stack_trace", None)
    return program


def _location(model: ServedModel, error: Exception) -> str:
    """The line of the user's file that an error has come through, in parentheses."""
    name = model.origin.get("model", "")
    if not is_function(name):
        return ""
    path = Path(name.rpartition(":")[0])
    number = line_of(path, error)
    return f" ({path}, line {number})" if number else ""
