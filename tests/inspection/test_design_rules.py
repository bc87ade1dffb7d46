"""The rules of ShuffleNet V2: counted in models by hand, and measured at operations that are about equal."""

import pytest
import timm
import torch
from torch import Tensor, nn

from flambeau.inspection.design_rules import Finding, rule_findings
from flambeau.inspection.timing.channel_rules import measure_rules
from flambeau.inspection.timing.paired_times import interleaved, ratios

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.same = nn.Conv2d(4, 16, 1, bias=False), nn.Conv2d(16, 16, 1, bias=False)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.same(self.wide(x)))
        return torch.cat([self.depthwise(y), self.grouped(y), y], 1) + 1


def by_what(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {one.what: one for one in findings}


def test_counted_by_hand() -> None:
    found = by_what(rule_findings(Net(), (torch.empty(1, 4, 8, 8),)))
    flops = {"wide": 4 * 16, "same": 16 * 16, "depthwise": 16 * 9, "grouped": 16 * 4 * 9}
    share = {name: count / sum(flops.values()) for name, count in flops.items()}
    unequal = found["1x1 convolutions of 1:2 or more"]
    assert (unequal.count, unequal.examples) == (1, ("wide 4 to 16",))
    assert unequal.share == pytest.approx(share["wide"])
    grouped = found["grouped convolutions"]
    assert (grouped.count, grouped.examples) == (1, ("grouped 4 groups",))
    assert grouped.share == pytest.approx(share["grouped"])
    assert found["depthwise convolutions"].share == pytest.approx(share["depthwise"])
    joins = found["places where branches meet"]
    assert (joins.count, joins.examples) == (1, ("cat of 3",))
    without = found["modules without matrix products"]
    assert (without.count, without.examples) == (1, ("relu",))
    # relu and + 1 read and write what they give; cat reads and writes 48 channels.
    pixels, weights = 64, 4 * 16 + 16 * 16 + 16 * 9 + 16 * 4 * 9
    products = pixels * ((4 + 16) + 3 * (16 + 16)) + weights
    others = pixels * ((16 + 16) + (48 + 48) + (48 + 48))
    assert without.share == pytest.approx(others / (products + others))


def test_of_a_resnet() -> None:
    with torch.device("meta"):
        found = by_what(rule_findings(timm.create_model("resnet18"), (torch.empty(1, 3, 64, 64),)))
    assert found["places where branches meet"].count == 8
    assert found["grouped convolutions"].count == found["depthwise convolutions"].count == 0
    assert found["1x1 convolutions of 1:2 or more"].count == 3  # the shortcuts that change channels


def test_variants_of_a_rule_have_about_as_many_operations() -> None:
    found = measure_rules(CPU, rounds=2, enough_s=0.0, side=4)
    assert next(one.times_training for one in found if one.rule == "groups") == 1.0
    rules: dict[str, list[int]] = {}
    for one in found:
        rules.setdefault(one.rule, []).append(one.flops)
        assert one.inference.median_s > 0 and one.training.median_s > 0
    assert [len(flops) for flops in rules.values()] == [4, 4, 5, 4]
    for flops in rules.values():
        assert max(flops) < 1.06 * min(flops)


def test_calls_take_turns() -> None:
    seen: list[str] = []
    seconds = interleaved(
        {name: lambda name=name: seen.append(name) for name in "abc"},  # type: ignore[misc]
        device=CPU,
        rounds=4,
    )
    assert [len(one) for one in seconds.values()] == [4, 4, 4] and list(seconds) == ["a", "b", "c"]
    rounds = [seen[k : k + 3] for k in range(0, len(seen), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds) and len(rounds) == 3 + 4
    assert len({tuple(one) for one in rounds}) > 1


def test_what_slows_a_round_does_not_count() -> None:
    base = [1.0, 10.0, 2.0, 50.0]
    times = ratios([2 * one for one in base], base)
    assert (times.low_s, times.median_s, times.high_s) == (2.0, 2.0, 2.0)
