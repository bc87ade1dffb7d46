"""Shapes with names, checked where a function begins: N is the same in images and in targets.

带名字的形状检查，放在函数开头：images 和 targets 的 N 必须相同。

Source: the patterns of einops (Rogozhnikov, ICLR 2022), of which names, numbers, `_` and `...` are kept;
torch removed its own named tensors in 2.13. Not for values, strides or arithmetic between sizes.
"""

from typing import Any

import torch
from torch import Tensor


def check_shapes(**tensors: tuple[Any, ...]) -> dict[str, int]:
    """Compare the shapes of tensors with patterns; one name stands for one size in all of them.

    It raises and does not assert, so `python -O` keeps it. It reads shapes and no values, so it does not wait
    for a device, and `torch.compile` needs no graph break for it.

    Args:
        **tensors: for each name that the messages shall use (tensor, pattern), and optionally more: a dtype,
            a device. A device without an index ('cuda') is any of its kind. A pattern is a string of words: a
            name (bound to its first size), a number, `_` (any size), at most one `...` (any dimensions, also
            none). The empty pattern is a tensor without dimensions.

    Returns:
        The size of each name.

    Raises:
        ValueError: another shape or device, or a word that is none of a pattern.
        TypeError: another dtype, or no (tensor, pattern).

    Example:
        >>> x, y = torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
        >>> check_shapes(images=(x, "N 3 H W"), targets=(y, "N", torch.int64))
        {'N': 8, 'H': 32, 'W': 32}
        >>> check_shapes(images=(x, "N 3 H W"), targets=(y[1:], "N"))
        Traceback (most recent call last):
        ValueError: targets has shape (7,), expected N: N is 8 in images and 7 in targets
    """
    sizes: dict[str, int] = {}
    seen_in: dict[str, str] = {}
    for name, value in tensors.items():
        if not isinstance(value, tuple) or len(value) < 2 or not isinstance(value[0], Tensor):
            kinds = [type(part).__name__ for part in value] if isinstance(value, tuple) else value
            got = ", ".join(kinds) if isinstance(kinds, list) else type(kinds).__name__
            raise TypeError(f"{name} must be (tensor, 'N 3 H W'), got {got}")
        tensor, pattern, *kinds_wanted = value
        shape = tuple(tensor.shape)
        for dim, word in enumerate(_words(name, pattern, shape)):
            size = shape[dim]
            if word == "_":
                continue
            if word.isdecimal():
                if size != int(word):
                    raise _wrong(name, shape, pattern, f"dimension {dim} is {size}, not {word}")
            elif word not in sizes:
                sizes[word], seen_in[word] = size, name
            elif sizes[word] != size:
                where = seen_in[word] if seen_in[word] != name else "an earlier dimension"
                here = name if seen_in[word] != name else f"dimension {dim}"
                reason = f"{word} is {sizes[word]} in {where} and {size} in {here}"
                raise _wrong(name, shape, pattern, reason)
        for wanted in kinds_wanted:
            _check_kind(name, tensor, wanted)
    return sizes


def _words(name: str, pattern: str, shape: tuple[int, ...]) -> list[str]:
    """One word per dimension: `...` becomes as many `_` as are needed."""
    words = pattern.split()
    for word in words:
        if not (word == "..." or word.isdecimal() or word.isidentifier()):
            raise ValueError(
                f"{name}: {word!r} in {pattern!r} is neither a name, a number, _ nor ...: write "
                "words with spaces between, such as 'N 3 H W'"
            )
    if words.count("...") > 1:
        raise ValueError(f"{name}: {pattern!r} has more than one ...")
    if "..." in words:
        start = words.index("...")
        missing = len(shape) - len(words) + 1
        if missing < 0:
            reason = f"{_dimensions(shape)}, not {len(words) - 1} or more"
            raise _wrong(name, shape, pattern, reason)
        return words[:start] + ["_"] * missing + words[start + 1 :]
    if len(words) != len(shape):
        raise _wrong(name, shape, pattern, f"{_dimensions(shape)}, not {len(words)}")
    return words


def _dimensions(shape: tuple[int, ...]) -> str:
    return "1 dimension" if len(shape) == 1 else f"{len(shape)} dimensions"


def _wrong(name: str, shape: tuple[int, ...], pattern: str, reason: str) -> ValueError:
    return ValueError(f"{name} has shape {shape}, expected {pattern or 'none'}: {reason}")


def _check_kind(name: str, tensor: Tensor, wanted: torch.dtype | torch.device | str) -> None:
    if isinstance(wanted, torch.dtype):
        if tensor.dtype != wanted:
            raise TypeError(f"{name} has dtype {tensor.dtype}, expected {wanted}")
        return
    device = torch.device(wanted)
    if device.type != tensor.device.type or device.index not in (None, tensor.device.index):
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")
