"""Load the parts of a state dict that fit, and report what happened to every tensor.

加载 state dict 中与模型对得上的部分，并逐个说明每个张量有没有加载。

Source: original; positions are resampled as in Dosovitskiy et al., "An image is worth 16x16 words", ICLR
2021.

Not for a checkpoint that should fit: `load_state_dict` without options is the stricter check.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Resize = Callable[[Tensor, torch.Size], Tensor | None]


class Loaded(NamedTuple):
    """What happened to each tensor; each name of the model is in one of the first four.

    Only a further name of a loaded shared tensor may be in none.
    """

    matched: dict[str, str]
    """Loaded unchanged: name in the model -> name in the state dict."""
    resized: dict[str, str]
    """Loaded with another shape: name in the model -> what was done."""
    mismatched: dict[str, str]
    """In both, but not loaded: name in the model -> the two shapes."""
    missing: list[str]
    """Only in the model; they keep their initial values."""
    unexpected: list[str]
    """Only in the state dict."""
    converted: dict[str, str]
    """Loaded with another dtype: name in the model -> the two dtypes, and how many values overflow."""
    share: float
    """Fraction of the model's elements that were loaded; each shared tensor counts once."""

    def __str__(self) -> str:
        lines = [f"{self.share:.1%} of the model loaded: {len(self.matched)} tensors as they were"]
        for title, rows in (
            ("resized", self.resized),
            ("left alone, other shape", self.mismatched),
            ("missing, initial values", dict.fromkeys(self.missing, "")),
            ("unexpected, not used", dict.fromkeys(self.unexpected, "")),
            ("other dtype", self.converted),
        ):
            if rows:
                lines.append(f"{title} ({len(rows)}):")
                width = max(map(len, rows))
                lines += [f"  {name:{width}}  {what}".rstrip() for name, what in rows.items()]
        return "\n".join(lines)


def load_partial(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    rename: Mapping[str, str] | None = None,
    resize: Mapping[str, Resize] | None = None,
    min_share: float = 0.5,
) -> Loaded:
    """Copy the tensors of a state dict that fit by name and shape into a model.

    Args:
        model: changed in place; device and dtype stay.
        state: {name: tensor}, such as from `torch.load(file, weights_only=True)` or safetensors.
        rename: {prefix in the state dict: prefix in the model}; the longest match of whole parts counts:
            'backbone' matches 'backbone.conv1', '' every name.
        resize: {name in the model: function of (tensor, wanted shape)} for shapes that differ, such as
            `grey_filters` and `resampled_positions`; a tensor for which it returns None is not loaded.
        min_share: fraction of the model's elements that must fit, in (0, 1].

    Returns:
        The report; as text, a table.

    Raises:
        ValueError: less fits, two names become one, a name in `rename` or `resize` has no effect, or a
            resized shape is wrong; the model is unchanged.
        TypeError: a value is no tensor: the state dict is nested in `state`.

    Example:
        >>> model, other = nn.Linear(4, 3), nn.Linear(4, 3)
        >>> state = {f"encoder.{name}": value for name, value in other.state_dict().items()}
        >>> print(load_partial(model, {**state, "head.bias": torch.ones(2)}, rename={"encoder": ""}))
        100.0% of the model loaded: 2 tensors as they were
        unexpected, not used (1):
          head.bias
    """
    if not 0 < min_share <= 1:
        raise ValueError(f"min_share must be in (0, 1], got {min_share}")
    targets = {n: v for n, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    sources = _renamed(state, rename or {})
    if unknown := set(resize or ()) - targets.keys():
        raise ValueError(f"resize: the model has no tensor {sorted(unknown)[0]!r}")
    if any(value.is_meta for value in (*targets.values(), *state.values())):
        raise ValueError("the model or the state dict is on meta, without values: to_empty() first")
    report = Loaded({}, {}, {}, [], [], {}, 0.0)
    values: dict[str, Tensor] = {}
    for name, target in targets.items():
        if name in sources:
            value = _fitting(name, state[sources[name]], target, (resize or {}).get(name), report)
            if value is not None:
                values[name] = value
    loaded = {id(targets[name]): targets[name].numel() for name in values}
    report.matched.update({n: sources[n] for n in values if n not in report.resized})
    # A shared tensor is often saved under only one of its names; the others are not missing.
    report.missing.extend(n for n, v in targets.items() if n not in sources and id(v) not in loaded)
    report.unexpected.extend(source for name, source in sources.items() if name not in targets)
    total = sum({id(value): value.numel() for value in targets.values()}.values())
    report = report._replace(share=sum(loaded.values()) / max(1, total))
    if report.share < min_share:
        raise ValueError(
            f"{report.share:.1%} of the model would be loaded, less than min_share={min_share}: "
            f"the model has {_some(targets)}, the state dict {_some(state)}; see rename= and resize="
        )
    model.load_state_dict(values, strict=False)
    return report


def grey_filters(value: Tensor, shape: torch.Size) -> Tensor | None:
    """Sum a first convolution's filters over its input channels, for grey images with one channel.

    The layer then computes what it did for a grey image repeated in all channels.

    Example:
        >>> grey_filters(torch.ones(8, 3, 5, 5), torch.Size([8, 1, 5, 5])).mean().item()
        3.0
    """
    grey = value.sum(1, keepdim=True) if value.ndim > 2 else value
    return grey if grey.shape == shape else None


def resampled_positions(value: Tensor, shape: torch.Size) -> Tensor | None:
    """Resample the position embeddings of a vision transformer, (1, tokens, width), for another image size.

    Bicubic with antialiasing, in float32, between square grids; up to 8 tokens before the grid (class,
    registers) are copied.

    Example:
        >>> resampled_positions(torch.ones(1, 1 + 14 * 14, 192), torch.Size([1, 1 + 24 * 24, 192])).shape
        torch.Size([1, 577, 192])
    """
    if value.ndim != 3 or len(shape) != 3 or value.shape[::2] != shape[::2]:
        return None
    for front in range(9):
        old, new = (math.isqrt(max(0, tokens - front)) for tokens in (value.shape[1], shape[1]))
        if old * new and (old**2 + front, new**2 + front) == (value.shape[1], shape[1]):
            grid = value[:, front:].float().unflatten(1, (old, old)).permute(0, 3, 1, 2)
            grid = F.interpolate(grid, size=(new, new), mode="bicubic", antialias=True)
            grid = grid.permute(0, 2, 3, 1).flatten(1, 2).to(value.dtype)
            return torch.cat([value[:, :front], grid], dim=1)
    return None


def _renamed(state: Mapping[str, Tensor], rename: Mapping[str, str]) -> dict[str, str]:
    """{name for the model: name in the state dict}."""
    sources: dict[str, str] = {}
    used: set[str] = set()
    for source, value in state.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"{source!r} is a {kind}, not a tensor: pass the dict of tensors")
        name = source
        if fitting := [old for old in rename if f"{source}.".startswith(f"{old}." if old else "")]:
            old = max(fitting, key=len)
            used.add(old)
            name = f"{rename[old]}.{source[len(old) :].removeprefix('.')}".strip(".")
        if name in sources:
            raise ValueError(f"rename: {sources[name]!r} and {source!r} both become {name!r}")
        sources[name] = source
    if unused := rename.keys() - used:
        raise ValueError(f"rename: no name in the state dict is changed by {sorted(unused)[0]!r}")
    return sources


def _fitting(
    name: str, value: Tensor, target: Tensor, resize: Resize | None, report: Loaded
) -> Tensor | None:
    """The tensor to load, or None; also fills the report."""
    if value.shape != target.shape:
        shapes = f"{list(value.shape)} -> {list(target.shape)}"
        resized = None if resize is None else resize(value, target.shape)
        if resize is None or resized is None:
            report.mismatched[name] = shapes
            return None
        if resized.shape != target.shape:
            got, to_be = list(resized.shape), list(target.shape)
            raise ValueError(f"resize: {name!r} is to be {to_be}, got {got}")
        report.resized[name] = f"{shapes} by {getattr(resize, '__name__', 'resize')}"
        value = resized
    if value.dtype != target.dtype:
        lost = int((value.isfinite() & ~value.to(target.dtype).double().isfinite()).sum())
        overflow = f", {lost} values beyond its range become infinite" if lost else ""
        report.converted[name] = f"{value.dtype} -> {target.dtype}{overflow}"
    return value


def _some(names: Mapping[str, Any]) -> str:
    first = ", ".join(map(repr, list(names)[:2])) or "nothing"
    return f"{first} and {len(names) - 2} more" if len(names) > 2 else first
