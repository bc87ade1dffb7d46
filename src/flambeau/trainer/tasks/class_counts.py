"""What `flambeau train` says of the sizes of the classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flambeau.trainer.settings.settings import Settings

_UNEVEN = 5  # ratio of the largest to the smallest class from which a line says so; chosen
_LISTED = 12  # classes, with their counts


def class_lines(settings: Settings, labels: Tensor, classes: Sequence[str]) -> list[str]:
    """The number of training images per class, and what can be done if that is uneven."""
    counts = torch.bincount(labels, minlength=len(classes))
    by_count = sorted(zip(counts.tolist(), classes, strict=True), key=lambda one: -one[0])
    (most, largest), (least, smallest) = by_count[0], by_count[-1]
    if most == least:
        return [f"{len(classes)} classes of {most} training images each"]
    if len(classes) <= _LISTED:
        lines = ["training images: " + ", ".join(f"{name} {n}" for n, name in by_count)]
    else:
        lines = [
            f"{len(classes)} classes of {least} ({smallest}) to {most} ({largest}) training images"
        ]
    without = [name for n, name in by_count if not n]
    if without:
        more = f" and {len(without) - _LISTED} more" if len(without) > _LISTED else ""
        lines.append(f"no training image of {', '.join(without[:_LISTED])}{more}")
    rarest, name = next((n, name) for n, name in reversed(by_count) if n)
    is_unbalanced = settings.balance == "none" and settings.class_weights is None
    if most >= _UNEVEN * rarest and is_unbalanced:
        lines.append(
            f"the classes are uneven: {largest} has {most / rarest:.0f} times the images of {name}; "
            "--balance sqrt (or full) draws rare ones more often, --class-weights auto weighs them more"
        )
    return lines
