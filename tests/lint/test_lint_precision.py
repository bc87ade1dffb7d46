"""The judged findings: complete facts, of rules that exist, and right where the rules are on today."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flambeau_lint.rules.catalog import BY_CODE
from load_script import load_script

BENCH = load_script(Path(__file__).resolve().parents[2] / "bench" / "lint_precision.py")
FACTS = BENCH.facts()


def test_each_fact_is_whole() -> None:
    places = set()
    for fact in FACTS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", fact["repository"])
        assert re.fullmatch(r"[0-9a-f]{40}", fact["commit"])
        assert fact["rule"] in BY_CODE
        assert fact["right"] or fact["why"]
        assert fact["now"] in ("right", "wrong", "not reported")
        places.add(
            tuple(fact.get(key) for key in ("repository", "path", "cell", "line", "rule", "target"))
        )
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


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", "-C", f"{folder}", *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_finding_is_judged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = tmp_path / "clones" / "a+b"
    clone.mkdir(parents=True)
    git(clone, "init", "-q")
    (clone / "old.py").write_text("import torch\ny = torch.ger(1, 2)\nz = torch.qr(y)\n")
    (clone / "link.py").symlink_to("old.py")
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "a")
    commit = git(clone, "rev-parse", "HEAD")
    fact = {"sample": 7, "repository": "a/b", "commit": commit, "path": "old.py", "line": 2}
    monkeypatch.setattr(BENCH, "FACTS", tmp_path / "facts.jsonl")
    BENCH.write([{**fact, "rule": "FLB206", "right": True, "now": "not reported"}])
    judge = tmp_path / "judge.jsonl"

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lint_precision.py", *words])
        BENCH.main()
        return capsys.readouterr().out

    judge.write_text(run("--find", f"{clone.parent}"))
    (row,) = map(json.loads, judge.read_text().splitlines())
    assert (row["path"], row["line"], row["rule"], row["right"]) == ("old.py", 3, "FLB187", None)
    assert row["code"][-1] == "z = torch.qr(y)"
    with pytest.raises(SystemExit, match="must be true, or false with a 'why'"):
        run("--add", f"{judge}")
    judge.write_text(json.dumps({**row, "right": False, "why": "not of torch"}))
    assert "sample 8: 0 of 1 right" in run("--add", f"{judge}")
    assert BENCH.facts()[-1]["now"] == "wrong"
    with pytest.raises(SystemExit, match="judged already"):
        run("--add", f"{judge}")
    assert run("--find", f"{clone.parent}") == ""
    # A place that is named no more.
    BENCH.write([{**fact, "line": 1, "rule": "FLB206", "right": True, "now": "right"}])
    run("--find", f"{clone.parent}")
    assert [one["now"] for one in BENCH.facts()] == ["not reported"]
