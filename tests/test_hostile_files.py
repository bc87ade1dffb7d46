"""A few of the files of bench/faults/hostile_files.py, and that what is bad is seen."""

import time
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


def test_a_command_that_computes_for_too_long_is_ended(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computes(_: Any) -> int:
        while True:
            pass

    monkeypatch.setattr(script, "flambeau", computes)
    code, _, processor_s, _ = script.in_a_fork(["verify"], tmp_path, tmp_path / "out", longest_s=0)
    assert code == -9
    assert processor_s > 0.5


def test_a_command_that_hangs_is_ended_and_computes_nothing(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "flambeau", lambda _: time.sleep(1000))
    monkeypatch.setattr(script, "HANGS_S", 0.5)
    code, _, processor_s, clock_s = script.in_a_fork(["verify"], tmp_path, tmp_path / "out")
    assert code == -9
    assert processor_s < clock_s
    assert clock_s > 0.5


def test_only_time_of_the_processor_is_held_against_a_command(
    script: ModuleType, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may hold the core."""
    took = (0, 0, 0.5, 599.0)
    monkeypatch.setattr(script, "in_a_fork", lambda *_, **__: script_output(*_) or took)
    assert complaints(script, good, range(22, 23)) == []
    monkeypatch.setattr(
        script, "in_a_fork", lambda *_, **__: script_output(*_) or (0, 0, 61.0, 9.0)
    )
    assert "61 s of the processor" in complaints(script, good, range(22, 23))[0]


def script_output(words: list[str], place: Path, output: Path) -> None:
    output.touch()
