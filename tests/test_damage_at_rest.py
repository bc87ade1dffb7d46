"""The ways of bench/faults/damage_at_rest.py, and that a damage that nobody notices is seen."""

import random
from pathlib import Path
from types import ModuleType

import pytest

from load_script import load_script

SCRIPT = Path(__file__).parents[1] / "bench" / "faults" / "damage_at_rest.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def everything(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return list(script.make_all(tmp_path_factory.mktemp("damage")))


def outcomes(
    script: ModuleType, everything: list[object], numbers: range
) -> list[tuple[str, bool, str]]:
    good = everything[0].path.parent  # type: ignore[attr-defined]
    scratch = good.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return [
        (what, script.is_protected(kept), outcome)
        for kept, what, outcome in script.outcomes(everything, good, scratch, numbers, seed=0)
    ]


def test_damages_are_found_or_change_nothing(script: ModuleType, everything: list[object]) -> None:
    found = outcomes(script, everything, range(25))
    assert [one for one in found if one[1] and one[2] not in ("found", "harmless")] == []
    assert sum(one[2] == "found" for one in found) > 8


def test_a_damage_that_nobody_notices_is_seen(
    script: ModuleType, everything: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter([(0, b"right", ""), (0, b"other", ""), (70, b"", "Traceback\nKeyError: 'a bug'")])
    monkeypatch.setattr(script, "made_of", lambda *_: next(made))
    assert [one[2] for one in outcomes(script, everything[:1], range(2))] == [
        "silent",
        "exit code 70: KeyError: 'a bug'",
    ]


def test_each_way_changes_a_file(
    script: ModuleType, everything: list[object], tmp_path: Path
) -> None:
    kept = everything[0]
    ways = set()
    for number in range(80):
        path = script.copied(kept, tmp_path)
        before = {file: file.read_bytes() for file in script.files_of(path)}
        what = script.damage(kept, path, random.Random(number))
        after = {file: file.read_bytes() for file in script.files_of(path)}
        assert (before == after) == what.endswith(": nothing")
        ways.add(what.rpartition(": ")[2])
    assert ways - {"nothing"} == {
        "bit", "bits", "cut", "zeros", "block", "version", "swapped", "missing", "longer",
    }  # fmt: skip
