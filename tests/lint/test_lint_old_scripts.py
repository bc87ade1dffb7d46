"""What public scripts of 2017 to 2021 need in order to run: fixes that their round trips asked for."""

import csv
import json
import re
from pathlib import Path

import pytest

from flambeau_lint.engine import RuleSet, fix
from flambeau_lint.rules.catalog import BY_CODE

BENCH = Path(__file__).resolve().parents[2] / "bench"
_HEAD = "import torch\nimport torch.nn.functional as F\nfrom torchvision import datasets, transforms as T\n"
_DIGITS = "data = datasets.MNIST('.', transform=t)\n"
_THREE = "T.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))"
_PRED = "def f(y, target):\n    pred = y.topk(5)[1]\n    %s\n    right = pred.eq(target.expand_as(pred))\n"


def fixed(code: str, text: str) -> str:
    rules = RuleSet([BY_CODE[code]])
    return fix((_HEAD + text).encode(), rules, unsafe=False)[0].decode().removeprefix(_HEAD)


@pytest.mark.parametrize(
    ("code", "old", "new"),
    [
        ("FLB184", "(F.mse_loss(a, b) + torch.abs(torch.mean(c))).data[0]", ".item()"),
        ("FLB184", "F.mse_loss(a, b).data[0]", ".item()"),
        ("FLB184", "(-torch.mean(a)).data[0]", ".item()"),
        ("FLB184", "right = (y == target).sum()\nright.data[0] + 1", "right.item()"),
        ("FLB1201", "a.backward(retain_variables=True)", "(retain_graph=True)"),
        ("FLB1198", _PRED % "pred = pred.t()" + "    right[:5].view(-1).sum()\n", "reshape(-1)"),
        ("FLB1199", "torch.utils.data.TensorDataset(a, target_tensor=b)", "TensorDataset(a, b)"),
        ("FLB1200", "torch.optim.AdamW(p, 0.1, [0, 0.9])", "[0.0, 0.9]"),
        ("FLB1197", f"t = T.Compose([T.ToTensor(), {_THREE}])\n{_DIGITS}", "((0.5,), (0.2,))"),
    ],
)
def test_a_fix(code: str, old: str, new: str) -> None:
    text = fixed(code, old)
    assert new in text
    assert fixed(code, text) == text
    compile(text, "old.py", "exec")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("FLB184", "(F.mse_loss(a, b) + weights).data[0]"),
        ("FLB184", "right = (y == target).sum(1)\nright.data[0] + 1"),
        ("FLB184", "torch.mean(a, 0).data[0]"),
        ("FLB184", "F.mse_loss(a, b, reduction='none').data[0]"),
        ("FLB1198", _PRED % "pass" + "    right[:5].view(-1).sum()\n"),
        ("FLB1199", "torch.utils.data.TensorDataset(a, b)"),
        ("FLB1200", "torch.optim.Adam(p, betas=(0.0, 0.9))"),
        (
            "FLB1201",
            "def backward(retain_variables=True): pass\nnet.backward(retain_variables=False)\n",
        ),
        ("FLB1197", f"t = T.Compose([T.Grayscale(3), T.ToTensor(), {_THREE}])\n{_DIGITS}"),
        (
            "FLB1197",
            f"t = T.Compose([T.ToTensor(), {_THREE}])\n{_DIGITS}datasets.CIFAR10('.', transform=t)\n",
        ),
        ("FLB1197", f"t = T.Compose([T.ToTensor(), T.Lambda(three), {_THREE}])\n{_DIGITS}"),
    ],
)
def test_what_is_left_alone(code: str, text: str) -> None:
    assert fixed(code, text) == text


def test_each_round_trip_is_of_a_script_of_the_table() -> None:
    with (BENCH / "lint_round_trips.tsv").open(encoding="utf-8", newline="") as file:
        table = {
            (row["repository"], row["path"]): row for row in csv.DictReader(file, delimiter="\t")
        }
    lines = (BENCH / "results" / "lint_round_trips.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    counts = [row for row in rows if "summary" in row]
    scripts = [row for row in rows if "path" in row]
    assert len(table) >= 60
    assert all(re.fullmatch(r"[0-9a-f]{40}", row["commit"]) for row in table.values())
    assert {(row["repository"], row["path"]) for row in scripts} == set(table)
    assert all(not row["outcomes"]["as it is"].startswith("ran") for row in scripts)
    for count in counts:
        assert count["ran"]["as it is"] == 0
        assert count["ran"]["flambeau --fix"] <= count["ran"]["flambeau --fix --unsafe-fixes"]
