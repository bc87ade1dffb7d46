"""List the tensors of a checkpoint by path, and the dicts in it that can be a model's state_dict.

检查点中的张量按位置列出，以及其中可以作为模型 state_dict 的字典。

Source: original; the keys are those under which torchvision, timm, PyTorch Lightning, MMEngine, DeepSpeed,
Ultralytics and the ImageNet example save weights. Not needed for a file that is only a state_dict.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

_LEAVES = str, bytes, int, float, set, frozenset, type(None)
# Characters of a path, and of all paths; no real checkpoint has more.
_MAX_LENGTH, _MAX_TOTAL = 2000, 100_000_000
# The keys of the projects above; averaged weights come last, to be chosen explicitly.
KEYS = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "params",
    "model_ema",
    "ema_state_dict",
    "state_dict_ema",
    "ema",
    "params_ema",
)


def tensors_in(value: Any) -> dict[str, Tensor]:
    """List every tensor in nested data by its path, such as 'optimizer.state.0.exp_avg'.

    Args:
        value: nested dicts, lists, tuples and objects with a dict `state`; a module, real or read by
            `safe_pickle`, counts as its state_dict.

    Returns:
        The tensors, not copied; of a repeated container only the first occurrence.

    Raises:
        ValueError: two tensors have the same path, as in {'a.b': x, 'a': {'b': y}}; or paths are too long
            for a checkpoint.

    Example:
        >>> import torch
        >>> list(tensors_in({"state_dict": {"weight": torch.ones(1)}, "lr": [0.1, torch.ones(1)]}))
        ['state_dict.weight', 'lr.1']
    """
    tensors: dict[str, Tensor] = {}
    length = 0
    for path, item in nested_items(value):
        if isinstance(item, Tensor):
            length += len(path)
            if len(path) > _MAX_LENGTH or length > _MAX_TOTAL:
                raise ValueError(f"names are too long to be listed: {path[:40]!r}...")
            if path in tensors:
                raise ValueError(f"two tensors have the name {path[:80]!r}")
            tensors[path] = item
    return tensors


def nested_items(value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over all objects in nested data with their paths, as in `tensors_in`; the outermost is ''.

    Example:
        >>> list(nested_items({"lr": [0.5]}))
        [('', {'lr': [0.5]}), ('lr', [0.5]), ('lr.0', 0.5)]
    """
    seen: set[int] = set()
    # Iterators, so that a long path before a million children is not copied for each at once.
    todo: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter([("", value)]))]
    while todo:
        prefix, children = todo[-1]
        for key, item in children:
            path = f"{prefix}{key}"
            if isinstance(item, Tensor):
                yield path, item
            elif id(item) not in seen:
                seen.add(id(item))
                yield path, item
                if isinstance(item, _LEAVES):
                    continue
                # A path that is too long already does not grow further.
                todo.append((f"{path[: _MAX_LENGTH + 1]}." if path else "", _children(item)))
                break
        else:
            todo.pop()


def state_dicts_in(value: Any) -> dict[str, dict[str, Tensor]]:
    """Find the entries of a checkpoint that can be a model's state_dict, the most probable first.

    Args:
        value: the result of torch.load or `safe_pickle.load_pickle`.

    Returns:
        State dicts, tensors only, by key; the key is '' if `value` is one itself. A module counts as its
        state_dict.

    Example:
        >>> import torch
        >>> weights = {"layer.weight": torch.ones(2)}
        >>> checkpoint = {"epoch": 3, "model": weights, "ema": weights, "optimizer": {"state": {}}}
        >>> list(state_dicts_in(checkpoint)), list(state_dicts_in(weights))
        (['model', 'ema'], [''])
    """
    if _is_state_dict(value) or modules_of(value) is not None:
        return {"": tensors_in(value)} if tensors_in(value) else {}
    if not isinstance(value, dict):
        tensors = tensors_in(value)
        return {"": tensors} if tensors else {}
    candidates = {
        str(key): tensors_in(item)
        for key, item in value.items()
        if _is_state_dict(item) or modules_of(item) is not None
    }
    order = {key: rank for rank, key in enumerate(KEYS)}
    ranked = sorted(candidates, key=lambda key: order.get(key, len(order)))
    return {key: candidates[key] for key in ranked if candidates[key]}


def _is_state_dict(value: Any) -> bool:
    if not isinstance(value, dict) or not any(isinstance(item, Tensor) for item in value.values()):
        return False
    # Extra state (get_extra_state) and counters of wrappers are allowed, but no dict or module with tensors.
    return all(isinstance(key, str) for key in value) and not any(
        (isinstance(item, dict) or modules_of(item) is not None) and tensors_in(item)
        for item in value.values()
    )


def modules_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a module, real or read by `safe_pickle`; None for other objects.

    Example:
        >>> from torch import nn
        >>> sorted(modules_of(nn.Linear(1, 1))["_parameters"])
        ['bias', 'weight']
    """
    for kept in ("__dict__", "state"):
        attributes = getattr(value, kept, None)
        if isinstance(attributes, dict) and isinstance(attributes.get("_modules"), dict):
            return attributes
    return None


def _children(item: Any) -> Iterator[tuple[Any, Any]]:
    attributes = modules_of(item)
    if attributes is not None:
        skipped = attributes.get("_non_persistent_buffers_set") or ()
        for part in ("_parameters", "_buffers", "_modules"):
            children = attributes.get(part)
            for key, child in children.items() if isinstance(children, dict) else ():
                if part != "_buffers" or key not in skipped:
                    yield key, child
    elif isinstance(item, dict):
        yield from item.items()
    elif isinstance(item, list | tuple):
        yield from enumerate(item)
    elif isinstance(getattr(item, "state", None), dict):
        yield from item.state.items()
