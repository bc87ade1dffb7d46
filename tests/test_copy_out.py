"""Every recipe can be taken away: its file alone, in an empty folder, imports and passes its doctests.

One subprocess serves all recipes, because importing torch is the slow part; in it `flambeau` is blocked
and every warning is an error.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "src" / "flambeau" / "recipes"
RECIPES = sorted(path for path in FOLDER.rglob("*.py") if path.stem != "__init__")

# argv: the file for the results, then the copied recipes. One JSON line a recipe, written at once,
# so that a crash of the interpreter is put down to the recipe that caused it.
RUNNER = r"""
import doctest, importlib, json, os, sys, traceback
from pathlib import Path


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "flambeau":
            raise ImportError("flambeau is blocked: a recipe must live without it")


sys.meta_path.insert(0, Block())
results, *recipes = map(Path, sys.argv[1:])
search = list(sys.path)
for recipe in recipes:
    sys.path[:] = [str(recipe.parent), *search]
    os.chdir(recipe.parent)
    said = []
    try:
        module = importlib.import_module(recipe.stem)
        runner = doctest.DocTestRunner(verbose=False)
        for test in doctest.DocTestFinder().find(module):
            runner.run(test, out=said.append)
        if not runner.tries:
            said.append("no doctest in this file")
    except BaseException:
        said.append(traceback.format_exc())
    sys.modules.pop(recipe.stem, None)
    with results.open("a") as file:
        print(json.dumps({"recipe": str(recipe), "said": "".join(said)}), file=file)
"""


def run_copies(sources: dict[str, str], folder: Path) -> dict[str, str]:
    """Run each source ('folder/name.py') alone in a folder of its own; what went wrong, by name."""
    copies = {}
    for name, source in sources.items():
        copies[name] = folder / name.replace("/", "-").removesuffix(".py") / Path(name).name
        copies[name].parent.mkdir()
        copies[name].write_text(source, encoding="utf-8")
    results = folder / "results.jsonl"
    results.touch()
    command = [sys.executable, "-I", "-W", "error", "-c", RUNNER, results, *copies.values()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    said = {line["recipe"]: line["said"] for line in lines}
    lost = f"the interpreter died here or before, with {done.returncode}:\n{done.stderr}"
    return {name: said.get(str(copy), lost) for name, copy in copies.items()}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    sources = {
        path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in RECIPES
    }
    return run_copies(sources, tmp_path_factory.mktemp("copies"))


@pytest.mark.parametrize("recipe", [path.relative_to(FOLDER).as_posix() for path in RECIPES])
def test_recipe_lives_alone(recipe: str, reports: dict[str, str]) -> None:
    if reports[recipe]:
        pytest.fail(reports[recipe], pytrace=False)


def test_recipes_were_found() -> None:
    assert len(RECIPES) >= 10


EXAMPLE = '"""Line.\n\n>>> 1 + 1\n2\n"""\n'


def test_dependent_recipes_are_caught(tmp_path: Path) -> None:
    """The check can fail, for the right reason and for the guilty recipe only."""
    sources = {
        "a/good.py": EXAMPLE,
        "a/uses_flambeau.py": EXAMPLE + "import flambeau\n",
        "a/uses_flambeau_late.py": '"""Line.\n\n>>> import flambeau.recipes\n"""\n',
        "a/uses_sibling.py": EXAMPLE + "import good\n",
        "b/warns.py": EXAMPLE + "import warnings\nwarnings.warn('old')\n",
        "b/wrong.py": EXAMPLE.replace("\n2\n", "\n3\n"),
        "b/untested.py": '"""Line."""\n',
        "b/good.py": EXAMPLE,
        "c/dies.py": EXAMPLE + "import os\nos._exit(7)\n",
    }
    said = run_copies(sources, tmp_path)
    assert said["a/good.py"] == said["b/good.py"] == ""
    assert "flambeau is blocked" in said["a/uses_flambeau.py"]
    assert "flambeau is blocked" in said["a/uses_flambeau_late.py"]
    assert "No module named 'good'" in said["a/uses_sibling.py"]
    assert "UserWarning: old" in said["b/warns.py"]
    assert "Expected:\n    3\nGot:\n    2" in said["b/wrong.py"]
    assert "no doctest" in said["b/untested.py"]
    assert "died here or before, with 7" in said["c/dies.py"]
