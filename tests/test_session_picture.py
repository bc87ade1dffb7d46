"""docs/pictures/session.svg shows what `flambeau train` prints when it is killed and started again."""

import html
import re
from pathlib import Path
from types import ModuleType

import pytest

from load_script import load_script

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "draw" / "session.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script(TOOL)


def lines_of(picture: str) -> list[str]:
    """The lines of a drawn terminal, from top to bottom."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(
        r'<text class="session-r[^>]*? x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)', picture
    ):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    lines = ["".join(text for _, text in sorted(rows[y])).rstrip() for y in sorted(rows)]
    return [line for line in lines if line]


def test_the_picture_is_drawn_by_the_tool(tool: ModuleType) -> None:
    picture = tool.FILE.read_text(encoding="utf-8")
    assert tool.svg(lines_of(picture)) == picture, f"run `python {TOOL.relative_to(ROOT)}`"


def test_the_picture_loads_nothing_and_names_no_machine(tool: ModuleType) -> None:
    picture = tool.FILE.read_text(encoding="utf-8")
    assert not re.search(r"url\((?!#)|@import|@font-face|<image|<script|xlink", picture)
    assert not re.search(r"(^|[\s\"'>;])/\w+/", "\n".join(lines_of(picture)))


def test_both_starts_pass_the_same_points(tool: ModuleType) -> None:
    """The epoch that was lost is trained again, to the same figures."""
    lines = lines_of(tool.FILE.read_text(encoding="utf-8"))
    cut = lines.index("Killed")
    before, after = (
        {line.split()[1]: line.split("*")[0] for line in part if line.startswith("epoch")}
        for part in (lines[:cut], lines[cut:])
    )
    assert before.keys() & after.keys() == {"3/4"}
    assert before["3/4"] == after["3/4"]
    assert list(before | after) == [f"{number}/4" for number in range(1, 5)]


def test_settings_and_folders_are_left_out(tool: ModuleType) -> None:
    lines = [
        "two",
        "  data   a=1",
        "          b=2",
        "      flambeau x /home/me/flambeau/data/embedded/y",
    ]
    assert tool.shorten(lines) == ["two", "  ...", "      flambeau x .../data/embedded/y"]


@pytest.mark.slow
def test_the_picture_shows_what_the_command_prints(tool: ModuleType) -> None:
    """But for the digits, which epochs are better than those before, and what the verdict is: they differ
    between processors."""
    shown = lines_of(tool.FILE.read_text(encoding="utf-8"))
    now = [line for line in tool.record() if line]
    assert without_figures(now) == without_figures(shown)


def test_a_verdict_of_several_lines_is_one() -> None:
    """Where other programs use the processors, the verdict says so, at length."""
    quiet = ["epoch 1", "waits for data 3% of the time: the model sets the pace", "epoch 2"]
    busy = [
        "epoch 1",
        "waits for data 5% of the time; threads wait, while",
        "others compute",
        "epoch 2",
    ]
    assert without_figures(quiet) == without_figures(busy)
    assert len(without_figures(busy)) == 3


def without_figures(lines: list[str]) -> list[str]:
    kept = list[str]()
    for line in lines:
        in_verdict = bool(kept) and kept[-1] == "waits for data"
        if line.startswith("waits for data"):
            kept.append("waits for data")
        elif not in_verdict or line.startswith(("epoch", "finished", "$")):
            kept.append(re.sub(r"\d+", "0", line).replace(" * best", ""))
    return kept
