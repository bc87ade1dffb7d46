"""The class of a transform; only the classes themselves are known, not those derived from them."""

from typing import Any

from torchvision import transforms as v1
from torchvision.models import ResNet18_Weights
from torchvision.transforms import v2

WEIGHTS_TRANSFORM: Any = ResNet18_Weights.DEFAULT.transforms.func
"""The class behind torchvision's `WEIGHTS.transforms()`, which has no other public name."""
COMPOSED = (v1.Compose, v2.Compose, WEIGHTS_TRANSFORM)
"""Classes that can be taken over."""


def is_one_of(transform: Any, *kinds: type) -> bool:
    """Whether it is exactly of one of these classes."""
    return type(transform) in kinds


def is_from_timm(transform: Any, *names: str) -> bool:
    """Whether it is one of these classes of timm, which is not imported for it."""
    kind = type(transform)
    return kind.__module__.startswith("timm.data.") and kind.__name__ in names


def filter_name(interpolation: Any) -> str:
    """The name of a filter, which v1 has as InterpolationMode and v2 as its value."""
    value = getattr(interpolation, "value", interpolation)
    return value if isinstance(value, str) else "another"
