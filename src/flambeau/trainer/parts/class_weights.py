"""Unevenly sized classes: their counts, how often they are drawn, and their weights in the loss."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.errors import InputError, nearest
from flambeau.recipes.data.samplers import BalancedSampler
from flambeau.run.folder.json_file import json_file
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import Settings

_STRENGTHS = {"sqrt": 0.5, "full": 1.0}
_UNEVEN = 5  # ratio of the largest to the smallest class from which a line says so; chosen
_LISTED = 12  # classes, with their counts


def balanced_sampler(settings: ResolvedSettings, labels: Tensor) -> BalancedSampler | None:
    """The sampler if classes are to be drawn more evenly, with as many images per epoch; else None."""
    if settings.balance == "none":
        return None
    return BalancedSampler(labels, strength=_STRENGTHS[settings.balance], seed=settings.seed)


def class_weights(settings: Settings, labels: Tensor, classes: Sequence[str]) -> list[float] | None:
    """The weight of each class in the loss, in the order of `classes`; None if all are equal.

    'auto' is scikit-learn's 'balanced': N / (C * n) for a class with n of the N images, 1 on average over
    images.

    Args:
        labels: (N,) int64, of the training images.

    Raises:
        InputError: the file is not a JSON object with a weight for each class.
    """
    if settings.class_weights is None:
        return None
    if settings.class_weights == "auto":
        counts = torch.bincount(labels, minlength=len(classes))
        there = int((counts > 0).sum())
        return [len(labels) / (there * n) if n else 1.0 for n in counts.tolist()]
    path = Path(settings.class_weights)
    by_name = _read(path)
    for name in by_name:
        if name not in classes:
            raise InputError(f"{path}: the data have no class {name!r}{nearest(name, classes)}")
    for name in classes:
        if name not in by_name:
            raise InputError(f"{path}: class {name!r} has no weight; give it a number")
        weight = by_name[name]
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            given = json.dumps(weight)  # as the file has it
            raise InputError(f"{path}: class {name!r} needs a number, got {given:.50}")
        if not 0 <= weight <= torch.finfo(torch.float32).max:
            raise InputError(
                f"{path}: the weight of class {name!r} must be from 0 to 3.4e38, got {weight!s:.50}"
            )
    weights = [float(by_name[name]) for name in classes]
    if not any(weights):
        raise InputError(f"{path}: all weights are 0, so nothing would be learned")
    return weights


def _read(path: Path) -> Mapping[str, Any]:
    wanted = 'a JSON object of a number for each class, such as {"cat": 1, "dog": 2.5}'
    try:
        by_name = json_file(path)
    except (OSError, ValueError) as error:
        why = "it is missing" if isinstance(error, FileNotFoundError) else error
        raise InputError(
            f"class_weights = {path} must be 'auto' or a file of {wanted}: {why}"
        ) from error
    if not isinstance(by_name, dict):
        raise InputError(f"class_weights = {path}: the file must hold {wanted}")
    return by_name


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
