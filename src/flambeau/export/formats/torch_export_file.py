"""model.pt2 of torch.export: a graph that any torch of this version or later loads, on any machine."""

import warnings
from pathlib import Path

import torch

from flambeau.errors import InputError
from flambeau.export.formats.classifier import Classifier
from flambeau.export.formats.traced_program import traced_program
from flambeau.export.served_model import ServedModel


def write_torch_export(model: ServedModel, path: Path) -> None:
    """Trace the model and save its graph with its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(traced_program(model), path)


def open_torch_export(path: Path, threads: int) -> Classifier:
    """Load the graph; it runs on torch's own threads.

    Raises:
        InputError: damaged, or of a later torch.
    """
    del threads
    try:
        module = torch.export.load(path).module()
    except Exception as error:  # zip, JSON, schema versions
        raise InputError(f"{path} cannot be loaded by torch.export: {error}") from error

    def classify(pixels: torch.Tensor, full_size: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = module(pixels, full_size)[0]
        return logits

    return classify
