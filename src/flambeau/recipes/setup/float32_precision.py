"""Compute float32 products on CUDA in full precision or as TF32: set, read and restore the switches.

CUDA 上的 float32 乘法用全精度还是 TF32：只用一套开关来设置、读取和恢复。

Source: torch.backends.*.fp32_precision (torch 2.9 and later). The older switches (allow_tf32 and
set_float32_matmul_precision) are set to the same, because if the two differ the older getters, which
torch.export and torch.compile call, raise RuntimeError.

TF32 has float32's range and 10 bits of its mantissa; sums stay in float32. NVIDIA GPUs have it from Ampere
on; elsewhere it has no effect. Not needed under autocast, which leaves few products in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

Precision = Literal["ieee", "tf32"]
_KINDS = ("matmul", "convolution", "rnn")


def float32_precision() -> dict[str, str]:
    """The precision of float32 products on CUDA.

    Returns:
        'ieee' (full float32) or 'tf32' for 'matmul', 'convolution' and 'rnn'. torch starts with 'ieee' for
        matmul and 'tf32' for the others.

    Example:
        >>> sorted(float32_precision())
        ['convolution', 'matmul', 'rnn']
    """
    return {kind: _in_effect(kind) for kind in _KINDS}


def set_float32_precision(precision: Precision) -> None:
    """Set the precision of float32 matrix products, convolutions and recurrent layers.

    Args:
        precision: 'ieee' for full float32, 'tf32' for TF32 if the GPU has it.

    Example:
        >>> with float32_precision_as("ieee"):  # restores the previous setting at the end
        ...     set_float32_precision("tf32")
        ...     print(float32_precision())
        {'matmul': 'tf32', 'convolution': 'tf32', 'rnn': 'tf32'}
    """
    if precision not in ("ieee", "tf32"):
        raise ValueError(f"precision must be 'ieee' or 'tf32', got {precision!r}")
    # Each kind separately: the setting for all backends has no effect on a kind with a specific setting,
    # and convolution and rnn have one from the start.
    word = {"ieee": "highest", "tf32": "high"}[precision]
    on_cpu = _cpu_matmul()
    if on_cpu != "none":  # 'high' and 'medium' set it, and the older getters require that it agrees
        on_cpu = precision
    _set(dict.fromkeys(_KINDS, precision), word=word, on_cpu=on_cpu)


@contextmanager
def float32_precision_as(precision: Precision) -> Iterator[None]:
    """Set the precision for the `with` block, and restore the previous setting after it.

    Args:
        precision: 'ieee' or 'tf32'.

    Example:
        >>> with float32_precision_as("ieee"):
        ...     float32_precision()["convolution"]
        'ieee'
    """
    with float32_precision_kept():
        set_float32_precision(precision)
        yield


@contextmanager
def float32_precision_kept() -> Iterator[None]:
    """Restore the present setting after the `with` block.

    Example:
        >>> with float32_precision_kept():
        ...     set_float32_precision("ieee")
        >>> float32_precision()["convolution"]
        'tf32'
    """
    before = {kind: _backend(kind).fp32_precision for kind in _KINDS}
    on_cpu = _cpu_matmul()
    word: str | None = None
    with suppress(RuntimeError):  # if older and newer switches differ already
        word = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        _set(before, word=word, on_cpu=on_cpu)


def _set(values: dict[str, str], *, word: str | None, on_cpu: str) -> None:
    """Set newer and older switches; `word` is the older setting for matmul, which also affects the CPU."""
    if word is not None:  # first, because it overwrites the newer switches
        torch.set_float32_matmul_precision(word)
    torch.backends.cudnn.allow_tf32 = values["convolution"] == "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = on_cpu  # type: ignore[attr-defined]
    for kind, value in values.items():
        _backend(kind).fp32_precision = value


def _cpu_matmul() -> str:
    return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]


def _backend(kind: str) -> Any:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {"matmul": cuda.matmul, "convolution": cudnn.conv, "rnn": cudnn.rnn}[kind]  # type: ignore[attr-defined]


def _in_effect(kind: str) -> str:
    """The setting of this kind, else that for all backends, else full precision."""
    specific = str(_backend(kind).fp32_precision)
    if specific != "none":
        return specific
    everywhere = str(torch.backends.fp32_precision)  # type: ignore[attr-defined]
    return "ieee" if everywhere == "none" else everywhere
