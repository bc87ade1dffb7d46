"""model.onnx, one file with its weights, for ONNX Runtime and whatever else reads ONNX."""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flambeau.errors import InputError
from flambeau.export.formats.classifier import Classifier
from flambeau.export.formats.traced_program import example_call, traced_program
from flambeau.export.served_model import ServedModel

INPUTS, OUTPUTS = ["pixels", "full_size"], ["logits", "probabilities"]


def write_onnx(model: ServedModel, path: Path) -> None:
    """Export by torch's exporter, and check the file.

    Raises:
        InputError: onnx or onnxscript is not installed, or the model has an operation that ONNX has not.
    """
    onnx = require("onnx")
    require("onnxscript")
    arguments, free = example_call(model)
    try:
        with _quiet(), torch.no_grad():
            torch.onnx.export(
                model,  # and not its graph: QuantizeLinear is traced for ONNX alone
                arguments,
                f=str(path),
                dynamic_shapes=free,
                dynamo=True,
                input_names=INPUTS,
                output_names=OUTPUTS,
                external_data=False,
                verbose=False,
            )
        onnx.checker.check_model(str(path))
    except Exception as error:
        traced_program(model)  # which says in one line why there is no graph at all
        raise InputError(f"torch.onnx cannot export this model: {str(error)[:300]}") from error


def open_onnx(path: Path, threads: int) -> Classifier:
    """Open the file with ONNX Runtime, on the CPU.

    Args:
        path: the file.
        threads: of one call.

    Raises:
        InputError: onnxruntime is not installed, or cannot read the file.
    """
    onnxruntime = require("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise InputError(f"{path} cannot be read by ONNX Runtime: {str(error)[:300]}") from error

    def classify(pixels: torch.Tensor, full_size: torch.Tensor) -> torch.Tensor:
        given = {"pixels": pixels.contiguous().numpy(), "full_size": full_size.numpy()}
        return torch.from_numpy(session.run(["logits"], given)[0])

    return classify


def require(package: str) -> Any:
    """Import a package of the extra `export`.

    Raises:
        InputError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f"--format onnx needs {package}: {error}\nInstall it: pip install 'flambeau[export]'"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes on its own progress."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
