"""What a kill, an editor, or another version has left in the file of trials."""

import json
from pathlib import Path
from typing import Any

import pytest

from flambeau.tune.search.journal import Journal

CHOICES = [{}, {"workers": "0"}, {"workers": "2"}, {}]


def row(choice: dict[str, str], **other: Any) -> dict[str, Any]:
    figures = {
        "step_s": 0.1,
        "bytes": 5,
        "start_s": 1.0,
        "failure": "",
        "losses": [2.0],
        "run": None,
    }
    return {"choice": choice, **figures, **other}


def written(file: Path) -> list[bytes]:
    journal = Journal(file, "key")
    for choice in CHOICES:
        journal.add(row(choice))
    return file.read_bytes().splitlines(keepends=True)


def taken(file: Path, key: str = "key") -> list[bool]:
    journal = Journal(file, key)
    return [journal.take(choice) is not None for choice in CHOICES]


def test_a_line_that_was_cut_anywhere_spoils_no_other(tmp_path: Path) -> None:
    file = tmp_path / "tuned.jsonl"
    lines = written(file)
    whole = b"".join(lines)
    assert taken(file) == [True] * 4 and taken(file, "other") == [False] * 4
    for length in range(1, len(lines[2])):
        file.write_bytes(whole[: len(lines[0] + lines[1]) + length])
        is_all_but_its_end = length == len(lines[2]) - 1
        assert taken(file) == [True, True, is_all_but_its_end, False]
        Journal(file, "key").add(row(CHOICES[2]))
        Journal(file, "key").add(row(CHOICES[3]))
        rows = file.read_bytes().splitlines()
        assert [json.loads(line)["choice"] for line in rows[-2:]] == CHOICES[2:]
        assert taken(file)[:2] == [True, True] and (is_all_but_its_end or taken(file) == [True] * 4)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"7",
        b'{"key": "key"}',
        b"\xff\x00\x9f",
        b"[" * 100_000,
        json.dumps({"key": "key", **row({"workers": "2"}, step_s="fast")}).encode(),
        json.dumps({"key": "key", **row({"workers": "2"}, step_s=0)}).encode(),
        json.dumps({"key": "key", **row({"workers": "2"}, step_s=10**400)}).encode(),
        json.dumps({"key": "key", **row({"workers": "2"}, losses=7)}).encode(),
        json.dumps({"key": "key", **row({"workers": "2"}, failure=None)}).encode(),
        json.dumps({"key": "key", **row({"workers": "2"}, run={"batch": 3})}).encode(),
        json.dumps({"key": "key", **row({"workers": "2"}, loader={"repeats": 1})}).encode(),
        json.dumps({"key": "key", **row(["workers"])}).encode(),  # type: ignore[arg-type]
    ],
)
def test_a_row_that_is_none_is_run_again_and_the_others_stay(
    tmp_path: Path, broken: bytes, number: int
) -> None:
    file = tmp_path / "tuned.jsonl"
    lines = written(file)
    lines[number] = broken + b"\n"
    file.write_bytes(b"".join(lines))
    assert taken(file) == [at != number for at in range(4)]


def test_from_where_two_searches_part_nothing_counts(tmp_path: Path) -> None:
    file = tmp_path / "tuned.jsonl"
    written(file)
    journal = Journal(file, "key")
    assert journal.take({}) is not None
    assert journal.take({"threads": "1"}) is None
    assert journal.take({"workers": "2"}) is None and journal.take({}) is None
