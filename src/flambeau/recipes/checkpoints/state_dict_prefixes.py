"""Remove the prefixes of wrappers from the names of a state_dict, or rename it to fit a model.

去掉包装器加在 state_dict 名字前面或中间的前缀，或者换成某个模型的名字。

Source: torch: `DataParallel.module`, `torch.compile`'s `_orig_mod`, FSDP's `_fsdp_wrapped_module`,
`CheckpointWrapper._checkpoint_wrapped_module`, `AveragedModel` with its `n_averaged`.
Not for flat parameters of FSDP (`_flat_param`), which are not tensors of a model: save such a model with
`torch.distributed.checkpoint.state_dict.get_model_state_dict`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

# Names that only torch uses: as a part of a name, each is a wrapper's.
_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# A name that users use too: it is a wrapper's if all names begin with it.
_AT_START = "module"
_COUNTER = "n_averaged"  # of AveragedModel, beside the wrapped module


def strip_prefixes(state_dict: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    """Rename a state_dict to the names of the model without its wrappers.

    Args:
        state_dict: of DataParallel, DDP, FSDP, torch.compile, AveragedModel, activation checkpoints, in any
            order and depth, or of a plain model.

    Returns:
        A new dict of the same values, in order, with `_metadata` renamed likewise; without the counter of
        AveragedModel.

    Raises:
        ValueError: two names would become equal, or there is a flat parameter of FSDP.

    Example:
        >>> list(strip_prefixes({"module._orig_mod.sub_module.weight": 1, "module.0._orig_mod.bias": 2}))
        ['sub_module.weight', '0.bias']
        >>> list(strip_prefixes({"module.weight": 1, "head.weight": 2}))  # a module called 'module'
        ['module.weight', 'head.weight']
    """
    return _renamed(state_dict, _stripper(state_dict))


def names_like(state_dict: Mapping[str, Any], model: nn.Module) -> "OrderedDict[str, Any]":
    """Rename a state_dict to the names of a model, however the two are wrapped.

    The model's names decide whether a `module` in a name is a wrapper's or the user's.

    Args:
        state_dict: of the same network, wrapped differently.

    Returns:
        A new dict of the same values; names unknown to the model only lose their prefixes, so that
        `load_state_dict` reports them.

    Raises:
        ValueError: two names would become equal, or a name fits two names of the model.

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
        matches = targets.get(_core(name), [])
        if len(matches) > 1:
            raise ValueError(
                f"{name!r} may be any of {sorted(matches)} of the model; rename it yourself"
            )
        return matches[0] if matches else strip(name)

    renamed = _renamed(state_dict, rename)
    if hasattr(renamed, "_metadata"):  # paths of modules, which the model has anyway
        del renamed._metadata
    return renamed


def add_prefix(state_dict: Mapping[str, Any], prefix: str) -> "OrderedDict[str, Any]":
    """Add a wrapper's prefix to every name of a state_dict and its `_metadata`, in a new dict.

    Args:
        prefix: such as 'module.', with its dot.

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
    """A function that strips the wrappers of all these names; it returns None for the counter."""
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
    """A name without any part that can be a wrapper's."""
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
        # Paths of modules, '' for the outermost. If several become equal, the innermost is the model's.
        paths = sorted(metadata, key=lambda path: path.count("."))
        moved = {(rename(f"{path}.") or "").rstrip("."): metadata[path] for path in paths}
        result._metadata = OrderedDict(moved)  # type: ignore[attr-defined]
    return result
