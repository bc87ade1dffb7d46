"""Find the classifier layer of a model and replace it by one for another number of classes.

找到模型的分类层，并换成适合另一类别数的新层。

Source: the `reset_classifier` and `get_classifier` methods of timm's models; for others the layout of the
classifiers of torchvision 0.29, all of which end in a Linear layer or a 1x1 convolution.

Not for detectors, which predict more than a class; they and all ambiguous models are refused.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Head(NamedTuple):
    """Names of the classifier layers, auxiliary ones last, and of their parameters (for a `head_lr`)."""

    layers: list[str]
    parameters: list[str]


def find_head(model: nn.Module) -> Head:
    """Name the layers that compute the class scores, and their parameters.

    timm's models name them by `get_classifier()`. In others, the head is the last module with parameters (by
    `named_modules()`, except auxiliary heads), if it is a Linear layer or a convolution of kernel 1 and no
    other could be the head.

    Args:
        model: not wrapped in DistributedDataParallel or compiled.

    Returns:
        The names; a layer with 'aux' in its name and as many outputs is an auxiliary head.

    Raises:
        ValueError: no head, or several candidates, which the message names.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 10))
        >>> find_head(model)
        Head(layers=['2'], parameters=['2.weight', '2.bias'])
    """
    get_classifier = getattr(model, "get_classifier", None)
    if not callable(get_classifier):
        return _named(model, _output_layers(model))
    classifier = get_classifier()
    modules = {*classifier} if isinstance(classifier, tuple | list) else {classifier}
    for container in model.modules():
        children = {m for m in container.children() if any(True for _ in m.parameters())}
        # efficientvit_m and shvit return only their Linear layer, but also replace the norm before it.
        if children & modules and all(isinstance(m, nn.BatchNorm1d) for m in children - modules):
            modules |= children
    head = _owners(model, {p for module in modules for p in module.parameters()})
    if not head.layers:
        raise ValueError(f"{type(model).__name__} has no classifying layer: it was made without")
    return head


def replace_head(model: nn.Module, num_classes: int, *, head: str | None = None) -> Head:
    """Replace the head by a new, randomly initialized one of the same device and dtype.

    timm's models do this by `reset_classifier()`. In others the new layer is of the same kind, with a bias if
    the old one had one and torch's initialization; auxiliary heads are replaced too, and `num_classes` and
    `num_labels` of the modules around are updated. New parameters are trainable, even in a frozen model; make
    the optimizer afterwards. Hooks, weight_norm and the like are lost.

    Args:
        model: changed in place. Torch's global generator draws the weights.
        num_classes: at least 1.
        head: layer to replace, if `find_head` finds none or several.

    Returns:
        The new layers and parameters.

    Raises:
        ValueError: as for `find_head`; or `head` is not a Linear layer or convolution of kernel 1.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(8, 1000)).requires_grad_(False)
        >>> replace_head(model, 5)
        Head(layers=['1'], parameters=['1.weight', '1.bias'])
    """
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}")
    if head is None and callable(getattr(model, "reset_classifier", None)):
        return _reset(model, num_classes)
    candidates = _candidates(model)
    if head is None:
        layers = _output_layers(model)
    else:
        named = dict(model.named_modules(remove_duplicate=False)).get(head)
        layers = [next((name for name, layer in candidates.items() if layer is named), head)]
    for name in layers:
        if name not in candidates:
            raise ValueError(f"{name!r} cannot be replaced as a head. " + _listed(candidates))
        _replace(model, candidates[name], num_classes)
    return _named(model, layers)


def _reset(model: Any, num_classes: int) -> Head:
    old = {*model.modules(), *model.parameters(), *model.buffers()}
    *_, last = model.parameters()
    with torch.device(last.device):
        model.reset_classifier(num_classes)
    for module in set(model.modules()) - old:
        module.training = model.training
    for tensor in {*model.parameters(), *model.buffers()} - old:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(last.dtype)
    return _owners(model, set(model.parameters()) - old)


def _replace(model: nn.Module, old: Any, num_classes: int) -> None:
    """Replace a layer by a new one, under each of its names."""
    weight = old.weight
    settings: Any = {"bias": old.bias is not None, "device": weight.device, "dtype": weight.dtype}
    kind: Any = next(kind for kind in (nn.Linear, *_CONVOLUTIONS) if isinstance(old, kind))
    kernel = () if kind is nn.Linear else (1,)
    new = kind(weight.shape[1], num_classes, *kernel, **settings)
    new.train(old.training)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is not old:
            continue
        model.set_submodule(name, new)
        parts = name.split(".")
        for around in (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))):
            for attribute in ("num_classes", "num_labels"):
                if vars(around).get(attribute) == weight.shape[0]:
                    setattr(around, attribute, num_classes)


def _output_layers(model: nn.Module) -> list[str]:
    """The main head and the auxiliary ones."""
    candidates = _candidates(model)
    main = _last(model)
    if main not in candidates:
        raise ValueError("no classifying layer at the end of the model. " + _listed(candidates))
    if rivals := ", ".join(map(repr, _rivals(model, main, candidates))):
        raise ValueError(f"{main!r} may be the head, but so may {rivals}: name one with head=")
    size = candidates[main].weight.shape[0]
    same = [name for name, layer in candidates.items() if layer.weight.shape[0] == size]
    return [main, *filter(_is_auxiliary, same)]


def _rivals(model: nn.Module, main: str, candidates: dict[str, Any]) -> list[str]:
    """Other layers that end a branch beside the head, such as the head of another task.

    A layer whose number of outputs is another layer's number of inputs is not one, except in a list of layers
    with equally many outputs as the head.
    """
    parent = main.rpartition(".")[0]
    while parent and isinstance(model.get_submodule(parent), nn.Sequential):
        parent = parent.rpartition(".")[0]
    container = model.get_submodule(parent)
    if isinstance(container, nn.Sequential):
        return []
    inner = {layer.weight.shape[1] for layer in candidates.values()}
    if isinstance(container, nn.ModuleList | nn.ModuleDict):
        inner.discard(candidates[main].weight.shape[0])
    rivals = []
    for child, module in container.named_children():
        name = ".".join(part for part in (parent, child, _last(module)) if part)
        if name in candidates and name != main and not _is_auxiliary(name):
            rivals += [name] if candidates[name].weight.shape[0] not in inner else []
    return rivals


def _last(model: nn.Module) -> str:
    """The last module that holds parameters directly, except auxiliary heads."""
    names = [
        name.partition(".parametrizations.")[0]  # the parameters of weight_norm and its kin
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    return next((name for name in reversed(names) if not _is_auxiliary(name)), "")


def _candidates(model: nn.Module) -> dict[str, Any]:
    """Linear layers, and convolutions that are linear layers at each pixel."""
    candidates: dict[str, Any] = {}
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        if isinstance(module, _CONVOLUTIONS):
            is_linear = {*module.kernel_size, *module.stride, module.groups} == {1}
        if is_linear and name:
            if is_lazy(module.weight):
                raise ValueError(f"{name!r} has no shape yet: run one batch through the model")
            candidates[name] = module
    return candidates


def _is_auxiliary(name: str) -> bool:
    return "aux" in name.lower()


def _named(model: nn.Module, layers: list[str]) -> Head:
    names = [name for name, _ in model.named_parameters()]
    return Head(layers, [name for name in names if name.startswith(tuple(f"{n}." for n in layers))])


def _owners(model: nn.Module, parameters: set[nn.Parameter]) -> Head:
    names = [name for name, parameter in model.named_parameters() if parameter in parameters]
    layers = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return Head(sorted(layers, key=_is_auxiliary), names)


def _listed(candidates: dict[str, Any]) -> str:
    names = ", ".join(list(candidates)[-6:])
    return f"Name one with head=, such as: {names}" if names else "It has no Linear layer"
