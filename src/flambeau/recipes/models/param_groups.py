"""Parameter groups with weight decay only on weights, and no parameter lost.

只对权重做权重衰减的参数分组，一个参数也不会遗漏。

Source: He et al., "Bag of tricks for image classification with convolutional neural networks", CVPR 2019,
section 3.1 (no decay on biases and norms), with the `no_weight_decay()` convention of timm's models.

Not for optimizers that need other groups too (Muon needs a group of matrices).
"""

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import Parameter, is_lazy


def param_groups(
    model: nn.Module, *, weight_decay: float, no_decay: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Split the trainable parameters into those with and those without weight decay.

    Without decay are parameters of at most one dimension, biases, those of a LayerNorm or RMSNorm, and those
    that the model's `no_weight_decay()` or `no_decay` names; embedding tables decay. A parameter with several
    names (tied weights) is listed once; one matching name is enough. Frozen ones are left out, so freeze
    before.

    Args:
        model: with initialized parameters.
        weight_decay: at least 0, for the first group.
        no_decay: patterns as in a shell ('*embed*') of whole parameter names, case-sensitive.

    Returns:
        Groups with `params`, in the model's order, and `weight_decay`; none is empty. Add `lr` to one for
        another learning rate.

    Raises:
        ValueError: a negative decay, a pattern without a match, no trainable parameter, or a lazy one.
        TypeError: `no_decay` is a single string.

    Example:
        >>> from torch.optim import SGD
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> groups = param_groups(model, weight_decay=5e-4)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.0005), (3, 0.0)]
        >>> optimizer = SGD(groups, lr=0.1)
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
    if isinstance(no_decay, str):
        raise TypeError(f"no_decay must be a list of patterns, got one string: [{no_decay!r}]")
    without_decay = _without_decay(model, no_decay)
    groups: dict[float, list[Parameter]] = {weight_decay: [], 0.0: []}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet: run one batch through the model first")
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and parameter not in without_decay
            groups[weight_decay if decays else 0.0].append(parameter)
    if not any(groups.values()):
        raise ValueError("no parameter of the model is trainable: set requires_grad on some")
    return [{"params": group, "weight_decay": wd} for wd, group in groups.items() if group]


def _without_decay(model: nn.Module, patterns: Collection[str]) -> set[Parameter]:
    """The parameters without decay because of a name or their module."""
    names = dict(model.named_parameters(remove_duplicate=False))

    def matching(pattern: str) -> set[Parameter]:
        return {parameter for name, parameter in names.items() if fnmatchcase(name, pattern)}

    parameters = set().union(_in_norms(model), *map(matching, _model_patterns(model)))
    for name, parameter in names.items():
        # 'bias' as a word in the last part: also in_proj_bias, bias_hh_l0, relative_position_bias_table.
        if "bias" in name.rpartition(".")[2].split("_"):
            parameters.add(parameter)
    for pattern in patterns:
        matched = matching(pattern)
        if not matched:
            raise ValueError(
                f"no_decay: {pattern!r} matches none of the model's {len(names)} parameter names, "
                f"such as {next(iter(names), None)!r}"
            )
        parameters |= matched
    return parameters


def _in_norms(model: nn.Module) -> Iterator[Parameter]:
    for module in model.modules():
        # Of torch's norms, only these two can have weights of more than one dimension.
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            yield from module.parameters()


def _model_patterns(model: nn.Module) -> set[str]:
    """Patterns from `no_weight_decay()` of the model and all modules inside (a wrapped backbone).

    They may match nothing, because models also name parameters of their other variants.
    """
    patterns = set()
    for prefix, module in model.named_modules():
        no_weight_decay = getattr(module, "no_weight_decay", None)
        if callable(no_weight_decay):
            patterns |= {f"{prefix}.{name}" if prefix else name for name in no_weight_decay()}
    return patterns
