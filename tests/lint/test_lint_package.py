"""The linter runs without torch and flambeau, on the oldest Python that it names, and is built alone."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "flambeau_lint").rglob("*.py"))
BARE = """
import sys
sys.modules["torch"] = sys.modules["flambeau"] = None
from flambeau_lint.command import main
sys.exit(main(["--no-cache", "--target", "2.15", sys.argv[1]]))
"""


def old_script(folder: Path) -> Path:
    path = folder / "old.py"
    path.write_text("import torch\ntorch.qr(torch.eye(2))\n")
    return path


def test_it_needs_neither_torch_nor_flambeau(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", BARE, str(old_script(tmp_path))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.returncode == 1, done.stderr
    assert ":2:1: FLB187 [*]" in done.stdout


def test_the_hook_runs_out_of_the_checkout(tmp_path: Path) -> None:
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text()
    assert re.search(r"^  language: script$", hooks, re.MULTILINE)
    (entry,) = re.findall(r"^  entry: (\S+)", hooks, re.MULTILINE)
    done = subprocess.run(
        [str(ROOT / entry), "--no-cache", str(old_script(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert "FLB187" in done.stdout


def test_the_hook_of_the_page_fixes_what_is_staged(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "en" / "lint.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"^      args: \[(.*)\]$", page, re.MULTILINE)
    script = old_script(tmp_path)
    for command in (
        ["git", "init"],
        ["git", "add", script.name],
        [str(ROOT / "lint" / "flambeau-lint"), *given.replace('"', "").split(", "), script.name],
    ):
        subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
    assert "torch.linalg.qr" in script.read_text()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_sources_are_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))


def test_an_old_python_runs_it(tmp_path: Path) -> None:
    python = shutil.which("python3.9")
    if (
        python is None
        or subprocess.run([python, "-V"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no python3.9 on the path")
    done = subprocess.run(
        [python, str(ROOT / "lint" / "flambeau-lint"), "--no-cache", str(old_script(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr


def test_the_distribution_has_the_package_alone(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "lint" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT / "lint", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "flambeau_lint"
    }
    expected = {path.relative_to(ROOT / "src").as_posix() for path in SOURCES}
    assert expected <= set(names)
