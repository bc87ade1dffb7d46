"""A block of a cookbook page runs when it is copied alone, and shows what it prints.

`print(x)  # prints: 3` says what the line prints; a print of several lines has one such comment per line,
below it. Chinese pages write `# 输出：3`. `...` stands for what differs between machines, as in a doctest.

    python tests/test_cookbook_blocks.py [PAGE ...]

prints for each page how many blocks it has, how many run alone, and how many show a result.
"""

import ast
import contextlib
import doctest
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flambeau.terminal import say
from forked_python import run_python
from test_docs import ROOT, Block, links, parse_headings, read

PRINTS = re.compile(r"# (?:prints: |输出：)(.*)$", re.MULTILINE)
SHARE_SHOWN = (
    0.8  # of the blocks that do not write a file alone; the rest define something, or draw
)


def cookbook_pages() -> dict[str, Path]:
    """Name to page: the section Cookbook of the index, where there is Python on the page."""
    index = ROOT / "docs" / "en" / "index.md"
    headings = parse_headings(index.read_text(encoding="utf-8"))
    place = [row for _, row in headings].index("## Cookbook")
    first, last = headings[place][0], headings[place + 1][0]
    names = [target for line, target in links(read(index)) if first < line < last]
    pages = {name: index.parent / name for name in names}
    return {name: page for name, page in pages.items() if python_blocks(page)}


def python_blocks(page: Path) -> list[Block]:
    return [block for block in read(page).blocks if block.word == "python"]


def shown(block: Block) -> list[str]:
    """The lines that it prints, by its comments."""
    return [line.rstrip() for line in PRINTS.findall(block.source)]


def is_a_result(lines: list[str]) -> bool:
    return any(re.search(r"\w", line) for line in lines)


def writes_a_file_alone(block: Block) -> bool:
    """`Path("train.py").write_text(...)` and its import, for the commands below it."""
    *imports, last = ast.parse(block.source).body
    is_written = re.match(r"Path\(\S+\)\.write_text\(", ast.unparse(last)) is not None
    return is_written and all(isinstance(one, ast.ImportFrom) for one in imports)


def what_is_wrong(block: Block, folder: Path) -> str | None:
    """Run it as a script in a folder of its own, with warnings as errors, and compare its lines."""
    with tempfile.TemporaryDirectory(dir=folder) as own, contextlib.chdir(own):
        script = Path("block.py")
        script.write_text(block.source, encoding="utf-8")
        done = run_python("-W", "error", script)
    if done.returncode:
        return f"line {block.line}: {done.stderr.strip()[-300:]}"
    expected = "".join(f"{line}\n" for line in shown(block))
    printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    if expected and not doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS):
        return f"line {block.line}: it prints\n{printed}and its comments say\n{expected}"
    return None


@pytest.mark.parametrize("name", cookbook_pages())
def test_every_block_runs_alone(name: str, tmp_path: Path, few_embedded: Path) -> None:
    blocks = python_blocks(cookbook_pages()[name])
    assert [wrong for block in blocks if (wrong := what_is_wrong(block, tmp_path))] == []


RECIPES = {
    page.stem: page
    for page in sorted((ROOT / "docs" / "en" / "recipes").glob("*.md"))
    if len(python_blocks(page)) > 1
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_further_block_of_a_recipe_runs_alone(name: str, tmp_path: Path) -> None:
    """`flambeau recipes page NAME#HEADING` prints it so; tests/test_docs.py runs the first ones."""
    blocks = python_blocks(RECIPES[name])[1:]
    assert [wrong for block in blocks if (wrong := what_is_wrong(block, tmp_path))] == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_training_in_cpp_is_compiled_and_learns(tmp_path: Path) -> None:
    blocks = read(cookbook_pages()["inference.md"]).blocks
    (program,) = [block.source for block in blocks if block.word == "cpp"]
    (commands,) = [block.source for block in blocks if "g++ -std" in block.source]
    (tmp_path / "train.cpp").write_text(program)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-ec", commands.replace("g++", "g++ -w")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < 0.01 < losses[0]
    assert (tmp_path / "net.pt").stat().st_size > 0


def test_the_pipeline_of_dali_runs_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="pip install nvidia-dali-cuda130")
    blocks = read(cookbook_pages()["data_cookbook.md"]).blocks
    (pipeline,) = [block for block in blocks if "nvidia.dali" in block.source]
    assert shown(pipeline)
    assert what_is_wrong(pipeline, tmp_path) is None


@pytest.mark.parametrize("name", cookbook_pages())
def test_most_blocks_show_a_result(name: str) -> None:
    blocks = python_blocks(cookbook_pages()[name])
    num_shown = sum(is_a_result(shown(block)) for block in blocks)
    num_files = sum(writes_a_file_alone(block) for block in blocks)
    assert num_shown >= SHARE_SHOWN * (len(blocks) - num_files)
    assert [block.line for block in blocks if "pytest" in block.source] == []


@pytest.mark.parametrize("name", cookbook_pages())
def test_both_languages_say_what_is_printed(name: str) -> None:
    english, chinese = (
        [shown(block) for block in python_blocks(ROOT / "docs" / language / name)]
        for language in ("en", "zh")
    )
    assert english == chinese


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print(1 + 1)  # prints: 2", None),
        ("for n in range(2):\n    print(n)\n    # prints: 0\n    # 输出：1", None),
        ("print(0.123)  # prints: 0.1...", None),
        ("x = 1", None),
        ("print(1 + 1)  # prints: 3", "it prints\n2\n"),
        ("print(1)\nprint(2)  # prints: 2", "it prints\n1\n2\n"),
        ("x = 1  # prints: 1", "and its comments say\n1\n"),
        ("print(x)  # prints: 1", "NameError"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
    ],
)
def test_a_wrong_line_is_found(source: str, message: str | None, tmp_path: Path) -> None:
    wrong = what_is_wrong(Block("python", 1, source), tmp_path)
    assert wrong is None if message is None else message in str(wrong)


def test_a_result_has_a_word_or_a_number() -> None:
    assert is_a_result(["step 1", "..."])
    assert not is_a_result(["..."])
    assert not is_a_result([])


def test_a_block_that_writes_a_file_is_told_from_others() -> None:
    written = 'from pathlib import Path\n\nPath("a.py").write_text("""\nx = 1\n""")\n'
    assert writes_a_file_alone(Block("python", 1, written))
    assert not writes_a_file_alone(Block("python", 1, written + "print(1)\n"))
    assert not writes_a_file_alone(Block("python", 1, "x = 1\n" + written))


def main(names: list[str]) -> None:
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}"
    for name, page in cookbook_pages().items():
        if names and name not in names:
            continue
        blocks = python_blocks(page)
        with tempfile.TemporaryDirectory() as folder:
            found = [what_is_wrong(block, Path(folder)) for block in blocks]
        num_shown = sum(is_a_result(shown(block)) for block in blocks)
        say(f"{name}: {len(blocks)} blocks, {found.count(None)} run alone, {num_shown} show")
        for wrong in found:
            if names and wrong:
                say(wrong)


if __name__ == "__main__":
    main(sys.argv[1:])
