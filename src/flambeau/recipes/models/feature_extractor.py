"""Get the outputs of any layers of any model by name, without changing the model.

按名字取出任意模型中任意若干层的输出，而不改动模型。

Source: forward hooks as in the documentation of torch.nn.Module.register_forward_hook; the names are those
of `named_modules()`.

Not for values that no module returns (`x + y` in a forward): torchvision.models.feature_extraction gets them
by tracing. Not for compiled, scripted or FSDP-wrapped models: take the features before wrapping.
"""

import contextlib
import copy
import difflib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _StopForward(BaseException):
    """Ends a forward; no `except Exception` in a model catches it."""


def feature_extractor(
    model: nn.Module,
    layers: Sequence[str],
    *,
    grad: bool = False,
    stop_early: bool = False,
) -> Callable[..., dict[str, Any]]:
    """Make a function that runs the model in eval mode and returns the outputs of some of its layers.

    Every module's mode is restored after each call, and the model then has no hooks.

    Args:
        model: not copied, so later changes of its weights have an effect.
        layers: names as in `named_modules()`; 'name#1' is a layer's second run.
        grad: record the graph, as for a perceptual loss; otherwise `torch.no_grad()`.
        stop_early: end the forward after the last of these layers. A name without '#' then means the first
            run.

    Returns:
        A function of the model's arguments that returns {name: output} in the order of `layers`, outputs as
        the layer returned them: a tensor, tuple, list or dict.

    Raises:
        ValueError: no such layer. The function raises what `captured` raises.
        TypeError: `layers` is a single string.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
        >>> extract = feature_extractor(model, ["1", "0"])
        >>> {name: tuple(value.shape) for name, value in extract(torch.ones(4, 2)).items()}
        {'1': (4, 3), '0': (4, 3)}
    """
    _find(model, layers)

    def extract(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with (
            _evaluating(model),
            contextlib.nullcontext() if grad else torch.no_grad(),
            _capturing(model, layers, stop_early=stop_early) as features,
            contextlib.suppress(_StopForward),
        ):
            model(*args, **kwargs)
        return features

    return extract


@contextlib.contextmanager
def captured(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Capture the outputs of some layers in the `with` block.

    Mode and gradients of your forward stay: for a loss on inner layers while training. It keeps copies,
    through which gradients flow, because an operation may write into the output: `nn.ReLU(inplace=True)`.

    Args:
        layers: as for `feature_extractor`.

    Yields:
        A dict, empty until the block ends, then {name: output} in the order of `layers`.

    Raises:
        ValueError: no such layer.
        TypeError: `layers` is a single string, or an output is not a tensor, tuple, list or dict.
        RuntimeError: a layer did not run, or ran several times and has no '#'.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True))
        >>> with captured(model, ["0"]) as features:
        ...     output = model(torch.ones(4, 2))
        >>> torch.equal(features["0"].clamp(min=0), output)
        True
    """
    with _capturing(model, layers, stop_early=False) as features:
        yield features


@contextlib.contextmanager
def _capturing(
    model: nn.Module, layers: Sequence[str], *, stop_early: bool
) -> Iterator[dict[str, Any]]:
    wanted = _find(model, layers)
    num_runs = dict.fromkeys(wanted, 0)
    outputs: dict[str, Any] = {}

    def keep(name: str, run: int | None, module: nn.Module, args: Any, output: Any) -> None:
        if run is None or run == num_runs[name]:
            outputs[name] = _copied(output, name)
        num_runs[name] += 1
        if stop_early and len(outputs) == len(wanted):
            raise _StopForward

    features: dict[str, Any] = {}
    with contextlib.ExitStack() as hooks:
        for name, (module, run) in wanted.items():
            handle = module.register_forward_hook(functools.partial(keep, name, run))
            hooks.callback(handle.remove)
        yield features
    for name, (_, run) in wanted.items():
        if name not in outputs:
            raise RuntimeError(
                f"layer {name!r} did not run, or not that often: its parent uses its weights directly, the "
                "forward went another way, or the model was compiled or scripted before"
            )
        if run is None and num_runs[name] > 1:
            raise RuntimeError(
                f"layer {name!r} ran {num_runs[name]} times: ask for '{name}#0', "
                f"... or '{name}#{num_runs[name] - 1}'"
            )
        features[name] = outputs[name]


def _find(model: nn.Module, layers: Sequence[str]) -> dict[str, tuple[nn.Module, int | None]]:
    """Each layer's module, and which of its runs is meant."""
    if isinstance(layers, str):
        raise TypeError(f"layers must be a list of names, got one string: [{layers!r}]")
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted: dict[str, tuple[nn.Module, int | None]] = {}
    for layer in layers:
        name, _, run = layer.rpartition("#")
        if layer in modules:
            wanted[layer] = (modules[layer], None)
        elif name in modules and run.isdecimal():
            wanted[layer] = (modules[name], int(run))
        else:
            raise ValueError(_unknown(layer, modules))
    return wanted


def _unknown(layer: str, modules: dict[str, nn.Module]) -> str:
    """A message with the nearest names and those on the same level, not all 151 of a ResNet50."""
    parent = layer
    while parent not in modules:
        parent = parent.rpartition(".")[0]
    near = difflib.get_close_matches(layer, modules, n=3)
    hint = f", did you mean {' or '.join(map(repr, near))}?" if near else "."
    children = ", ".join(name for name, _ in modules[parent].named_children())
    where = f"{parent!r}" if parent else "the model"
    return f"no layer {layer!r}{hint} Inside of {where} are: {children or 'no layers'}"


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])  # some modules do more in train() than set a flag
        for module, mode in modes.items():
            module.training = mode


def _copied(output: Any, name: str) -> Any:
    """The same structure with copies of its tensors."""
    if isinstance(output, Tensor):
        return output.clone()
    if output is None or isinstance(output, bool | int | float | str):
        return output
    if isinstance(output, dict):
        copied = copy.copy(output)  # keeps a subclass, such as the outputs of transformers
        for key, value in output.items():
            copied[key] = _copied(value, name)
        return copied
    if isinstance(output, tuple | list):
        values = [_copied(value, name) for value in output]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    raise TypeError(
        f"layer {name!r} returned a {type(output).__name__}: "
        "only tensors, tuples, lists and dicts can be kept"
    )
