"""A learning rate for each layer: smaller towards the input, and a separate one for the head.

逐层的学习率：越靠近输入越小，分类头可以单独设定。

Source: Clark et al., "ELECTRA", ICLR 2020, appendix B, and Bao et al., "BEiT", ICLR 2022, appendix (lr times
decay^k, k layers below the head); timm's models define their layers by `group_matcher`.

Not for schedulers that multiply by a group's `lr_scale`, as timm's do: here `lr` is the scaled rate, which
torch's schedulers and any `initial_lr * multiplier` keep in proportion (OneCycleLR needs a list of `max_lr`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn import Parameter

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_ROW = "{:10} {:>7} {:>11} {:>9} {:>12}  {}"


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Number the layers of a model from the input (0) to the head, and map each parameter to its layer.

    timm's models define their layers themselves. In others, the children of stacks of blocks (Sequential,
    ModuleList, ModuleDict, and modules that contain one) are the layers, in the order of registration: a
    block, or a layer with the norms after it. Embeddings, and parameters directly in such a stack (class
    token), are layer 0. If a model registers its parts in another order, write the dict yourself.

    Returns:
        {parameter name: depth}, with all names of a shared parameter.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
        >>> layer_depths(model)
        {'0.weight': 0, '0.bias': 0, '1.weight': 0, '1.bias': 0, '3.weight': 1, '3.bias': 1}
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if callable(matcher := getattr(model, "group_matcher", None)):
        from timm.models import group_parameters

        depths: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        last = max(depths.values(), default=0)
        return {name: depths.get(name, last) for name in names}
    depths = dict.fromkeys(names, 0)
    deepest = -1
    visited: dict[nn.Module, int] = {}
    for prefix, module in _units(model):
        inside = [f"{prefix}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
        is_embedding = isinstance(module, nn.Embedding)
        is_norm = not list(module.children()) and all(p.ndim < 2 for p in module.parameters())
        if module not in visited:  # another name of a layer does not make another layer
            if inside and not is_embedding and (not is_norm or deepest < 0):
                deepest += 1
            visited[module] = 0 if is_embedding else deepest
        depths.update(dict.fromkeys(inside, visited[module]))
    return depths


def layerwise_lr(
    groups: Iterable[Mapping[str, Any]],
    model: nn.Module,
    *,
    lr: float,
    layer_decay: float = 1.0,
    head: Collection[str] = (),
    head_lr: float | None = None,
    depths: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Split parameter groups by layer, with learning rate lr * layer_decay^k for k layers below the deepest.

    Other settings of a group stay (`weight_decay`), and each parameter is in exactly once.

    Args:
        groups: dicts with `params`; one with an `lr` keeps that as its base rate.
        lr: of the deepest layer, at least 0.
        layer_decay: in (0, 1]. 1 gives all layers the same rate; 0.65 to 0.9 are usual.
        head: names or patterns of parameters that get `head_lr` at any depth.
        head_lr: at least 0.
        depths: by default those of `layer_depths`; other parameters count as deepest.

    Returns:
        Groups with `params`, `lr` and `name`, from input to head within each old group; one per rate, because
        a fused optimizer step is launched per group.

    Raises:
        ValueError: a number out of range, a pattern without a match, only one of `head` and `head_lr`, a
            parameter of another model, or a decay over one layer.
        TypeError: `head` is a single string.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        >>> groups = [{"params": list(model.parameters()), "weight_decay": 0.01}]
        >>> [(g["name"], g["lr"]) for g in layerwise_lr(groups, model, lr=1.0, layer_decay=0.5)]
        [('layer 0', 0.25), ('layer 1', 0.5), ('layer 2', 1.0)]
    """
    _check(lr, layer_decay, head, head_lr)
    names = _names(model)
    in_head = _matching(names, head)
    depths = layer_depths(model) if depths is None else depths
    deepest = max(depths.values(), default=0)
    if layer_decay < 1 and deepest == 0:
        raise ValueError("layer_decay has no effect: the whole model is one layer; give depths=")
    parts: list[dict[str, Any]] = []
    for group in groups:
        base = group.get("lr", lr)
        split = dict[int, list[Parameter]]()
        for parameter in _listed(group["params"]):
            if parameter not in names:
                raise ValueError(f"not of this model: a parameter of {list(parameter.shape)}")
            # The smallest: a weight that embedding and output share belongs to the embedding.
            depth = min(depths.get(name, deepest) for name in names[parameter])
            depth = deepest + 1 if parameter in in_head else depth if layer_decay < 1 else deepest
            split.setdefault(depth, []).append(parameter)
        for depth, parameters in sorted(split.items()):
            name = f"layer {depth}" if layer_decay < 1 else f"layers 0-{deepest}"
            name = name if depth <= deepest else "head"
            rate = base * layer_decay ** (deepest - depth) if depth <= deepest else head_lr
            parts.append({**group, "name": name, "lr": rate, "params": parameters})
    return parts


def group_table(groups: Iterable[Mapping[str, Any]], model: nn.Module) -> str:
    """Format parameter groups as a table of name, tensors, parameters, learning rate and weight decay.

    Returns:
        A line per group; then the trainable parameters in none and in several, if any.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> print(group_table([{"params": [*model[1].parameters()], "lr": 0.1}], model))
        group      tensors  parameters        lr weight_decay  first
        0                2          18       0.1            -  1.weight
        in no group: 0.weight, 0.bias
    """
    names = _names(model)
    seen = Counter[Parameter]()
    lines = [_ROW.format("group", "tensors", "parameters", "lr", "weight_decay", "first")]
    for index, group in enumerate(groups):
        parameters = _listed(group["params"])
        seen.update(parameters)
        size = f"{sum(p.numel() for p in parameters):,}"
        rate, decay = (f"{group[k]:.4g}" if k in group else "-" for k in ("lr", "weight_decay"))
        name = group.get("name", str(index))
        first = next((names.get(p, ["of another model"])[0] for p in parameters), "-")
        lines.append(_ROW.format(name, len(parameters), size, rate, decay, first))
    lost = [aliases[0] for p, aliases in names.items() if p.requires_grad and p not in seen]
    twice = [aliases[0] for p, aliases in names.items() if seen[p] > 1]
    for where, which in (("no group", lost), ("several groups", twice)):
        lines += [f"in {where}: {', '.join(which)}"] if which else []
    return "\n".join(lines)


def _units(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_modules(remove_duplicate=False):
        if not name or "." in name:  # named_children() would omit further names of a child
            continue
        if isinstance(child, _CONTAINERS) or any(map(_is_stack, child.modules())):
            yield from _units(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _is_stack(module: nn.Module) -> bool:
    """A container with two blocks of one class, or with more layers than a block has (VGG)."""
    if not isinstance(module, _CONTAINERS):
        return False
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    blocks = Counter(type(child) for child in children if list(child.children()))
    repeated = any(n > 1 and not issubclass(kind, _CONTAINERS) for kind, n in blocks.items())
    return repeated or len(children) - blocks.total() > 4  # the most in a block of torchvision


def _check(lr: float, layer_decay: float, head: Collection[str], head_lr: float | None) -> None:
    if not (lr >= 0 and (head_lr or 0.0) >= 0 and 0 < layer_decay <= 1):
        got = f"{lr}, {head_lr} and {layer_decay}"
        raise ValueError(f"lr and head_lr must be at least 0, layer_decay in (0, 1], got {got}")
    if isinstance(head, str):
        raise TypeError(f"head must be a list, got one string: [{head!r}]")
    if bool(head) != (head_lr is not None):
        raise ValueError("head and head_lr have an effect together only: give both or none")


def _names(model: nn.Module) -> dict[Parameter, list[str]]:
    names: dict[Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _matching(names: dict[Parameter, list[str]], patterns: Collection[str]) -> set[Parameter]:
    matched: set[Parameter] = set()
    for pattern in patterns:
        new = {p for p, aliases in names.items() if any(fnmatchcase(n, pattern) for n in aliases)}
        matched |= new
        if not new:
            raise ValueError(f"head: {pattern!r} matches none of the model's parameter names")
    return matched


def _listed(params: Any) -> list[Parameter]:
    return [params] if isinstance(params, Parameter) else list(params)
