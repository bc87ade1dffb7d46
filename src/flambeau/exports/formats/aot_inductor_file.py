"""model.aoti.pt2: the graph compiled by AOTInductor for this kind of processor, for Python and C++."""

import io
import shutil
import tempfile
from pathlib import Path

import torch

from flambeau.errors import InputError
from flambeau.exports.formats.classifier import Classifier, first_output
from flambeau.exports.formats.quiet import quiet
from flambeau.exports.formats.torch_export_file import read_bytes
from flambeau.exports.formats.traced_program import traced_program
from flambeau.exports.served_model import ServedModel
from flambeau.provenance import Permission
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

_OPTIONS = {"freezing": True}
"""Weights packed for the kernels of this processor: 0.8 of the time of ResNet-18 on one thread."""


def require_compiler(model_name: str) -> None:
    """Raise InputError on a machine without a C++ compiler."""
    del model_name
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise InputError(
            "--format aoti needs a C++ compiler, and there is no g++ or clang++ here\n"
            "Install one (Debian: apt install g++), or take --format torch-export"
        )


def write_aot_inductor(model: ServedModel, path: Path) -> None:
    """Compile the model; takes a minute, and a C++ compiler. InputError: the compiler fails."""
    program = traced_program(model)
    file = io.BytesIO()  # torch's own writer aborts the process where a disk is full
    try:
        with quiet(), torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=file, inductor_configs=_OPTIONS
            )
    except Exception as error:
        raise InputError(f"AOTInductor cannot compile this model: {str(error)[:300]}") from error
    write_file(path, file.getvalue())


def open_aot_inductor(path: Path, threads: int, permission: Permission) -> Classifier:
    """Load the package, which is machine code; it runs on torch's threads.

    Raises:
        InputError: damaged, of another torch, or compiled for another processor.
        UntrustedCode: it may not be run.
    """
    del threads
    data = read_bytes(path)
    permission.ask_for_file(path, data, why=", a library that was compiled")
    try:
        # The loader reads from a path: give it a copy of the bytes that were checked.
        with quiet(), tempfile.NamedTemporaryFile(suffix=".pt2") as copy:
            copy.write(data)
            copy.flush()
            package = torch._inductor.aoti_load_package(copy.name)
    except Exception as error:
        raise InputError(f"{path} cannot be loaded by AOTInductor: {str(error)[:300]}") from error

    return first_output(package)
