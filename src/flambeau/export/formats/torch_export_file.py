"""model.pt2 of torch.export: a graph that any torch of this version or later loads, on any machine."""

import io
from pathlib import Path

import torch

from flambeau.errors import InputError
from flambeau.export.formats.classifier import Classifier, first_output
from flambeau.export.formats.quiet import quiet
from flambeau.export.formats.traced_program import traced_program
from flambeau.export.served_model import ServedModel
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file


def write_torch_export(model: ServedModel, path: Path) -> None:
    """Trace the model and save its graph with its weights.

    Raises:
        InputError: the model has no graph.
        OSError: the disk is full or failing.
    """
    program = traced_program(model)
    file = io.BytesIO()  # torch's own writer aborts the process where a disk is full
    with quiet():
        torch.export.save(program, file)
    write_file(path, file.getvalue())


def open_torch_export(path: Path, threads: int) -> Classifier:
    """Load the graph; it runs on torch's own threads.

    Raises:
        InputError: damaged, or of a later torch.
    """
    del threads
    try:
        with quiet():
            module = torch.export.load(path).module()
    except Exception as error:  # zip, JSON, schema versions
        raise InputError(f"{path} cannot be loaded by torch.export: {error}") from error

    return first_output(module)
