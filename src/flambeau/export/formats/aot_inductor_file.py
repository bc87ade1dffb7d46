"""A package of AOTInductor: the graph compiled for the processor of this machine, for Python and C++."""

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from flambeau.errors import InputError
from flambeau.export.formats.classifier import Classifier
from flambeau.export.formats.traced_program import traced_program
from flambeau.export.served_model import ServedModel

_OPTIONS = {"freezing": True}
"""Weights packed for the kernels of this processor: 0.8 of the time of ResNet-18 on one thread."""


def write_aot_inductor(model: ServedModel, path: Path) -> None:
    """Compile the model; takes a minute, and a C++ compiler.

    Raises:
        InputError: there is no compiler, or it fails.
    """
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise InputError(
            "--format aoti needs a C++ compiler, and there is no g++ or clang++ here\n"
            "Install one (Debian: apt install g++), or take --format torch-export"
        )
    program = traced_program(model)
    try:
        with _quiet(), torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=_OPTIONS
            )
    except Exception as error:
        raise InputError(f"AOTInductor cannot compile this model: {str(error)[:300]}") from error


def open_aot_inductor(path: Path, threads: int) -> Classifier:
    """Load the package; it runs on torch's own threads.

    Raises:
        InputError: damaged, of another torch, or compiled for another processor.
    """
    del threads
    try:
        with _quiet():
            package = torch._inductor.aoti_load_package(str(path))
    except Exception as error:
        raise InputError(f"{path} cannot be loaded by AOTInductor: {str(error)[:300]}") from error

    def classify(pixels: torch.Tensor, full_size: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = package(pixels.contiguous(), full_size)[0]
        return logits

    return classify


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a warning that a machine without a GPU has none."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
