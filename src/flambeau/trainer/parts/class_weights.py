"""Unevenly sized classes: how often they are drawn, and their weights in the loss."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.data.sources.source import Source
from flambeau.data.sources.targets import task_of
from flambeau.errors import InputError, nearest
from flambeau.recipes.data.samplers import BalancedSampler
from flambeau.run.folder.json_file import json_file
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.tasks.all_tasks import TASK_TYPES

_STRENGTHS = {"sqrt": 0.5, "full": 1.0}


def balanced_sampler(settings: ResolvedSettings, labels: Tensor) -> BalancedSampler | None:
    """The sampler for classes to be drawn more evenly, as many images per epoch; else None."""
    if settings.balance == "none":
        return None
    return BalancedSampler(labels, strength=_STRENGTHS[settings.balance], seed=settings.seed)


def class_weights(settings: Settings, train: Source) -> list[float] | None:
    """The weight of each class in the loss, in the order of the classes; None if all are equal.

    InputError: the file is not a JSON object with a weight for each class.
    """
    if settings.class_weights is None:
        return None
    classes = train.classes
    if settings.class_weights == "auto":
        return TASK_TYPES[task_of(train)].balanced_weights(train)
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
