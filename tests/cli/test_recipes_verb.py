"""`flambeau recipes`: its words, its files and its refusals."""

import argparse
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flambeau.cli import recipes
from flambeau.cli.command import main
from flambeau.errors import InputError

FOLDER = Path(recipes.__file__).parents[1] / "recipes"
SAMPLE_ORDER = FOLDER / "data" / "sample_order.py"


def call(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    recipes.add_arguments(parser)
    return recipes.run(parser.parse_args([str(word) for word in words]))


@pytest.mark.parametrize("words", [(), ("list",)])
def test_list_names_every_recipe_below_its_folder(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words) == 0
    expected = {}
    for path in FOLDER.rglob("*.py"):
        if path.stem != "__init__":
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            expected[f"{path.parent.name}/{path.stem}"] = docstring.splitlines()[0]
    assert read_listing(capsys.readouterr().out) == expected


def read_listing(text: str) -> dict[str, str]:
    found, folder = {}, ""
    for line in text.splitlines():
        if line.startswith("  "):
            name, summary = line.split(maxsplit=1)
            found[f"{folder}/{name}"] = summary
        else:
            folder = line
    return found


@pytest.mark.parametrize("words", [("--zh",), ("list", "--zh"), ("--zh", "list")])
def test_list_in_chinese(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 0
    listing = read_listing(capsys.readouterr().out)
    assert listing["data/sample_order"].startswith("样本顺序与逐样本种子")
    assert all(re.search(r"[\u4e00-\u9fff]", summary) for summary in listing.values())


@pytest.mark.parametrize("name", ["sample_order", "data/sample_order"])
def test_show_prints_the_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", name) == 0
    assert capsys.readouterr().out == SAMPLE_ORDER.read_text(encoding="utf-8")


@pytest.mark.parametrize("action", [("show",), ("copy", ".")])
def test_unknown_name_is_refused_with_the_nearest(action: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"'sample_ordr'; did you mean sample_order or data/"):
        call(action[0], "sample_ordr", *action[1:])
    with pytest.raises(InputError, match=r"'qqqqqq'\.\n`flambeau recipes` lists them"):
        call(action[0], "qqqqqq", *action[1:])


@pytest.mark.parametrize("name", ["../cli/recipes", "__init__", "data", ""])
def test_only_recipes_have_names(name: str) -> None:
    with pytest.raises(InputError, match="no recipe is named"):
        call("show", name)


def test_copy_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("copy", "sample_order", tmp_path) == 0
    copy = tmp_path / "sample_order.py"
    assert copy.read_bytes() == SAMPLE_ORDER.read_bytes()
    assert capsys.readouterr().out == f"wrote {copy}\n"


def test_copy_under_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("copy", "data/sample_order", tmp_path / "order.py") == 0
    assert (tmp_path / "order.py").read_bytes() == SAMPLE_ORDER.read_bytes()
    assert capsys.readouterr().out == f"wrote {tmp_path / 'order.py'}\n"


def test_copy_never_overwrites(tmp_path: Path) -> None:
    mine = tmp_path / "sample_order.py"
    mine.write_text("mine", encoding="utf-8")
    for dest in (tmp_path, mine):
        with pytest.raises(InputError, match=re.escape(f"{mine} exists, and nothing was written")):
            call("copy", "sample_order", dest)
    assert mine.read_text(encoding="utf-8") == "mine"


def test_copy_does_not_write_through_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "sample_order.py").symlink_to(tmp_path / "target.py")
    with pytest.raises(InputError, match="nothing was written"):
        call("copy", "sample_order", tmp_path)
    assert not (tmp_path / "target.py").exists()


def test_copy_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a folder nor the name of a"):
        call("copy", "sample_order", tmp_path / "missing")
    with pytest.raises(InputError, match=r"cannot write .*No such file or directory"):
        call("copy", "sample_order", tmp_path / "missing" / "order.py")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["recipes"], ["recipes", "show", "sample_order"]])
def test_a_reader_that_leaves(words: list[str]) -> None:
    """`flambeau recipes | head -1`: no traceback, no complaint."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as pipe:
        command = [sys.executable, "-W", "error", "-m", "flambeau", *words]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_listing_and_showing_need_no_torch() -> None:
    script = """
import sys
from flambeau.cli.command import main
assert main(["recipes"]) == main(["recipes", "show", "sample_order"]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "sample_ordr"], "did you mean sample_order"),
        (["show"], "NAME"),
        (["lst"], "lst"),
        (["list", "--colour"], "--colour"),
    ],
)
def test_mistakes_end_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert len(said.err.splitlines()) <= 2
