"""Freeze parts of a model by name, including BatchNorm statistics, and keep them frozen in `model.train()`.

按名字冻结模型的一部分，连同 BatchNorm 的统计量，并且在 `model.train()` 之后仍保持冻结。

Source: gradual unfreezing after Howard and Ruder, "Universal language model fine-tuning for text
classification", ACL 2018, section 3.3.

Not for a model that is wrapped in DistributedDataParallel, which reads `requires_grad` only when it is made.
Freeze before wrapping, and after `convert_sync_batchnorm` of torch, which makes new modules.
"""

import difflib
import functools
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.nn import Parameter


class Frozen(NamedTuple):
    """Counts of frozen and trainable parameters; one with several names counts once."""

    num_frozen: int
    num_trainable: int
    num_norms: int
    """Norm layers whose running statistics are frozen."""

    def __str__(self) -> str:
        total = self.num_frozen + self.num_trainable
        return (
            f"{self.num_frozen:,} of {total:,} parameters frozen, {self.num_trainable:,} trainable; "
            f"running statistics of {self.num_norms} norm layers frozen"
        )


def freeze(model: nn.Module, patterns: Collection[str], *, but: Collection[str] = ()) -> Frozen:
    """Freeze matching modules and parameters: no gradients, and no updates of running statistics.

    A norm layer with running statistics (BatchNorm) goes into eval mode if it is in a matched module or all
    its parameters are frozen, and `train()` leaves it there. Dropout stays active. Old gradients are dropped,
    so that no optimizer applies them.

    Args:
        model: changed in place.
        patterns: of names of modules and parameters, as in a shell, case-sensitive; `*` matches dots too:
            'layer1' is the module, '*bn*' each norm, '*.bias' each bias, '*' everything.
        but: patterns of exceptions: `freeze(model, ["*"], but=["fc"])`. A norm layer is one, with its
            statistics, if it or all of its parameters match.

    Returns:
        Counts of the whole model; as text, one line.

    Raises:
        ValueError: a pattern matches nothing; the model is unchanged.
        TypeError: a single string instead of patterns.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3))
        >>> print(freeze(model, ["*"], but=["2"]))
        24 of 33 parameters frozen, 9 trainable; running statistics of 1 norm layers frozen
        >>> model.train()[1].training
        False
    """
    parameters, norms = _matching(model, patterns)
    kept_parameters, kept_norms = _matching(model, but)
    for parameter in parameters - kept_parameters:
        parameter.requires_grad_(False)
        parameter.grad = None
    for norm in _norms(model):
        affine = set(norm.parameters())
        all_frozen = bool(affine) and not any(parameter.requires_grad for parameter in affine)
        is_kept = norm in kept_norms or (bool(affine) and affine <= kept_parameters)
        if not is_kept and (norm in norms or all_frozen):
            norm.eval()
            # An instance attribute hides the method; a partial can be copied and pickled.
            vars(norm)["train"] = functools.partial(_stay_in_eval, norm)
    return count_frozen(model)


def unfreeze(model: nn.Module, patterns: Collection[str]) -> Frozen:
    """Make matching modules and parameters trainable again, with the running statistics of their norms.

    Args:
        patterns: as for `freeze`; integer parameters stay as they are.

    Raises:
        ValueError: a pattern matches nothing; the model is unchanged.
        TypeError: a single string instead of patterns.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> _ = freeze(model, ["*"])
        >>> unfreeze(model, ["1"]).num_trainable
        6
    """
    parameters, norms = _matching(model, patterns)
    for parameter in parameters:
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(True)
    for norm in _norms(model):
        is_meant = norm in norms or not parameters.isdisjoint(norm.parameters())
        if is_meant and vars(norm).pop("train", None) is not None:
            norm.train(model.training)
    return count_frozen(model)


def unfreeze_gradually(
    model: nn.Module, stages: Sequence[str], *, epoch: int, every: int = 1
) -> Frozen:
    """Freeze the stages of a model, then unfreeze one more every few epochs, from the last on.

    Call it at the beginning of each epoch, on which alone the result depends. Parts that no stage matches
    (the head) are not changed. Give the optimizer all parameters from the start; it skips those without
    gradients.

    Args:
        stages: patterns from the input to the output, as for `freeze`; where two overlap, frozen wins.
        epoch: from 0; in epoch 0 all stages are frozen.
        every: epochs from one stage to the next, at least 1.

    Raises:
        ValueError: a negative epoch, `every` below 1, or a pattern that matches nothing.
        TypeError: `stages` is a single string.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        >>> [unfreeze_gradually(model, ["0", "1"], epoch=epoch).num_trainable for epoch in range(4)]
        [3, 9, 15, 15]
    """
    if epoch < 0 or every < 1:
        raise ValueError(f"epoch must be at least 0 and every at least 1, got {epoch} and {every}")
    num_frozen = max(0, len(stages) - epoch // every)
    _matching(model, stages)  # refuses a wrong pattern in the first epoch already
    unfreeze(model, stages[num_frozen:])
    return freeze(model, stages[:num_frozen])


def count_frozen(model: nn.Module) -> Frozen:
    """Count frozen and trainable parameters, and frozen norm layers.

    Example:
        >>> count_frozen(nn.Linear(2, 3))
        Frozen(num_frozen=0, num_trainable=9, num_norms=0)
    """
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    return Frozen(sizes[False], sizes[True], sum("train" in vars(norm) for norm in _norms(model)))


def _stay_in_eval(norm: nn.Module, mode: bool = True) -> nn.Module:
    return norm


def _norms(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with running statistics: BatchNorm of any kind, InstanceNorm that tracks them."""
    for module in model.modules():
        if module._buffers.get("running_mean") is not None:
            yield module


def _matching(model: nn.Module, patterns: Collection[str]) -> tuple[set[Parameter], set[nn.Module]]:
    """The parameters that match or are in a matching module; and all matching modules with their children."""
    if isinstance(patterns, str):
        raise TypeError(f"patterns must be a list, got one string: [{patterns!r}]")
    modules = dict(model.named_modules(remove_duplicate=False))
    named = dict(model.named_parameters(remove_duplicate=False))
    matched: set[nn.Module] = set()
    parameters: set[Parameter] = set()
    for pattern in patterns:
        inside = [module for name, module in modules.items() if fnmatchcase(name, pattern)]
        alone = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
        if not inside and not alone:
            near = difflib.get_close_matches(pattern.strip("*."), [*modules, *named], n=3)
            nearest = f"the nearest names are {', '.join(map(repr, near))}; " if near else ""
            parts = [repr(name) for name, _ in model.named_children()][:10]
            raise ValueError(
                f"{pattern!r} matches no module and no parameter of the model; {nearest}its parts are "
                + (", ".join(parts) or "none")
            )
        for module in inside:
            matched |= set(module.modules())
            parameters |= set(module.parameters())
        parameters |= set(alone)
    return parameters, matched
