"""tools/docs_score.py: its questions are whole, what they name exists, and hits and misses are counted."""

import json
from collections import Counter
from pathlib import Path

import pytest

from flambeau.cli.recipe_search import Entry, Index
from load_script import load_script

ROOT = Path(__file__).resolve().parents[1]
TOOL = load_script(ROOT / "tools" / "docs_score.py")
# At least, of each language.
NUMBERS = {"old-name": 20, "error": 30, "concept": 25, "task": 35, "typo": 10}


@pytest.mark.parametrize("language", TOOL.LANGUAGES)
def test_the_files_parse(language: str) -> None:
    lines = (TOOL.QUESTIONS / f"{language}.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "kind\tquestion\tright\tkept"
    cells = [line.split("\t") for line in lines[1:]]
    assert {len(row) for row in cells} == {4}
    assert all(kind and text.strip() == text and text and right for kind, text, right, _ in cells)
    kept = [row[3] for row in cells]
    assert kept == sorted(kept)  # those kept apart stand at the end
    assert set(kept) == {"", "apart"}
    apart = Counter(row[0] for row in cells if row[3])
    assert all(apart[kind] >= 5 for kind in NUMBERS)
    assert max(Counter(text for _, text, *_ in cells).values()) == 1
    kinds = Counter(kind for kind, *_ in cells)
    assert set(kinds) == set(TOOL.KINDS) == set(NUMBERS)
    assert all(kinds[kind] >= number for kind, number in NUMBERS.items())
    assert len(TOOL.questions(language)) == len(cells) >= 120


@pytest.mark.parametrize("language", TOOL.LANGUAGES)
def test_every_right_answer_exists(language: str) -> None:
    entries = Index(chinese=language == "zh").entries
    for question in TOOL.questions(language):
        for name in question.right:
            assert any(TOOL.is_right(entry, name) for entry in entries), (question.text, name)


def test_names_stand_for_a_section_a_page_or_a_row() -> None:
    page = Entry("page", "memory.md", "Memory")
    section = Entry("page", "memory.md#del-loss", "Memory: del loss")
    row = Entry("page", "memory.md#messages", "Memory", {"title": [" `out of memory` "]}, [["out"]])
    flag = Entry("flag", "flambeau train --ema", "decay")
    names = [
        "memory.md",
        "memory.md#del-loss",
        "memory.md#messages[out of]",
        "flambeau train --ema",
    ]
    right = [[TOOL.is_right(entry, name) for entry in (page, section, row, flag)] for name in names]
    assert right == [
        [True, True, False, False],
        [False, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]
    assert not TOOL.is_right(row, "memory.md#messages")
    assert not TOOL.is_right(row, "memory.md#messages[too old]")
    assert TOOL.shown(row) == "memory.md#messages[`out of memory`]"


def test_hits_misses_and_gaps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(language: str) -> list[object]:
        del language
        return [
            TOOL.Question("task", "ema", ("flambeau train --lr", "training/ema"), False),
            TOOL.Question("task", "del loss", ("training/ema",), False),
            TOOL.Question("concept", "ema", (), False),
            TOOL.Question("concept", "mixup", ("training/mixup",), True),
        ]

    monkeypatch.setattr(TOOL, "questions", asked)
    results = ROOT / "bench" / "results" / "docs_score.jsonl"
    before = results.read_bytes()
    assert TOOL.main([]) == 0
    assert results.read_bytes() == before
    printed = capsys.readouterr().out
    row = json.loads(printed.splitlines()[-1])
    kinds = {"old-name": None, "error": None, "concept": None, "task": 0.5, "typo": None}
    expected = {"questions": 3, "gaps": 1, "share": 0.5, "kinds": kinds, "misses": ["del loss"]}
    assert (row["part"], row["en"], row["zh"], row["top"]) == ("open", expected, expected, 3)
    assert "en miss, task: del loss\n  right: training/ema\n  came:  memory.md#del-loss" in printed
    assert TOOL.main(["--apart"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["part"], row["zh"]["share"], row["zh"]["questions"]) == ("apart", 1.0, 1)
