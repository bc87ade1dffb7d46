"""What a checkpoint holds of a model: all of its `state_dict()`, in two files.

Tensors go into model.safetensors, which is published, too; extra state (`get_extra_state`) and tensors that
the format does not know (complex128, quantized) go into the file for torch.load(weights_only=True).
"""

import functools
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from flambeau.errors import InputError
from flambeau.parallel.shard_layout import weights_bytes
from flambeau.recipes.checkpoints.atomic_checkpoint import to_bytes
from flambeau.run.folder.checkpointer import EXTRA_STATE, copies, copy_nested

SPARSE = "Run takes dense gradients alone; leave sparse=True out"


def model_entries(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's `state_dict()`: tensors for model.safetensors, and the rest; no copies.

    InputError: something in it can be in neither file.
    """
    state = model.state_dict()
    tensors = {name: value for name, value in state.items() if _is_weight(value)}
    rest = {name: value for name, value in state.items() if name not in tensors}
    for name, value in rest.items():
        try:
            to_bytes({f"'{name}' of the model ({_owner(model, name)})": value})
        except TypeError as error:
            raise InputError(f"no checkpoint can hold it: {error}") from error
    return tensors, rest


def load_entries(model: nn.Module, entries: Mapping[str, Any]) -> None:
    """Load all entries of a `state_dict()`, with the versions of modules that no checkpoint holds."""
    state = model.state_dict()
    state.update(entries)
    model.load_state_dict(state)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of the tensors that must keep their shape; extra state may change."""
    return {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and not name.endswith(EXTRA_STATE)
    }


def check_gradients(model: nn.Module) -> None:
    """Refuse layers whose gradients are sparse."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(f"'{name}' of the model has sparse=True: {SPARSE}")


def check_model(model: nn.Module, device: torch.device, *, averages: bool) -> list[str]:
    """Refuse a model (or piece) that could not be trained or restored from a checkpoint.

    Returns the entries of state_dict() that model.safetensors cannot hold. `averages`: an EMA averages the
    weights.
    """
    own = _own_tensors(model)
    for name, tensor in own.items():
        _check_tensor(name, tensor, device)
    tensors, rest = model_entries(model)
    if averages:
        for name, value in {**tensors, **rest}.items():
            if name not in own or not _is_averaged(value):
                raise InputError(
                    f"ema averages plain parameters and buffers, and the model's state_dict() has '{name}', "
                    "too: leave ema= out, or that entry"
                )
    if own.keys() != tensors.keys():
        _check_puts_back(model, tensors, rest)
    return [*rest]


def check_shardable(model: nn.Module) -> None:
    """Refuse what pieces of parameters and buffers of a whole model cannot hold."""
    for name in model.state_dict().keys() - _own_tensors(model).keys():
        raise InputError(
            f"a sharded model's checkpoints hold parameters and buffers alone, and its state_dict() has "
            f"'{name}', too"
        )


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; shared ones by each of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def _check_tensor(name: str, tensor: Tensor, device: torch.device) -> None:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        raise InputError(
            f"'{name}' of the model has no shape yet: call the model with a batch before the optimizer and "
            "Run are made"
        )
    why = None
    if tensor.is_complex() and tensor.requires_grad:
        why = f"is trained and {tensor.dtype}: train its torch.view_as_real"
    elif tensor.is_meta and device.type != "meta":
        why = "is on the meta device: give it values, with model.to_empty and an initialization"
    elif _repeats_memory(tensor):
        why = "is expanded, so its elements share memory and cannot be put back: make it with .clone()"
    if why is not None:
        raise InputError(f"'{name}' of the model {why}")


def _check_puts_back(
    model: nn.Module, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """Load what a checkpoint would hold now, as a resume does: hooks may add and leave out entries."""
    try:
        load_entries(model, {**copies(tensors), **copy_nested(rest)})
    except Exception as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"the model does not take back its own state_dict(), so no resume could: "
            f"{type(error).__name__}: {why:.300}"
        ) from error


def _is_weight(value: object) -> bool:
    if not isinstance(value, Tensor) or hasattr(value, "__tensor_flatten__"):
        return False
    is_plain = value.layout is torch.strided and not value.is_quantized and not value.is_nested
    return is_plain and _is_known(value.dtype)


def _is_averaged(value: object) -> bool:
    """Whether the recipe `ema` averages or copies it: torch adds up no floats of 8 bits and less."""
    is_small = isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 2
    return _is_weight(value) and not is_small


@functools.cache
def _is_known(dtype: torch.dtype) -> bool:
    try:
        data = weights_bytes({"one": torch.empty(1, dtype=dtype)})
        return safetensors.torch.load(data)["one"].dtype is dtype
    except KeyError:
        return False


def _repeats_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _owner(model: nn.Module, name: str) -> str:
    """The class of the module that has an entry of the state_dict."""
    modules = dict(model.named_modules())
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return type(modules.get(name, model)).__name__
