"""The judged findings: complete facts, of rules that exist, and right where the rules are on today."""

import re
from pathlib import Path

from flambeau_lint.rules.catalog import BY_CODE
from load_script import load_script

FACTS = load_script(Path(__file__).resolve().parents[2] / "bench" / "lint_precision.py").facts()


def test_each_fact_is_whole() -> None:
    places = set()
    for fact in FACTS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", fact["repository"])
        assert re.fullmatch(r"[0-9a-f]{40}", fact["commit"])
        assert fact["rule"] in BY_CODE
        assert fact["right"] or fact["why"]
        assert fact["now"] in ("right", "wrong", "not reported")
        places.add(tuple(fact.get(key) for key in ("repository", "path", "cell", "line", "rule")))
    assert len({fact["repository"] for fact in FACTS}) >= 25
    assert len(places) >= 1300


def test_what_is_reported_by_default_is_right() -> None:
    reported = [fact for fact in FACTS if fact["now"] != "not reported" and "from" not in fact]
    assert all(not BY_CODE[fact["rule"]].preview for fact in reported)
    share = sum(fact["now"] == "right" for fact in reported) / len(reported)
    assert len(reported) >= 300
    assert share >= 0.98
    last = [fact for fact in FACTS if fact["sample"] in (3, 4, 7)]  # places that no change has seen
    assert sum(fact["right"] for fact in last) / len(last) >= 0.98
