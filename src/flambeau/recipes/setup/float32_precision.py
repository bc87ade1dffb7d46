"""Float32 products on CUDA in full precision or as TF32: set, read and put back by one family of switches.

CUDA 上的 float32 乘法用全精度还是 TF32：只用一套开关来设置、读取和恢复。

Source: torch.backends.*.fp32_precision (torch 2.9 and later). The older family (allow_tf32 and
set_float32_matmul_precision) is set to the same: where the two differ its getters raise RuntimeError, and
torch.export and torch.compile ask them.

TF32 keeps float32's range and 10 bits of its mantissa; sums stay in float32. It exists on NVIDIA GPUs from
Ampere on and does nothing elsewhere. Not needed under autocast, which leaves few products in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

Precision = Literal["ieee", "tf32"]
_KINDS = ("matmul", "convolution", "rnn")


def float32_precision() -> dict[str, str]:
    """What float32 products are computed in on CUDA.

    Returns:
        'ieee' (full float32) or 'tf32' for each of 'matmul', 'convolution' and 'rnn'. torch starts with
        full precision for matmul and with TF32 for the other two.

    Example:
        >>> sorted(float32_precision())
        ['convolution', 'matmul', 'rnn']
    """
    return {kind: _in_effect(kind) for kind in _KINDS}


def set_float32_precision(precision: Precision) -> None:
    """Compute matrix products, convolutions and recurrent layers of float32 so, from now on.

    Args:
        precision: 'ieee' for full float32, 'tf32' for TF32 where the GPU has it.

    Raises:
        ValueError: another word.

    Example:
        >>> with float32_precision_as("ieee"):  # puts back what was set before
        ...     set_float32_precision("tf32")
        ...     print(float32_precision())
        {'matmul': 'tf32', 'convolution': 'tf32', 'rnn': 'tf32'}
    """
    if precision not in ("ieee", "tf32"):
        raise ValueError(f"precision must be 'ieee' or 'tf32', got {precision!r}")
    # One by one: what is set for all backends does not reach a kind that has a setting of its own,
    # and convolution and rnn have one from the start.
    word = {"ieee": "highest", "tf32": "high"}[precision]
    on_cpu = _cpu_matmul()
    if on_cpu != "none":  # 'high' and 'medium' have set it, and the older getters want it to fit
        on_cpu = precision
    _set(dict.fromkeys(_KINDS, precision), word=word, on_cpu=on_cpu)


@contextmanager
def float32_precision_as(precision: Precision) -> Iterator[None]:
    """Compute float32 so within the block, then as before.

    Args:
        precision: 'ieee' or 'tf32'.

    Raises:
        ValueError: another word.

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
    """After the block float32 is computed as before, whatever was set in it.

    Example:
        >>> with float32_precision_kept():
        ...     set_float32_precision("ieee")
        >>> float32_precision()["convolution"]
        'tf32'
    """
    before = {kind: _backend(kind).fp32_precision for kind in _KINDS}
    on_cpu = _cpu_matmul()
    word: str | None = None
    with suppress(RuntimeError):  # where the families differ already
        word = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        _set(before, word=word, on_cpu=on_cpu)


def _set(values: dict[str, str], *, word: str | None, on_cpu: str) -> None:
    """Both families; `word` is the older one's for matmul, and writes what a CPU does, too."""
    if word is not None:  # the older family first: it writes the newer one
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
    """'none' means: as is set for all backends, and full precision if nothing is."""
    own = str(_backend(kind).fp32_precision)
    if own != "none":
        return own
    everywhere = str(torch.backends.fp32_precision)  # type: ignore[attr-defined]
    return "ieee" if everywhere == "none" else everywhere
