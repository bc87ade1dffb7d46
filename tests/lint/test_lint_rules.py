"""Each rule is true of its own examples: found, not found, and the fix leads from one to the other."""

import re

import pytest

from flambeau_lint.engine import RuleSet, choose, fix, lint
from flambeau_lint.reports import rule_page
from flambeau_lint.rule import KINDS, Rule
from flambeau_lint.rules.catalog import BY_CODE, RULES, is_selected
from flambeau_lint.source import parse
from flambeau_lint.suppressions import without_silenced
from flambeau_lint.versions import NEWEST, is_before, parts_of, versions_for

ALL = RuleSet(RULES)
CJK = re.compile(r"[\u4e00-\u9fff]")


def codes(text: str, rules: RuleSet) -> set[str]:
    data = text.encode()
    return {one.code for one in without_silenced(data, lint(data, rules))}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_examples(rule: Rule) -> None:
    alone = RuleSet([rule])
    assert codes(rule.bad, alone) == {rule.code}
    assert codes(rule.good, alone) == set()
    if rule.fix != "none":
        fixed, count = fix(rule.bad.encode(), ALL, unsafe=True, keep=without_silenced)
        assert fixed.decode() == rule.good
        assert count
    made = [one.fix for one in lint(rule.bad.encode(), alone) if one.fix]
    assert rule.fix == "unsafe" or all(one.is_safe for one in made)
    assert rule.fix != "none" or made == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_fixed_file_is_left_alone(rule: Rule) -> None:
    once, _ = fix(rule.bad.encode(), ALL, unsafe=True)
    parse(once)
    assert fix(once, ALL, unsafe=True) == (once, 0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_words(rule: Rule) -> None:
    assert re.fullmatch(r"FLB[1-6]\d{2,3}", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
    assert not CJK.search(rule.en)
    assert CJK.search(rule.zh)
    assert "\n" not in rule.en + rule.zh
    assert rule.kind == KINDS[int(rule.code[3])]
    assert rule.library in NEWEST
    assert rule.fix in ("none", "safe", "unsafe")
    assert rule.sure in ("certain", "likely")
    for version in (rule.deprecated, rule.removed, rule.changed, rule.until):
        assert not version or parts_of(version)
    if rule.deprecated and rule.removed:
        assert is_before(rule.deprecated, rule.removed)
    assert rule.code in rule_page(rule)


def test_codes_and_names_are_unique() -> None:
    assert len(BY_CODE) == len(RULES) == len({rule.name for rule in RULES})
    assert len(RULES) >= 150


def test_versions_decide() -> None:
    qr = BY_CODE["FLB187"]
    assert [qr.holds(version) for version in ("1.8", "1.9", "2.13.1", "2.15.0+cu132")] == [
        False,
        True,
        True,
        True,
    ]
    corners = BY_CODE["FLB310"]
    assert corners.is_journey
    assert not corners.holds("2.15")
    assert corners.holds("2.15", since="0.3")
    assert not corners.holds("2.15", since="1.8")
    assert corners not in choose(RULES, versions_for("2.15"))


def test_the_torchvision_of_a_torch() -> None:
    pairs = {"1.7": "0.8", "1.13": "0.14", "2.0": "0.15", "2.11.0": "0.26", "2.15": "0.29"}
    assert {torch: versions_for(torch)["torchvision"] for torch in pairs} == pairs


def test_the_libraries_of_a_torch() -> None:
    assert versions_for("1.8")["torchaudio"] == "0.8"
    assert versions_for("2.6")["torchaudio"] == "2.6"
    assert versions_for("2.15")["torchaudio"] == NEWEST["torchaudio"]
    assert [versions_for(torch)["torchtext"] for torch in ("1.8", "2.0", "2.15")] == [
        "0.9",
        "0.15",
        "0.18",
    ]


@pytest.mark.parametrize(
    ("words", "length"),
    [
        (["ALL"], 1),
        (["FLB1"], 4),
        (["removed"], 4),
        (["FLB187"], 20),
        (["torch-qr"], 20),
        (["FLB18"], 5),
    ],
)
def test_selection(words: list[str], length: int) -> None:
    assert is_selected(BY_CODE["FLB187"], words) == length
    assert not is_selected(BY_CODE["FLB187"], ["FLB2"])


def test_a_code_is_not_the_beginning_of_another() -> None:
    """FLB210 and FLB2101 are two rules."""
    assert is_selected(BY_CODE["FLB2101"], ["FLB210"]) == 0
    assert is_selected(BY_CODE["FLB210"], ["FLB210"]) > 0
