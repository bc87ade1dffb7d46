"""`flambeau inspect --rules`: with and without a model, what is refused."""

import json
import re
from typing import Any

import pytest
import torch

from flambeau.inspection.timing import channel_rules


@pytest.fixture(autouse=True)
def few_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = channel_rules.measure_rules

    def quick(device: torch.device) -> Any:
        return whole(device, rounds=2, enough_s=0.0, side=4)

    monkeypatch.setattr(channel_rules, "measure_rules", quick)


def test_without_a_model(flambeau: Any) -> None:
    code, out, _ = flambeau("inspect --rules")
    assert code == 0
    assert re.search(r"^groups +1 of 128 channels +\d+ M .* 1\.00 ", out, re.MULTILINE)
    assert re.search(r"^on cpu, \d+ threads?; medians, and ", out, re.MULTILINE)


def test_with_a_model(flambeau: Any) -> None:
    out = flambeau("inspect resnet18 --rules").out
    assert re.search(
        r"^branches +places where branches meet +8 +- +add_ of 2 in layer", out, re.MULTILINE
    )
    found = json.loads(flambeau("inspect resnet18 --rules --json").out)
    assert len(found["variants"]) == 17 and len(found["model"]) == 5
    assert "model" not in json.loads(flambeau("inspect --rules --json").out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rules --input 1,3,32,32", "--input has no effect without MODEL"),
        ("resnet18 --rules --depth 1", "--depth has no effect with --rules"),
        ("resnet18 --rules --profile", "--rules has no effect with --profile"),
        ("--conv 9,k3 --rules", "--rules has no effect with --conv"),
        ("resnet18 --rules --input 2,5", r"ResNet does not take \(float32 \(2, 5\)\)"),
    ],
)
def test_wrong_input(flambeau: Any, words: str, said: str) -> None:
    code, out, err = flambeau(f"inspect {words}")
    assert (code, out) == (2, "")
    assert re.search(said, err), err
