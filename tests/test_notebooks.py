"""The lessons as notebooks: up to date, of Jupyter's format, and run from the first cell to the last."""

import ast
import json
import sys
from pathlib import Path

import pytest

from test_cookbook_blocks import shown, what_is_wrong
from test_docs import ROOT, Block, read

sys.path.insert(0, str(ROOT / "tools"))

import write_notebooks

NOTEBOOKS = {
    path: ROOT / "docs" / path.parent.name / "course" / f"{path.stem}.md"
    for path in write_notebooks.written()
}


def test_they_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert write_notebooks.main(["--check"]) == 0, capsys.readouterr().out
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_the_cells_are_the_blocks_of_the_lesson(path: Path) -> None:
    made = json.loads((ROOT / path).read_text(encoding="utf-8"))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    code = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    blocks = [block for block in read(NOTEBOOKS[path]).blocks if block.word == "python"]
    assert code == [block.source.strip("\n") for block in blocks]
    for source in code:
        ast.parse(source)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    made = json.loads((ROOT / path).read_text(encoding="utf-8"))
    for cell in made["cells"]:
        if cell["cell_type"] == "markdown":
            for target in write_notebooks._LINK.findall("".join(cell["source"])):
                assert ((ROOT / path).parent / target).exists(), target


def is_short(path: Path) -> bool:
    """Of those whose code is the same, the English ones, and no training."""
    return path.parent.name == "en" and path.stem < "05"


@pytest.mark.parametrize(
    "path",
    [p if is_short(p) else pytest.param(p, marks=pytest.mark.slow) for p in NOTEBOOKS],
    ids=str,
)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path: Path, tmp_path: Path) -> None:
    """And prints what the comments of its cells say."""
    made = json.loads((ROOT / path).read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    whole = Block("python", 1, "\n\n".join(cells) + "\n")
    assert shown(whole)
    assert what_is_wrong(whole, tmp_path) is None


def test_text_and_code_become_cells() -> None:
    text = "# A lesson\n\nText, [more](../tensors.md#a) and [next](02_b.md).\n"
    page = f"{text}\n```python\nx = 1\n```\n\nEnd.\n"
    cells = write_notebooks.notebook(page, "en")["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown"]
    shown = "".join(cells[0]["source"])
    assert "[more](../../en/tensors.md#a)" in shown and "[next](02_b.ipynb)" in shown
    assert "".join(cells[1]["source"]) == "x = 1"
