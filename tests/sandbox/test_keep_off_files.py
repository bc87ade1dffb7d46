"""Commands that only try something: what the user's code writes meanwhile is gone, their output is there."""

import sys
from pathlib import Path
from typing import Any

import pytest

from flambeau.sandbox.keep_off_files import outside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mount namespaces are Linux's")

USER = """
import os, torch
from pathlib import Path
from typing import Any
from torch import nn
def spoil():
    Path("kept").write_text("overwritten")
    Path("made").write_text("made")
    Path("~/made-by-flambeau-test").expanduser().write_text("made")
    assert Path("kept").read_text() == "overwritten"
    print("spoiled", flush=True)
spoil()
def build(num_classes=2, **_):
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, num_classes))
def photos():
    return [(torch.rand(3, 8, 8), i % 2) for i in range(24)]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "kept").write_text("mine")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("inspect user.py:build --input 1,3,8,8 --graph model.svg", "model.svg"),
        ("doctor user.py:build --input 4,3,8,8 --no-trials --html page.html", "page.html"),
        pytest.param(
            "train user.py:photos --dry-run --batch-size 4 --device cpu", "", marks=pytest.mark.slow
        ),
        pytest.param(
            "train user.py:photos --find-lr rates.svg --batch-size 4 --device cpu", "rates.svg",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_only_the_output_is_left(
    words: str, output: str, folder: Path, run_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"user.py", "kept", *filter(None, [output])}
    monkeypatch.chdir(folder)
    done = run_python("-m", "flambeau", *words.split(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "spoiled" in done.stdout + done.stderr
    if "it cannot be held back here" in done.stderr:
        pytest.skip(done.stderr)
    assert (folder / "kept").read_text() == "mine"
    assert {path.name for path in folder.iterdir()} == names
    assert not Path("~/made-by-flambeau-test").expanduser().exists()
    if output:
        assert (folder / output).read_text().startswith(("<svg", "<!DOCTYPE html>"))


def test_outside_of_a_view_a_path_is_itself(tmp_path: Path) -> None:
    assert outside(tmp_path / "model.svg") == tmp_path / "model.svg"
