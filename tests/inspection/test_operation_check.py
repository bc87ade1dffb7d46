"""Operations that compute something wrong are named; those of this CPU are right."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.inspection import operation_check
from flambeau.inspection.operation_check import (
    Difference,
    differences,
    operation_differences,
    training_difference,
)

CPU = torch.device("cpu")


def wrong(found: list[Difference]) -> set[str]:
    return {one.operation for one in found if not one.is_missing}


def test_this_processor_computes_right() -> None:
    precision = torch.get_float32_matmul_precision()
    assert wrong(differences(CPU)) == set()
    assert torch.get_float32_matmul_precision() == precision


def test_an_operation_that_writes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that dropped what was written into a tensor with other strides."""
    right = Tensor.addcmul_

    def addcmul_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_bad = self.dtype == torch.float32 and not self.is_contiguous()
        return self if is_bad else right(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "addcmul_", addcmul_)
    found = list(operation_differences(CPU, torch.float32))
    # Adam, which does its second moment with it, gives wrong weights then, too.
    assert wrong(found) == {"addcmul_ into a transposed tensor", "Adam of a transposed weight"}
    assert {one.dtype for one in found} == {"float32"}
    assert found[0].error is not None
    assert found[0].error > 0.1


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 1.001

    right = F.layer_norm

    def layer_norm(x: Tensor, *rest: Any) -> Tensor:
        return right(Wrong.apply(x) if x.dtype == torch.float32 else x, *rest)

    monkeypatch.setattr(F, "layer_norm", layer_norm)
    assert wrong(list(operation_differences(CPU, torch.float32))) == {"layer_norm"}


def test_one_that_gives_nan_or_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Tensor.cumsum

    def cumsum(self: Tensor, dim: int) -> Tensor:
        if self.dtype == torch.bfloat16:
            raise NotImplementedError("cumsum is not there")
        return right(self, dim) * (float("nan") if self.dtype == torch.float32 else 1)

    monkeypatch.setattr(Tensor, "cumsum", cumsum)
    assert wrong(list(operation_differences(CPU, torch.float32))) == {"cumsum"}
    missing = [one for one in operation_differences(CPU, torch.bfloat16) if one.is_missing]
    assert Difference("cumsum", "bfloat16", None) in missing


def test_a_device_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a build has no kernels for a GPU."""
    right = F.conv2d

    def conv2d(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        if x.dtype == torch.float32:
            raise RuntimeError("no kernel image is available for execution\nmore")
        return right(x, *rest, **more)

    monkeypatch.setattr(F, "conv2d", conv2d)
    found = list(operation_differences(CPU, torch.float32))
    assert len(found) == 4
    assert {one.message for one in found} == {"no kernel image is available for execution"}
    assert wrong(found) == {one.operation for one in found}


def test_cudnn_stays_on_without_short_multiplications(monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> tuple[bool, bool]:
        return torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32

    seen = []

    def nothing_wrong(*_: object) -> list[Difference]:
        seen.append(state())
        return []

    monkeypatch.setattr(operation_check, "operation_differences", nothing_wrong)
    before = state()
    assert differences(CPU) == []
    assert seen == [(True, False)] * 3
    assert state() == before


def test_a_training_that_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert training_difference(CPU) is None
    monkeypatch.setattr(operation_check, "STORED", tuple(2 * one for one in operation_check.STORED))
    assert operation_check.stored_difference() is not None
    monkeypatch.undo()
    monkeypatch.setattr(
        torch.nn.GELU,
        "forward",
        lambda _, x: x.relu() if x.dtype == torch.float32 else F.gelu(x),
    )
    found = training_difference(CPU)
    assert found is not None
    assert found.operation == "training"
