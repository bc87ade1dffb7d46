"""Which class a transform is of; only the classes themselves count, not those derived from them."""

from typing import Any


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
