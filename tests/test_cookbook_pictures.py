"""docs/pictures/cookbook holds what tools/draw/cookbook.py draws now, and pages show each with its words."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from load_script import load_script

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "draw" / "cookbook.py"
SVG = "{http://www.w3.org/2000/svg}"
MEMORY = "memory-of-a-step"  # what autograd keeps is another version's business


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script(TOOL)


@pytest.fixture(scope="module")
def drawn(tool: ModuleType) -> dict[str, str]:
    found: dict[str, str] = tool.pictures()
    return found


def peaks(picture: str) -> list[int]:
    return [int(size) for size in re.findall(r"(\d+) MiB at the peak", picture)]


def test_the_files_are_what_the_tool_draws(tool: ModuleType, drawn: dict[str, str]) -> None:
    committed = {path.stem: path.read_text("utf-8").rstrip() for path in tool.FOLDER.iterdir()}
    again = f"run `python {TOOL.relative_to(ROOT)}`"
    assert committed.keys() == drawn.keys()
    assert peaks(committed.pop(MEMORY)) == pytest.approx(peaks(drawn[MEMORY]), rel=0.05), again
    for name, picture in committed.items():
        assert picture == drawn[name], again


def test_recomputed_stages_lower_the_peak(drawn: dict[str, str]) -> None:
    plain, recomputed = peaks(drawn[MEMORY])
    assert recomputed < 0.95 * plain


def test_curves_are_the_measured_ones(tool: ModuleType, drawn: dict[str, str]) -> None:
    """The points of a line, read back, are the losses to a pixel."""
    lines = ET.fromstring(drawn["learning-curves"]).findall(f"{SVG}polyline")
    rows = tool.trainings()
    assert len(lines) == 2 * len(rows) == 6
    wanted = [row[name] for row in rows.values() for name in ("train_loss", "val_loss")]
    for line, values in zip(lines, wanted, strict=True):
        heights = [int(point.split(",")[1]) for point in line.attrib["points"].split()]
        found = [(154 - height) / 130 * tool.MOST_LOSS for height in heights]
        assert found == pytest.approx([min(one, tool.MOST_LOSS) for one in values], abs=0.011)


def test_labels_are_mixed_as_the_images(drawn: dict[str, str]) -> None:
    shares = re.findall(r"(\d+)% Trouser, (\d+)% Sneaker", drawn["mixup-and-cutmix"])
    assert len(shares) == 2
    for one, other in shares:
        assert int(one) + int(other) == 100 and 10 < int(other) < 50


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_picture_is_shown_with_words(drawn: dict[str, str], language: str) -> None:
    pages = [path.read_text("utf-8") for path in (ROOT / "docs" / language).glob("*.md")]
    for name, picture in drawn.items():
        title = ET.fromstring(picture).find(f"{SVG}title")
        assert title is not None and title.text
        shown = [
            words
            for page in pages
            for words in re.findall(rf"!\[([^]]*)\]\(\.\./pictures/cookbook/{name}\.svg\)", page)
        ]
        assert shown and all(len(words) > 40 for words in shown), name
