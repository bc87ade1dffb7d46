"""Which class a transform is of; only the classes themselves count, not those derived from them."""

from typing import Any

from torchvision import transforms as v1
from torchvision.models import ResNet18_Weights
from torchvision.transforms import v2

WEIGHTS_TRANSFORM: Any = ResNet18_Weights.DEFAULT.transforms.func
"""The class of what `WEIGHTS.transforms()` of torchvision's gives: its public name is in there only."""
COMPOSED = (v1.Compose, v2.Compose, WEIGHTS_TRANSFORM)
"""Classes whose work can be taken over."""


def is_one_of(transform: Any, *kinds: type) -> bool:
    """Whether it is of one of these classes of torchvision's."""
    return type(transform) in kinds


def is_timms(transform: Any, *names: str) -> bool:
    """Whether it is one of timm's, known by name: timm is imported by those who use it."""
    kind = type(transform)
    return kind.__module__.startswith("timm.data.") and kind.__name__ in names


def filter_name(interpolation: Any) -> str:
    """The name of what v1 has as InterpolationMode, and v2 as its value."""
    value = getattr(interpolation, "value", interpolation)
    return value if isinstance(value, str) else "another"
