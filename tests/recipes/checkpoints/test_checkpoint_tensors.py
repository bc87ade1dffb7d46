"""Tensors by place, and which dict of a checkpoint is the state_dict, as published files are laid out."""

import tracemalloc
from typing import Any

import pytest
import torch
from torch import nn

from flambeau.recipes.checkpoints.checkpoint_tensors import state_dicts_in, tensors_in

W = {"conv.weight": torch.ones(2), "conv.bias": torch.zeros(1)}


def test_places_are_those_of_torch() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].register_buffer("scratch", torch.ones(1), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    assert tensors_in(model).keys() == model.state_dict().keys()
    found = tensors_in(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    )
    assert found["model.1.running_mean"] is model.state_dict()["1.running_mean"] or torch.equal(
        found["model.1.running_mean"], model[1].running_mean
    )
    assert "optimizer.state.0.momentum_buffer" in found
    assert len(found) == len(model.state_dict()) + 4


@pytest.mark.parametrize(
    ("checkpoint", "keys"),
    [
        (W, [""]),
        ({"state_dict": W, "epoch": 1, "best_acc1": torch.tensor(0.5)}, ["state_dict"]),  # ImageNet example
        ({"model_ema": W, "optimizer": {"state": {0: {"m": W}}}, "model": W}, ["model", "model_ema"]),
        ({"ema": W, "own_key": W, "net": W}, ["net", "ema", "own_key"]),
        ({"model": nn.Linear(2, 2), "epoch": 1}, ["model"]),  # Ultralytics saves modules
        (nn.Linear(2, 2), [""]),
        ({"epoch": 1, "note": "x"}, []),
        ({**W, "_extra_state": None, "head._extra_state": b"x"}, [""]),
        ([torch.ones(1), torch.ones(1)], [""]),
        ({}, []),
    ],
)  # fmt: skip
def test_state_dicts_by_key(checkpoint: Any, keys: list[str]) -> None:
    found = state_dicts_in(checkpoint)
    assert list(found) == keys
    for tensors in found.values():
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())


def test_what_holds_itself_ends() -> None:
    loop: dict[str, Any] = {"w": torch.ones(1)}
    loop["self"] = [loop]
    assert list(tensors_in(loop)) == ["w"]


@pytest.mark.parametrize(
    "value",
    [
        {"x" * 3000: torch.ones(1)},
        {"x" * 1900: {"y" * 1900: torch.ones(1)}},
        {"x" * 1900: [torch.ones(1)] * 100_000},  # 190 MB of names out of 2 KB
    ],
)
def test_absurd_names_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="too long to be listed"):
        tensors_in(value)


def test_a_long_name_is_not_written_out_for_what_is_no_tensor() -> None:
    tracemalloc.start()
    assert tensors_in({"x" * 1900: [None] * 20_000}) == {}
    assert tracemalloc.get_traced_memory()[1] < 4_000_000  # written out: 38 MB
    tracemalloc.stop()


def test_two_tensors_of_one_name_are_not_one() -> None:
    with pytest.raises(ValueError, match=r"two tensors have the name 'a\.b'"):
        tensors_in({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})


def test_a_module_beside_a_tensor_keeps_its_own_names() -> None:
    found = state_dicts_in({"net": nn.Linear(2, 2), "best": torch.ones(())})
    assert {key: list(tensors) for key, tensors in found.items()} == {"net": ["weight", "bias"]}


def test_a_module_with_an_attribute_called_state() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("state", torch.ones(1))
    assert tensors_in(model).keys() == model.state_dict().keys()
