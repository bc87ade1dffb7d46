#!/usr/bin/env python
"""Ask the search of the pages what people ask: how often is a right answer among its first three?

    python tools/docs_score.py             # the questions that the search may be tuned on
    python tools/docs_score.py --apart     # those kept apart: nobody looks at them while tuning
    python tools/docs_score.py --record    # also append a line to bench/results/docs_score.jsonl

The questions lie in tools/docs_questions, a file for each language with four columns:

- kind: an old name of an API, an error message, a concept, a task, or words with typing errors.
- question: as people type it; from notes, public threads and daily work, reworded, and written before their
  author looked at the pages.
- right: what answers it, as `flambeau how --json` names it, with spaces between several.
  A page without '#' stands for all of its sections; text in brackets, for the row of a table that has it.
  A dash: nothing answers it, a gap that counts in no share.
- kept: 'apart', or empty.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.cli.recipe_search import Entry, Index

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ROOT / "tools" / "docs_questions"
LANGUAGES = ("en", "zh")
KINDS = ("old-name", "error", "concept", "task", "typo")
TOP = 3
_NAME = re.compile(r"flambeau train --[\w-]+|[^\s\[]+(?:\[[^\]]+\])?")


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    right: tuple[str, ...]  # empty: nothing answers it
    is_apart: bool


@dataclass(frozen=True)
class Asked:
    """A question and the names of its first answers.

    Attributes:
        place: of the first right answer, from 1; None if there is none.
    """

    question: Question
    answers: tuple[str, ...]
    place: int | None


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--apart", action="store_true", help="ask those kept apart, not the others")
    parser.add_argument(
        "--record", action="store_true", help="append a line to bench/results/docs_score.jsonl"
    )
    arguments = parser.parse_args(words)
    asked = {}
    for language in LANGUAGES:
        chosen = [one for one in questions(language) if one.is_apart == arguments.apart]
        asked[language] = ask(chosen, Index(chinese=language == "zh"))
        print_score(language, asked[language])
    write({"part": "apart" if arguments.apart else "open", **summary(asked)}, arguments.record)
    return 0


def questions(language: str) -> list[Question]:
    """Those of a language, in the order of its file."""
    path = QUESTIONS / f"{language}.tsv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Question(
            row["kind"],
            row["question"],
            () if row["right"] == "-" else tuple(_NAME.findall(row["right"])),
            row["kept"] == "apart",
        )
        for row in rows
    ]


def is_right(entry: Entry, name: str) -> bool:
    """Whether a name of the column 'right' means this entry."""
    where, _, text = name.removesuffix("]").partition("[")
    if text:
        return entry.name == where and entry.messages is not None and text in _cell(entry)
    if entry.messages is not None:
        return False  # of a table of many messages only the row that is named
    return where in (entry.name, entry.name.partition("#")[0])


def shown(entry: Entry) -> str:
    """The name of an entry, with the first cell of a row of a table."""
    return entry.name if entry.messages is None else f"{entry.name}[{_cell(entry)}]"


def _cell(entry: Entry) -> str:
    return entry.texts["title"][0].strip()


def ask(chosen: Iterable[Question], index: Index) -> list[Asked]:
    asked = []
    for question in chosen:
        found = index.search(question.text, top=TOP)
        places = [
            place
            for place, entry in enumerate(found, start=1)
            if any(is_right(entry, name) for name in question.right)
        ]
        answers = tuple(shown(entry) for entry in found)
        asked.append(Asked(question, answers, places[0] if places else None))
    return asked


def share(asked: Iterable[Asked]) -> float | None:
    """Of the questions that something answers, those whose answer was found; None of no question."""
    hits = [one.place is not None for one in asked if one.question.right]
    return round(sum(hits) / len(hits), 4) if hits else None


def summary(asked: dict[str, list[Asked]]) -> dict[str, Any]:
    return {
        language: {
            "questions": len(rows),
            "gaps": sum(not one.question.right for one in rows),
            "share": share(rows),
            "kinds": {
                kind: share(one for one in rows if one.question.kind == kind) for kind in KINDS
            },
            "misses": [one.question.text for one in rows if one.question.right and not one.place],
        }
        for language, rows in asked.items()
    }


def print_score(language: str, rows: list[Asked]) -> None:
    """The shares, then each miss with what came in its place."""
    for kind in (*KINDS, None):
        of_kind = [one for one in rows if kind in (None, one.question.kind) and one.question.right]
        hits = sum(one.place is not None for one in of_kind)
        part = hits / len(of_kind) if of_kind else 0.0
        print(f"{language}  {kind or 'all':8}  {hits:3} of {len(of_kind):3}  {part:4.0%}")
    for one in rows:
        if one.question.right and one.place is None:
            print(f"\n{language} miss, {one.question.kind}: {one.question.text}")
            print(f"  right: {' '.join(one.question.right)}")
            for answer in one.answers:
                print(f"  came:  {answer}")
    print()


def write(row: dict[str, Any], keep: bool) -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    from provenance import commit, record

    record({**row, "top": TOP, "commit": commit()}, __file__, keep=keep)


if __name__ == "__main__":
    sys.exit(main())
