"""model.pt2 of torch.export: a graph that this version of torch or a later one loads on any machine.

`torch.export.load` unpickles and compiles what a file names, so files are read as data (`plain_graph`).
A file that cannot be read so counts as code, which runs only if this user made the folder or trusts it.
"""

import io
from pathlib import Path

import torch

from flambeau.errors import InputError, unreadable
from flambeau.exports.formats.classifier import Classifier, first_output
from flambeau.exports.formats.plain_graph import PlainGraph, plain_graph
from flambeau.exports.formats.pt2_archive import NotPlain, NotWhole, read_archive
from flambeau.exports.formats.pt2_words import check_words
from flambeau.exports.formats.quiet import quiet
from flambeau.exports.formats.traced_program import traced_program
from flambeau.exports.served_model import ServedModel
from flambeau.provenance import Permission
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.regular_file import read_file


def write_torch_export(model: ServedModel, path: Path) -> None:
    """Trace the model and save its graph with its weights; InputError: it cannot be traced."""
    program = traced_program(model)
    file = io.BytesIO()  # torch's own writer aborts the process where a disk is full
    with quiet():
        torch.export.save(program, file)
    write_file(path, file.getvalue())


def open_torch_export(path: Path, threads: int, permission: Permission) -> Classifier:
    """Open the graph; it runs on torch's threads. InputError: damaged, or of a later torch.

    UntrustedCode: it holds more than a graph, which may not be run.
    """
    del threads
    data = read_bytes(path)
    try:
        return first_output(read_plain(data))
    except NotWhole as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    except NotPlain as error:
        why = f" ({error}; only torch.export.load could read it, which runs what it holds)"
        permission.ask_for_file(path, data, why=why)
    try:
        with quiet():
            module = torch.export.load(io.BytesIO(data)).module()
    except Exception as error:  # zip, JSON, schema versions
        raise InputError(f"{path} cannot be loaded by torch.export: {error}") from error

    return first_output(module)


def check_torch_export(path: Path) -> str | None:
    """Why a file, which is not run, is no plain graph; None if it is."""
    try:
        read_plain(read_bytes(path))
    except NotPlain as error:
        return str(error)
    return None


def read_plain(data: bytes) -> PlainGraph:
    """The graph of a file of a graph and tensors, else NotPlain; nothing is run."""
    try:
        archive = read_archive(data)
        check_words(archive.program)
        graph = plain_graph(archive)
    except RecursionError as error:
        raise NotPlain("it is nested too deeply") from error
    if graph.num_inputs != 2:
        raise NotPlain(f"its graph takes {graph.num_inputs} inputs, and one of an export takes 2")
    return graph


def read_bytes(path: Path) -> bytes:
    """A file's content, read once, so that what is checked is used; InputError if unreadable."""
    try:
        return read_file(path)
    except OSError as error:
        raise unreadable(path, error) from error
