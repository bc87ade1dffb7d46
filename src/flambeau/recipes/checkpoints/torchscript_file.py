"""Take the weights out of an old TorchScript file into the model's class, and compare the two on real inputs.

从旧的 TorchScript 文件中取出权重放入模型的类，并在真实输入上比较两者。

Source: own. `torch.jit.trace` records one path: what an `if` of Python chose for its example stays chosen,
with no more than a warning at the time. On other inputs the file then gives other answers than the model, and
nothing says so; here that is refused.

Not for a file that you do not trust: it is a program, and `torch.jit.load` may run it. Nor without the class:
then keep the torch that wrote the file.
"""

import copy
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def from_torchscript(
    path: str | os.PathLike[str],
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> nn.Module:
    """The model with the weights of the file, which gives what the file gives; ready for torch.export.

    Args:
        path: of `torch.jit.save`. It is a program, which is loaded and run: only one that you trust.
        model: of the class that was traced or scripted. It is not changed.
        inputs: several, as different as in use: of other sizes, signs, lengths and batch sizes. Each a
            tensor, or a tuple of what the model is called with. On the CPU.
        rtol, atol: as for torch.testing.assert_close.

    Returns:
        A copy on the CPU in evaluation mode, which both are compared in.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no TorchScript; weights of another model; an output that differs, or that one of the two
            cannot compute: with tracing, most often a branch that was frozen.

    Example:
        >>> import tempfile
        >>> linear = nn.Linear(3, 2)
        >>> with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        ...     warnings.simplefilter("ignore")  # deprecated
        ...     torch.jit.save(torch.jit.trace(linear, torch.zeros(1, 3)), f"{folder}/old.pt")
        ...     again = from_torchscript(f"{folder}/old.pt", nn.Linear(3, 2), [torch.ones(1, 3)])
        >>> torch.equal(again.weight, linear.weight)
        True
    """
    if not inputs:
        raise ValueError("the file and the model are compared on at least one input, got none")
    script = _read(path)
    result = copy.deepcopy(model).cpu().eval()
    try:
        result.load_state_dict(script.state_dict())
    except RuntimeError as error:
        raise ValueError(f"{path} has the weights of another model: {error}") from error
    for number, given in enumerate(inputs):
        args = given if isinstance(given, tuple) else (given,)
        expected, got = _called(result, args), _called(script, args)
        difference = _difference(got, expected, rtol=rtol, atol=atol)
        if difference is not None:
            raise ValueError(
                f"{path} and the model differ on input {number} ({_shapes(args)}): {difference}\n"
                "Tracing has frozen a branch to what its example chose, or the code has changed since"
            )
    return result


def _read(path: str | os.PathLike[str]) -> Any:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated since torch 2.11
        try:
            return torch.jit.load(path, map_location="cpu").eval()
        except RuntimeError as error:
            raise ValueError(f"{path} is no TorchScript that this torch reads: {error}") from error


@torch.no_grad()
def _called(function: Any, args: tuple[Any, ...]) -> Any:
    """The output, or the error."""
    try:
        return function(*copy.deepcopy(args))  # one may change its inputs in place
    except Exception as error:
        return error


def _difference(got: Any, expected: Any, *, rtol: float, atol: float) -> str | None:
    for name, value in (("the file", got), ("the model", expected)):
        if isinstance(value, Exception):
            return (
                f"{name} fails with {type(value).__name__}: {str(value).strip().splitlines()[-1]}"
            )
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except (AssertionError, TypeError) as error:
        return " ".join(str(error).split())
    return None


def _shapes(args: tuple[Any, ...]) -> str:
    return ", ".join(
        " x ".join(map(str, arg.shape)) or "a number" if isinstance(arg, Tensor) else repr(arg)
        for arg in args
    )
