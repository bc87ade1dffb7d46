"""`flambeau models`: names, parameters and published weights, compared with timm and torchvision."""

import json
from typing import Any

import pytest
import timm
import torchvision.models

from flambeau.cli import models
from flambeau.trainer.parts.model import build_model


def listed(flambeau: Any, words: str = "") -> dict[str, dict[str, Any]]:
    code, out, _ = flambeau(f"models --json {words}")
    assert code == 0
    return {row["name"]: row for row in map(json.loads, out.splitlines())}


def test_facts_are_those_of_the_libraries(flambeau: Any) -> None:
    rows = listed(flambeau, "resnet18 test_vit torchvision:vit_h_14 tiny_convnet")
    assert list(rows) == [
        "tiny_convnet", "resnet18", "test_vit", "torchvision:resnet18", "torchvision:vit_h_14",
    ]  # fmt: skip
    own = rows["tiny_convnet"]
    tiny = build_model("tiny_convnet", num_classes=1000, channels=3, image_size=32)
    assert own["parameters"] == sum(p.numel() for p in tiny.parameters())
    assert (own["pretrained"], own["input_size"]) == (False, None)
    of_timm = timm.create_model("test_vit")
    assert rows["test_vit"]["parameters"] == sum(p.numel() for p in of_timm.parameters())
    assert rows["test_vit"]["input_size"] == of_timm.pretrained_cfg["input_size"][-1] == 160
    assert rows["resnet18"]["tags"][0] == timm.create_model("resnet18").pretrained_cfg["tag"]
    assert len(rows["resnet18"]["tags"]) == len(timm.list_pretrained("resnet18"))
    of_torchvision = torchvision.models.resnet18()
    counted = sum(p.numel() for p in of_torchvision.parameters())
    assert rows["torchvision:resnet18"]["parameters"] == rows["resnet18"]["parameters"] == counted
    assert rows["torchvision:vit_h_14"]["input_size"] == 518


def test_without_a_pattern_every_name_that_model_takes(flambeau: Any) -> None:
    names = set(listed(flambeau))
    known = torchvision.models.list_models(module=torchvision.models)
    own = {"small_convnet", "tiny_convnet", "speedrun_convnet", "speedrun_convnet_wide"}
    assert names == own | {*timm.list_models()} | {f"torchvision:{name}" for name in known}
    assert "--sizes counts them" in flambeau("models").err


@pytest.mark.parametrize(
    ("words", "some", "others"),
    [
        ("'resnet1?'", ["resnet18", "torchvision:resnet18"], ["resnet101", "seresnet18"]),
        ("'torchvision:res*'", ["torchvision:resnet50", "torchvision:resnext50_32x4d"], ["resnet50"]),
        ("RESNET18", ["resnet18", "torchvision:resnet18"], ["seresnet18"]),
        ("resnet18 small_convnet", ["resnet18", "small_convnet"], ["tiny_convnet"]),
        ("regnetz", ["regnetz_005", "regnetz_b16"], ["regnetx_002"]),
        ("'test_resn*' --tags", ["test_resnet.r160_in1k"], ["test_resnet"]),
        ("test_resnet --tags", ["test_resnet.r160_in1k"], ["test_resnet"]),
        ("'efficientnet_b[56]' --pretrained", ["efficientnet_b5"], ["efficientnet_b6", "efficientnet_b7"]),
    ],
)  # fmt: skip
def test_patterns(words: str, some: list[str], others: list[str], flambeau: Any) -> None:
    names = listed(flambeau, words)
    assert set(some) <= set(names)
    assert not set(others) & set(names)


def test_parameters_of_many_only_if_asked(flambeau: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_COUNTED", 1)
    code, out, err = flambeau("models test_byobnet test_resnet")
    assert code == 0
    assert [line.split()[1:] for line in out.splitlines()[1:]] == [["-", "160", "yes"]] * 2
    assert "the parameters of 2 models are not counted" in err
    code, out, err = flambeau("models test_byobnet test_resnet --sizes")
    assert "-" not in [line.split()[1] for line in out.splitlines()[1:]]
    assert err == ""


def test_the_table(flambeau: Any) -> None:
    lines = flambeau("models torchvision:resnet18 torchvision:alexnet").out.splitlines()
    assert [line.split() for line in lines] == [
        ["name", "parameters", "input", "pretrained"],
        ["torchvision:alexnet", "61.1", "M", "224", "yes"],
        ["torchvision:resnet18", "11.7", "M", "224", "yes"],
    ]
    code, out, err = flambeau("models tiny_convnet --pretrained")
    assert (code, out) == (0, "")
    assert "none of the 1 models of this name has published weights" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("resnt18", "no model is named 'resnt18'; did you mean 'resnet18'?"),
        ("resnet18 'qqqqqqq*'", "no model is named 'qqqqqqq*'"),
        ("torchvision:resnt50", "did you mean 'torchvision:resnet50'?"),
        ("''", "PATTERN is empty: is a variable of the shell not set?"),
        ("--tag", "did you mean '--tags'?"),
    ],
)
def test_mistakes_end_with_2(words: str, message: str, flambeau: Any) -> None:
    code, out, err = flambeau(f"models {words}")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_name_that_is_listed_can_be_built() -> None:
    build_model("test_resnet.r160_in1k", num_classes=2, channels=3, image_size=32)
