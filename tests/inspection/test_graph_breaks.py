"""Breaks of a graph: the lines that the test has written, and none where there is none."""

import inspect
import re

import pytest
import torch
from torch import Tensor, nn

from flambeau.errors import InputError
from flambeau.inspection.graph_breaks import graph_breaks


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum() > 1e9:  # branch
            y = y + 1
        scale = y.sum().item()  # value
        return self.second(y) * scale


def line_of(mark: str) -> int:
    lines, start = inspect.getsourcelines(Broken)
    return start + next(number for number, line in enumerate(lines) if mark in line)


def test_each_break_is_named_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = Broken()
    found = graph_breaks(model, (torch.empty(2, 4, device="meta"),))
    assert [(b.file, b.line) for b in found.breaks] == [
        (__file__, line_of("# branch")),
        (__file__, line_of("# value")),
    ]
    assert found.breaks[0].reason == "a branch that depends on the values of a tensor"
    assert re.search(r"item\(\)", found.breaks[1].reason)
    assert found.breaks[1].code.startswith("scale = y.sum().item()")
    assert found.graphs == 3
    assert model.training
    assert capsys.readouterr() == ("", "")


def test_without_a_break() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    found = graph_breaks(model, (torch.empty(2, 4, device="meta"),))
    assert (found.graphs, found.breaks) == (1, ())
    assert found.operations == 2


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        found = graph_breaks(nn.Linear(4, 4), (torch.empty(2, 4),))
    assert found.graphs == 1


def test_a_wrong_input() -> None:
    with pytest.raises(InputError, match=r"torch.compile cannot follow Linear: \w+: "):
        graph_breaks(nn.Linear(4, 4), (torch.empty(2, 5),))
