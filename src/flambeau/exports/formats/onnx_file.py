"""model.onnx: one file with its weights, for ONNX Runtime and other readers of ONNX."""

import warnings
from pathlib import Path
from typing import Any

import torch

from flambeau.errors import InputError
from flambeau.exports.formats.classifier import Classifier
from flambeau.exports.formats.quiet import quiet
from flambeau.exports.formats.traced_program import example_call, traced_program
from flambeau.exports.served_model import ServedModel
from flambeau.optional_packages import extra
from flambeau.provenance import Permission
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

INPUTS = ["pixels", "full_size"]


def require_onnx(model_name: str) -> None:
    del model_name
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package)


def write_onnx(model: ServedModel, path: Path) -> None:
    """Export by torch's exporter, and check the file.

    InputError: onnx or onnxscript is missing, or ONNX lacks an operation.
    """
    onnx = require("onnx")
    require("onnxscript")
    arguments, free = example_call(model)
    try:
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                model,  # not its graph: QuantizeLinear is traced only for ONNX
                arguments,
                dynamic_shapes=free,
                dynamo=True,
                input_names=INPUTS,
                output_names=["logits", model.answer_name],
                verbose=False,
            )
            assert program is not None  # dynamo=True
            proto = program.model_proto
        for node in proto.graph.node:
            # how each node was traced, with folders of this machine: most of a small file
            del node.metadata_props[:]
        data = proto.SerializeToString()
        onnx.checker.check_model(data)
    except Exception as error:
        traced_program(model)  # its error says in one line why there is no graph
        raise InputError(f"torch.onnx cannot export this model: {str(error)[:300]}") from error
    write_file(path, data)


def open_onnx(path: Path, threads: int, permission: Permission) -> Classifier:
    """Open the file with ONNX Runtime on the CPU, without code or custom operators."""
    del permission
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
    """Import a package of the extra `export`, without its warnings; InputError: it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return extra(package, what="--format onnx")
