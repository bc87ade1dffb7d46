"""docs/pictures/schedules holds what tools/draw/schedules.py draws now, and the page shows each."""

import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from flambeau.trainer.settings.settings import FIELDS
from load_script import load_script

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "draw" / "schedules.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script(TOOL)


def test_the_files_are_what_the_tool_writes(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = {path.name: path.read_bytes() for path in tool.FOLDER.iterdir()}
    monkeypatch.setattr(tool, "FOLDER", tmp_path)
    tool.main()
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == committed, f"run `python {TOOL.relative_to(ROOT)}`"


def test_a_picture_is_the_curve(tool: ModuleType) -> None:
    """The points of one file, read back, are the values of the schedule to half a pixel."""
    schedule = tool.pictures()["cosine"]
    picture = ET.fromstring(tool.svg("cosine", schedule))
    line = picture.find("{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    heights = [int(point.split(",")[1]) for point in line.attrib["points"].split()]
    top, floor = tool.MARGIN, tool.HEIGHT - tool.MARGIN
    values = [(floor - height) / (floor - top) for height in heights]
    wanted = [schedule(step) for step in range(tool.TOTAL)]
    assert values == pytest.approx(wanted, abs=0.51 / (floor - top))
    assert min(heights) == top


def test_every_schedule_of_the_command_is_drawn_and_shown(tool: ModuleType) -> None:
    names = set(tool.pictures())
    assert set(FIELDS["schedule"].metadata["choices"]) <= names
    for language in ("en", "zh"):
        page = (ROOT / "docs" / language / "schedules.md").read_text(encoding="utf-8")
        missing = [name for name in names if f"pictures/schedules/{name}.svg" not in page]
        assert not missing
