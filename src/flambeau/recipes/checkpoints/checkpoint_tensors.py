"""The tensors of a checkpoint by their place, and the dicts in it that can be a model's state_dict.

检查点中的张量按位置列出，以及其中可以作为模型 state_dict 的字典。

Source: own; the keys are those under which torchvision, timm, PyTorch Lightning, MMEngine, DeepSpeed,
Ultralytics and the ImageNet example keep weights. Not for a state_dict that is plain already.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

_PLAIN = str, bytes, int, float, set, frozenset, type(None)  # which are not looked into
# Characters of a name, and of all names: a file with more is not meant to be listed.
_LONGEST, _MOST = 2000, 100_000_000
# Averaged weights last: who needs them asks for them. Chosen by what the named projects write.
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
    """Every tensor in nested data, by its place: 'optimizer.state.0.exp_avg'.

    Args:
        value: dicts, lists, tuples and objects with a dict `state` in each other; of a module that
            `safe_pickle` has read, or a real one, the names are those of its state_dict.

    Returns:
        The tensors as they are; a container that is in several places counts at the first.

    Raises:
        ValueError: two tensors have one name, such as {'a.b': x, 'a': {'b': y}}; or names so long that
            the file is no checkpoint.

    Example:
        >>> import torch
        >>> list(tensors_in({"state_dict": {"weight": torch.ones(1)}, "lr": [0.1, torch.ones(1)]}))
        ['state_dict.weight', 'lr.1']
    """
    found: dict[str, Tensor] = {}
    length = 0
    for place, item in places_in(value):
        if isinstance(item, Tensor):
            length += len(place)
            if len(place) > _LONGEST or length > _MOST:
                raise ValueError(f"names are too long to be listed: {place[:40]!r}...")
            if place in found:
                raise ValueError(f"two tensors have the name {place[:80]!r}")
            found[place] = item
    return found


def places_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Everything in nested data with its place, as of `tensors_in`, the outermost first under ''.

    Example:
        >>> list(places_in({"lr": [0.5]}))
        [('', {'lr': [0.5]}), ('lr', [0.5]), ('lr.0', 0.5)]
    """
    seen: set[int] = set()
    # Iterators, so that a long name in front of a million children is not written out for each.
    todo: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter([("", value)]))]
    while todo:
        prefix, children = todo[-1]
        for key, item in children:
            place = f"{prefix}{key}"
            if isinstance(item, Tensor):
                yield place, item
            elif id(item) not in seen:
                seen.add(id(item))
                yield place, item
                if isinstance(item, _PLAIN):
                    continue
                # A name that is too long already stays just that, however deep it goes on.
                todo.append((f"{place[: _LONGEST + 1]}." if place else "", _children(item)))
                break
        else:
            todo.pop()


def state_dicts_in(value: Any) -> dict[str, dict[str, Tensor]]:
    """What in a checkpoint can be the state_dict of a model, the most probable first.

    Args:
        value: what torch.load or `safe_pickle.load_pickle` gave.

    Returns:
        State dicts of tensors alone by their key; the key is '' where `value` is one itself. Entries
        without tensors are left out; a module under a key counts as its state_dict.

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
        found = tensors_in(value)
        return {"": found} if found else {}
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
    # Extra state (get_extra_state) and the counters of wrappers may be anything but a container.
    return all(isinstance(key, str) for key in value) and not any(
        (isinstance(item, dict) or modules_of(item) is not None) and tensors_in(item)
        for item in value.values()
    )


def modules_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a module, real or read by `safe_pickle`; None for something else.

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
