"""A few of the files of bench/faults/hostile_files.py, and that what is bad is seen."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from load_script import load_script

SCRIPT = Path(__file__).parents[1] / "bench" / "faults" / "hostile_files.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def good(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "good"
    folder.mkdir()
    script.make_good(folder)
    return folder


def complaints(script: ModuleType, good: Path, numbers: range) -> list[str]:
    scratch = good.parent / "scratch"
    return [
        text
        for number in numbers
        for text in script.complaints(good, scratch, number, seed=0, idle=2**31)
    ]


def test_no_command_does_harm_or_fails_loudly(script: ModuleType, good: Path) -> None:
    assert complaints(script, good, range(18, 26)) == []  # 22 is an image that leads to /dev/zero


def test_what_is_bad_is_seen(
    script: ModuleType, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(words: list[str]) -> int:
        hostile = next(word for word in words if "given" in word)
        given = Path(hostile[: hostile.index("given")]) / "given"
        (given / "canary").touch()
        (given / script.ESCAPED).touch()
        print("\x1b]0;owned")
        raise KeyError("a bug")

    monkeypatch.setattr(script, "flambeau", bad)
    (text, *_) = complaints(script, good, range(22, 23))
    for said in ("executed", "wrote elsewhere", "traceback: KeyError", "exit code 70", "escape"):
        assert said in text, text


def test_a_command_that_hangs_is_ended(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(_: Any) -> int:
        while True:
            pass

    monkeypatch.setattr(script, "flambeau", hangs)
    monkeypatch.setattr(script, "LONGEST_S", 0.3)
    code, _, seconds = script.in_a_fork(["verify"], tmp_path, tmp_path / "output")
    assert code == -9
    assert seconds > 0.3
