"""model.safetensors: only the weights, for a class of timm, torchvision or flambeau."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from flambeau.errors import InputError
from flambeau.exports.formats.classifier import Classifier, first_output
from flambeau.exports.formats.torch_export_file import read_bytes
from flambeau.exports.served_model import ServedModel
from flambeau.provenance import Permission
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.trainer.parts.model import build_model, check_claim
from flambeau.user_code import is_function

_KEY = "flambeau"  # in the header of the file: the arguments of ServedModel


def require_known_class(model_name: str) -> None:
    """Raise InputError for a model whose class is in a file of the user."""
    if is_function(model_name):
        raise InputError(
            f"--format safetensors holds weights alone, and the class of {model_name} is in your own file\n"
            "Take --format torch-export, which holds the graph"
        )


def write_weights(model: ServedModel, path: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.network.state_dict().items()}
    write_file(path, save(state, metadata={_KEY: json.dumps(model.origin)}))


def open_weights(path: Path, threads: int, permission: Permission) -> Classifier:
    """Make the model and load its weights; it runs on torch's threads.

    Raises:
        InputError: damaged, or this timm or torchvision lacks the class.
        UntrustedCode: it names a class in a file, as no export of flambeau does.
    """
    del threads
    try:
        data = read_bytes(path)
        state = load(data)
        origin = _origin(data)
        name = str(origin["model"])
        if is_function(name):
            permission.ask_for_file(path, data, what=name)
        shape = {
            "num_classes": origin["num_classes"],
            "channels": len(origin["mean"]),
            "image_size": origin["image_size"],
            "per_pixel": origin.get("per_pixel", False),
        }
        check_claim(name, state, **shape)
        network = build_model(name, **shape)
        dtype = next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
        network.to(dtype).load_state_dict(state)
        model = ServedModel(network.eval(), lambda logits, pixels: logits, origin)
    except InputError:
        raise
    except Exception as error:  # of safetensors, of JSON, missing names
        raise InputError(f"{path} cannot be loaded: {str(error)[:300]}") from error

    return first_output(model)


def check_weights(path: Path) -> str | None:
    """Why a file, which is not run, has no weights of a known class; None if it has."""
    data = read_bytes(path)
    try:
        load(data)
        name = str(_origin(data)["model"])
    except Exception as error:  # of safetensors and of JSON
        return f"it cannot be read: {str(error)[:200]}"
    return f"it names {name}, which would be run" if is_function(name) else None


def _origin(data: bytes) -> dict[str, Any]:
    """The arguments of ServedModel that `write_weights` has put into the header."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    origin: dict[str, Any] = json.loads(header["__metadata__"][_KEY])
    return origin
