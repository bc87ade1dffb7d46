"""The class of a transform, and its settings.

Only the classes themselves are known, not those derived from them, and no transform to which somebody has
added code: hooks, or a method of its own.
"""

import functools
from enum import Enum
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import transforms as v1
from torchvision.models import ResNet18_Weights
from torchvision.transforms import v2

WEIGHTS_TRANSFORM: Any = ResNet18_Weights.DEFAULT.transforms.func
"""The class behind torchvision's `WEIGHTS.transforms()`, which has no other public name."""
COMPOSED = (v1.Compose, v2.Compose, WEIGHTS_TRANSFORM)
"""Classes that can be taken over."""


_METHODS = {"forward", "get_params", "make_params", "transform"}
_MODULES = ("torchvision.transforms.", "timm.data.", "torch.nn.modules.container")
# But for the transforms in a ModuleList; `has_code_of_its_own` looks at the hooks.
_PARTS_OF_MODULES = vars(nn.Module()).keys() - {"_modules"}
_PLAIN = {int, float, bool, str, NoneType}


def has_code_of_its_own(transform: Any) -> bool:
    """Whether a call runs more than its class: hooks, or methods put into it."""
    if isinstance(transform, nn.Module) and (
        transform._forward_hooks or transform._forward_pre_hooks
    ):
        return True
    own = _METHODS.intersection(getattr(transform, "__dict__", ()))
    return any(hasattr(type(transform), name) for name in own)


def is_one_of(transform: Any, *kinds: type) -> bool:
    """Whether it is exactly of these classes, and runs their code alone."""
    return type(transform) in kinds and not has_code_of_its_own(transform)


def is_from_timm(transform: Any, *names: str) -> bool:
    """Whether it is one of these classes of timm, without importing that."""
    kind = type(transform)
    named = kind.__module__.startswith("timm.data.") and kind.__name__ in names
    return named and not has_code_of_its_own(transform)


def parts_of_weights_transform(transform: Any) -> list[Any]:
    """The transforms that a `WEIGHTS.transforms()` of torchvision is made of."""
    filter_, antialias = transform.interpolation, transform.antialias
    return [
        v1.Resize(transform.resize_size, filter_, antialias=antialias),
        v1.CenterCrop(transform.crop_size),
        v1.PILToTensor(),
        v1.ConvertImageDtype(torch.float),
        v1.Normalize(transform.mean, transform.std),
    ]


def filter_name(interpolation: Any) -> str:
    """The name of a filter, which v1 has as InterpolationMode and v2 as its value."""
    value = getattr(interpolation, "value", interpolation)
    return value if isinstance(value, str) else "another"


def settings_of(transform: Any) -> list[Any]:
    """All numbers, names and objects of a transform in a row, to see changes."""
    found: list[Any] = [has_code_of_its_own(transform)]
    for name, value in vars(transform).items():
        if name not in _PARTS_OF_MODULES:
            _collect(value, found)
    return found


def are_same(one: list[Any], other: list[Any]) -> bool:
    """Whether settings are equal numbers and names, and the same objects."""
    if len(one) != len(other):
        return False
    differing = [(a, b) for a, b in zip(one, other, strict=True) if a is not b]
    return all(type(a) in _PLAIN and type(a) is type(b) and a == b for a, b in differing)


def _collect(value: Any, found: list[Any]) -> None:
    """Called for every sample, so what a module has beside its settings is passed over."""
    kind: Any = type(value)
    if kind is list or isinstance(value, dict):
        found.append(len(value))
    else:
        found.append(value)
    if kind is list:
        inner = value
    elif kind is tuple:  # numbers in it cannot change
        inner = [one for one in value if type(one) not in _PLAIN and type(one) is not tuple]
    elif isinstance(value, dict):
        inner = value.values()
    elif _is_known(kind):
        found.append(has_code_of_its_own(value))
        inner = [one for name, one in value.__dict__.items() if name not in _PARTS_OF_MODULES]
    else:
        if isinstance(value, Tensor):
            found.append(value._version)
        return
    for one in inner:
        if type(one) in _PLAIN:
            found.append(one)
        else:
            _collect(one, found)


@functools.cache
def _is_known(kind: Any) -> bool:
    """Whether it is a transform, or a list of transforms, whose attributes are settings."""
    known: bool = kind.__module__.startswith(_MODULES)
    return known and not issubclass(kind, Enum)
