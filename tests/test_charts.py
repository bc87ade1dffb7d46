"""docs/pictures/charts holds what tools/draw/charts.py draws now, and the pages say the same figures."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from load_script import load_script

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "draw" / "charts.py"
PAGES = [ROOT / "docs" / language / "performance.md" for language in ("en", "zh")]
HOMES = [ROOT / "docs" / language / "index.md" for language in ("en", "zh")]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script(TOOL)


def figures(tool: ModuleType, chart: str) -> dict[str, Any]:
    shown = tool.CHARTS[chart]
    return {row["contender"]: row[shown.value] for row in tool.rows(shown)}


def test_the_files_are_what_the_tool_writes(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = {path.name: path.read_bytes() for path in tool.FOLDER.iterdir()}
    monkeypatch.setattr(tool, "FOLDER", tmp_path)
    tool.main()
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == committed, f"run `python {TOOL.relative_to(ROOT)}`"


def test_a_chart_shows_the_rows(tool: ModuleType) -> None:
    """The lengths of the bars, read back, are the figures to half a pixel of the scale."""
    chart = tool.CHARTS["trainer-overhead"]
    picture = tool.svg(chart)
    lengths = [int(width) for width in re.findall(r'<rect [^>]*width="(\d+)"', picture)]
    rows = tool.rows(chart)
    scale = tool.BAR / max(row["ratio_p75"] for row in rows)
    assert lengths == pytest.approx([row["ratio"] * scale for row in rows], abs=0.51)
    assert [f"{row['ratio']:.2f}" in picture for row in rows] == [True] * len(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_chart_is_shown_with_its_figures(tool: ModuleType, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in tool.CHARTS:
        [alternative] = re.findall(rf"!\[(.*?)\]\(\.\./pictures/charts/{name}\.svg\)", text)
        said = [float(number) for number in re.findall(r"\d\.\d+", alternative)]
        measured = figures(tool, name).values()
        assert said
        for number in said:
            assert any(number in (round(one, 1), round(one, 2)) for one in measured), number


@pytest.mark.parametrize(
    "page", [*HOMES, *PAGES], ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_figures_in_words_are_those_of_the_bench(tool: ModuleType, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = (ROOT / "bench" / "results" / "first_command.jsonl").read_text("utf-8").splitlines()
    newest = [row for row in map(json.loads, lines) if row["contender"] == "bf16"][-1]
    overhead, images = figures(tool, "trainer-overhead"), figures(tool, "image-loader")
    assert f"{newest['seconds_median']}" in text
    assert f"{overhead['flambeau Run']:.2f}" in text
    assert f"{overhead['lightning Trainer']:.2f}" in text
    assert f"{images['flambeau']:.1f}" in text


def _rows(name: str, *, seeds: range) -> list[dict[str, Any]]:
    text = (ROOT / "bench" / "results" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [row for row in map(json.loads, text.splitlines()) if row["seed"] in seeds]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_kills_in_words_are_those_of_the_bench(language: str) -> None:
    """The storm has the seeds from 11 on."""
    text = (ROOT / "docs" / language / "reliability.md").read_text(encoding="utf-8")
    storm = _rows("kill_storm", seeds=range(11, 21))
    assert all(row["identical"] for row in storm)
    sharded = [row for row in storm if row["sharded"]]
    alone = [row for row in storm if {*row["kills_by_ranks"]} == {"1"}]
    in_parts = [row for row in storm if row not in sharded and row not in alone]
    plans = _rows("elastic_plans", seeds=range(11, 13))
    assert all(row["good"] for row in plans)
    shown = []
    for kind in (alone, in_parts, sharded, *([row] for row in plans)):
        shown += [sum(row[key] for row in kind) for key in ("kills", "kills_in_saves")]
    shown += [row[key] for row in plans for key in ("plans", "seed")]
    for figure in (*shown, plans[0]["exact_plans"], plans[1]["by_sigterm"]):
        assert re.search(rf"\b{figure}\b", text, re.ASCII), figure


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_seconds_in_words_are_those_of_the_bench(tool: ModuleType, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rows = tool.rows(tool.CHARTS["train-end-to-end"])
    accuracies = [row["val_accuracy"] for row in rows]
    shown = [row["seconds"] for row in rows if "torchvision" in row["contender"]]
    shown += [row["seconds"] for row in rows if "flambeau" in row["contender"]]
    for words in (*map(str, shown), f"{min(accuracies):.3f}", f"{max(accuracies):.3f}"):
        assert re.search(rf"(?<![\d.]){re.escape(words)}(?!\d)", text, re.ASCII), words
    for row in rows[1:]:
        assert f"{row['wall_ratio']:.2f}" in text
