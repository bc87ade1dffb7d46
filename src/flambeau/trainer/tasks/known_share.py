"""Means over targets of which some are unknown, that do not depend on how a batch is cut."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flambeau.data.sources.source import Source
from flambeau.errors import InputError

_constants: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def mean_of_known_targets(losses: Tensor, targets: Tensor, known: Sequence[float] | None) -> Tensor:
    """The mean loss of each image, (N,): an unknown target counts as nothing, a known one for its column.

    A column of which a third is known counts three times where it is known, so that all columns have one
    weight. The mean over images is then the same for a batch as for its parts, which a mean over the known
    targets of each batch is not.

    Args:
        losses, targets: (N, K); NaN targets are unknown.
        known: share of the training images of which each column is known; None: all.
    """
    if known is None:
        return losses.mean(1)
    scale = 1 / constants(tuple(known), losses.device)
    return torch.where(targets.isfinite(), losses * scale, 0.0).mean(1)


def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers (K,) float32 on a device, copied there once: a copy in each step would wait for it."""
    kept = _constants.get((values, device))
    if kept is not None:
        return kept
    with torch.inference_mode(False):
        made = torch.tensor(values, device=device)
    if type(made) is Tensor:  # not one without data, of an estimate of memory
        _constants[values, device] = made
    return made


def known_facts(train: Source) -> dict[str, Any]:
    """The share of the training images of which each column is known, as `known`; None if all are.

    Raises:
        InputError: a column of which nothing is known.
    """
    is_known = train.labels.isfinite()
    shares = is_known.double().mean(0).tolist()
    for column, share in zip(train.classes, shares, strict=True):
        if not share:
            raise InputError(
                f"{column!r} is unknown for all images to train on: nothing to learn\n"
                "Name other columns with --target"
            )
    return {"known": None if is_known.all() else shares}
