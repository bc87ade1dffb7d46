"""Names of a state_dict without the prefixes that wrappers put before or into them, or with a model's.

去掉包装器加在 state_dict 名字前面或中间的前缀，或者换成某个模型的名字。

Source: torch: `DataParallel.module`, `torch.compile`'s `_orig_mod`, FSDP's `_fsdp_wrapped_module`,
`CheckpointWrapper._checkpoint_wrapped_module`, `AveragedModel` with its `n_averaged`.
Not for flat parameters of FSDP (`_flat_param`), which are no tensors of a model: save those by
`torch.distributed.checkpoint.state_dict.get_model_state_dict`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

# Names that torch keeps for itself: wherever one of them is a part of a name, a wrapper stood there.
_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# A name that users give too: it is a wrapper's where all names begin with it.
_AT_START = "module"
_COUNTER = "n_averaged"  # of AveragedModel, beside the module that it wraps


def strip_prefixes(state_dict: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    """A state_dict under the names of the model without its wrappers.

    Args:
        state_dict: of DataParallel, DDP, FSDP, torch.compile, AveragedModel, activation checkpoints, in
            any order and depth; of a plain model it comes back as it is.

    Returns:
        A new dict with the same values, in the same order, and `_metadata` renamed likewise. The
        counter of AveragedModel is left out with its prefix.

    Raises:
        ValueError: two names would become one, or a parameter is a flat one of FSDP.

    Example:
        >>> list(strip_prefixes({"module._orig_mod.sub_module.weight": 1, "module.0._orig_mod.bias": 2}))
        ['sub_module.weight', '0.bias']
        >>> list(strip_prefixes({"module.weight": 1, "head.weight": 2}))  # a module called 'module'
        ['module.weight', 'head.weight']
    """
    return _renamed(state_dict, _stripper(state_dict))


def names_like(state_dict: Mapping[str, Any], model: nn.Module) -> "OrderedDict[str, Any]":
    """A state_dict under the names of a model, whichever of the two is wrapped, and how.

    The model decides what no name can tell: whether a `module` in it is a wrapper or the user's.

    Args:
        state_dict: of the same network, wrapped otherwise.
        model: it is not changed.

    Returns:
        A new dict with the same values; what the model has no place for keeps its name without
        prefixes, so that `load_state_dict` says so.

    Raises:
        ValueError: two names would become one, or a name has two places in the model.

    Example:
        >>> state = nn.Sequential(nn.DataParallel(nn.Linear(2, 2))).state_dict()
        >>> list(state), list(names_like(state, nn.Sequential(nn.Linear(2, 2))))
        (['0.module.weight', '0.module.bias'], ['0.weight', '0.bias'])
    """
    targets: dict[str, list[str]] = {}
    exact = set(model.state_dict())
    for name in exact:
        targets.setdefault(_core(name), []).append(name)
    strip = _stripper(state_dict)

    def rename(name: str) -> str | None:
        if name in exact:
            return name
        places = targets.get(_core(name), [])
        if len(places) > 1:
            raise ValueError(
                f"{name!r} may be any of {sorted(places)} of the model; rename it yourself"
            )
        return places[0] if places else strip(name)

    renamed = _renamed(state_dict, rename)
    if hasattr(renamed, "_metadata"):  # the paths of modules; the model has its own
        del renamed._metadata
    return renamed


def add_prefix(state_dict: Mapping[str, Any], prefix: str) -> "OrderedDict[str, Any]":
    """A state_dict for a wrapper: every name with a prefix, `_metadata` too.

    Args:
        state_dict: of the model.
        prefix: such as 'module.', with its dot.

    Returns:
        A new dict with the same values.

    Raises:
        ValueError: the prefix does not end with a dot.

    Example:
        >>> list(add_prefix({"weight": 1}, "module."))
        ['module.weight']
    """
    if not prefix.endswith("."):
        raise ValueError(f"a prefix ends with a dot, got {prefix!r}")
    return _renamed(state_dict, lambda name: prefix + name)


def _stripper(names: Iterable[str]) -> Callable[[str], str | None]:
    """The function that strips what all of these names are wrapped in; None is for what goes with it."""
    rest = [_without_reserved(name).split(".") for name in names if name != _COUNTER]
    depth = 0
    while rest and all(len(p) > depth + 1 and p[depth] == _AT_START for p in rest):
        depth += 1

    def strip(name: str) -> str | None:
        if depth and name == _COUNTER:
            return None
        return ".".join(_without_reserved(name).split(".")[depth:])

    return strip


def _without_reserved(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _ANYWHERE)


def _core(name: str) -> str:
    """What is left of a name if every part that can be a wrapper is one."""
    return ".".join(part for part in _without_reserved(name).split(".") if part != _AT_START)


def _renamed(
    state_dict: Mapping[str, Any], rename: Callable[[str], str | None]
) -> "OrderedDict[str, Any]":
    result: OrderedDict[str, Any] = OrderedDict()
    origin: dict[str, str] = {}
    for name, value in state_dict.items():
        if name.rpartition(".")[2] == "_flat_param":
            raise ValueError(
                f"{name!r} is a flat parameter of FSDP, in which the names of the model are lost; save "
                "by torch.distributed.checkpoint.state_dict.get_model_state_dict"
            )
        new = rename(name)
        if new is None:
            continue
        if new in result:
            raise ValueError(f"{origin[new]!r} and {name!r} would both become {new!r}")
        result[new], origin[new] = value, name
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # Paths of modules, '' for the outermost: the innermost of those that become one is the model's.
        paths = sorted(metadata, key=lambda path: path.count("."))
        moved = {(rename(f"{path}.") or "").rstrip("."): metadata[path] for path in paths}
        result._metadata = OrderedDict(moved)  # type: ignore[attr-defined]
    return result
