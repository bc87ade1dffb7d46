"""Lines and bars on a terminal: their width, what goes first where room is short, no escape in a pipe."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from flambeau import terminal
from flambeau.terminal import CountBar, bar_line, clock, print_text, say, shows_bars

_FIGURES = {"41%": 7, "loss 0.4123": 8, "12345 images/s": 5, "waiting 2%": 4, "1:23 left": 6}


class Terminal(io.StringIO):
    """Takes what is written, and says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def a_screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error is a terminal of 60 columns; called in the test, before which pytest sets it."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def drawn(columns: int, **given: Any) -> str:
    console = Console(width=columns, file=io.StringIO(), force_terminal=False, no_color=True)
    with console.capture() as text:
        console.print(bar_line(columns, 41, 100, **given))
    return text.get().rstrip("\n")


@pytest.mark.parametrize("columns", [*range(20, 130, 7), 80, 120])
def test_a_bar_is_one_line_whatever_the_width(columns: int) -> None:
    line = drawn(columns, before={"epoch 3/6": 9}, after=_FIGURES)
    assert "\n" not in line
    assert len(line) <= columns
    assert "━" in line


def test_what_matters_less_goes_first() -> None:
    def shown(columns: int) -> set[str]:
        line = drawn(columns, before={"epoch 3/6": 9}, after=_FIGURES)
        return {text for text in ("epoch 3/6", *_FIGURES) if text in line}

    assert shown(120) == {"epoch 3/6", *_FIGURES}
    assert shown(35) == {"epoch 3/6", "loss 0.4123"}
    assert shown(22) == {"epoch 3/6"}
    before: set[str] = set()
    for columns in range(20, 121):
        now = shown(columns)
        assert len(now) >= len(before)
        before = now


def test_a_time_is_read_at_a_glance() -> None:
    assert [clock(s) for s in (0, 59.6, 83, 3683)] == ["0:00", "1:00", "1:23", "1:01:23"]


def test_without_a_terminal_a_line_is_plain_and_there_is_no_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with CountBar(3, unit="images") as bar:
        bar.update(2)
        say("val_accuracy 0.9 * best", green="* best")
    assert capsys.readouterr() == ("", "val_accuracy 0.9 * best\n")


def test_a_mark_has_its_color_unless_nobody_wants_one(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = a_screen(monkeypatch)
    say("[red]0.9[/] * best :smile:", green="* best")
    assert screen.getvalue() == "[red]0.9[/] \x1b[1;32m* best\x1b[0m :smile:\n"
    monkeypatch.setenv("NO_COLOR", "1")
    screen.truncate(screen.seek(0))
    say("0.9 * best", green="* best")
    assert "32m" not in screen.getvalue()


def test_a_long_line_is_left_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = a_screen(monkeypatch)
    path = "/a folder/" * 30
    with CountBar(3, unit="images"):
        say(f"it is in {path}")
    assert f"it is in {path}\n" in screen.getvalue()


def test_a_line_goes_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = a_screen(monkeypatch)
    with CountBar(2, unit="images") as bar:
        bar.update()
        say("a word")
    assert "1/2 images" in screen.getvalue()
    assert "\x1b[2Ka word\n" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # and it is gone at the end
    assert not terminal._lines


def test_the_cursor_stays_where_a_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = a_screen(monkeypatch)
    with CountBar(2, unit="images"):
        shown = screen.getvalue()
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_terminal_that_cannot_go_back_gets_no_bar(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    screen = a_screen(monkeypatch)
    assert shows_bars()
    monkeypatch.setenv("TERM", name)
    assert not shows_bars()
    with CountBar(2, unit="images") as bar:
        bar.update()
        say("0.9 * best", green="* best")
    assert screen.getvalue() == "0.9 * best\n"


NAMES = ("猫", "\x1b[31mred", "two\nlines", "right\u202eleft")


def test_control_characters_and_foreign_letters_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream, put in (("stdout", print_text), ("stderr", say)):
        written = io.BytesIO()
        monkeypatch.setattr(sys, stream, io.TextIOWrapper(written, encoding="ascii"))
        for name in NAMES:
            put(name)
        lines = [r"\u732b", r"\x1b[31mred", "two", "lines", r"right\u202eleft"]
        assert written.getvalue().decode() == "\n".join([*lines, ""])


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_without_a_stream_nothing_is_printed(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for nothing in (None, closed):
        monkeypatch.setattr(sys, stream, nothing)
        say("x")
        say("x", green="x")
        print_text("x")
        assert not shows_bars()
        with CountBar(2, unit="images") as bar:
            bar.update()


def test_a_reader_that_has_gone_ends_nothing() -> None:
    script = "from flambeau.terminal import say\nfor k in range(3): say('x' * 70000)\nprint('end')"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        process.stderr.close()
        out, _ = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, b"end\n")


@pytest.mark.slow
def test_a_training_whose_streams_are_closed_or_speak_ascii(tmp_path: Path) -> None:
    """Nothing is lost at its end, and no file of the run gets what was meant for a closed stream."""
    for name in ("猫", "\x1b[31mdog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            image = Image.new("L", (8, 8), 20 * number + len(name))
            image.save(tmp_path / "photos" / name / f"{number}.png")
    flambeau = f"{sys.executable} -m flambeau"
    train = f"{flambeau} train photos --epochs 1 --device cpu"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    files = set[str]()
    for number, streams in enumerate(("", "2>&-", ">&-", ">&- 2>&- <&-")):
        done = subprocess.run(
            f"{train} --out run{number} {streams}",
            shell=True,
            cwd=tmp_path,
            env=env,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert b"\x1b" not in done.stdout + done.stderr
        names = {path.name for path in (tmp_path / f"run{number}").iterdir()}
        assert files in (set(), names)
        files = names
        lines = (tmp_path / f"run{number}" / "metrics.jsonl").read_text().splitlines()
        assert all(line.startswith("{") for line in lines)
    for words in ("predict run0 photos", "check photos", "runs .", "evaluate run0 photos --all"):
        done = subprocess.run(
            f"{flambeau} {words}",
            shell=True,
            cwd=tmp_path,
            env=env,
            capture_output=True,
            check=False,
        )
        assert done.returncode in (0, 1) and b"Traceback" not in done.stderr, done.stderr
        assert b"\x1b" not in done.stdout + done.stderr
