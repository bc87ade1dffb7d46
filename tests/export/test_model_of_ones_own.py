"""`flambeau export` of a run whose model is in a file of the user's."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("in_tmp_path")
MODELS = """
import torch
from torch import nn


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 64, 3)

    def forward(self, x):
        return self.head(nn.functional.adaptive_avg_pool2d(x, 8).flatten(1))


class Branch(Small):
    def forward(self, x):
        if x.mean() > 0:
            return super().forward(x)
        return super().forward(-x)


class Dropped(Small):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))
"""


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)


def trained(flambeau: Any, exported_run: Path, name: str) -> None:
    words = "--image-size 32 --batch-size 16 --precision fp32 --duration 2st --out run --model"
    answer = flambeau("train", exported_run.parent / "photos", words, f"models.py:{name}")
    assert answer.code == 0, answer.err


def test_it_is_exported_without_its_file(exported_run: Path, flambeau: Any) -> None:
    trained(flambeau, exported_run, "Small")
    assert flambeau("export run --allow-slower --out shipped").code == 0
    Path("models.py").unlink()
    answer = flambeau("predict shipped --json", exported_run.parent / "photos" / "waves" / "0.png")
    assert answer.code == 0, answer.err
    told = json.loads(Path("shipped/export.json").read_text())
    assert told["settings"]["model"] == "models.py:Small"


def test_safetensors_is_refused_before_anything_is_measured(
    exported_run: Path, flambeau: Any
) -> None:
    trained(flambeau, exported_run, "Small")
    answer = flambeau("export run --format safetensors --out shipped")
    assert answer.code == 2
    assert answer.err.startswith("flambeau: --format safetensors holds weights alone")


@pytest.mark.parametrize("name", ["torch-export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_branch_on_values_is_told_with_its_line_and_nothing_else(
    exported_run: Path, flambeau: Any, name: str
) -> None:
    """torch.export prints the graph so far, and logs."""
    if name == "onnx":
        pytest.importorskip("onnxscript")
    trained(flambeau, exported_run, "Branch")
    answer = flambeau(f"export run --format {name} --out shipped")
    assert answer.code == 2
    line = 1 + MODELS.splitlines().index("        if x.mean() > 0:")
    *progress, cause, hint = answer.err.splitlines()
    assert "models.py:Branch, which run names (your own)" in progress[0]
    assert progress[1:] == ["run: measuring on 6 images", f"{name}: writing"]
    assert f"models.py, line {line}): Could not guard" in cause
    assert hint.startswith("A forward() whose path depends on values")
    assert answer.out == ""
    assert sorted(path.name for path in Path().iterdir()) == ["models.py", "run"]


def test_model_with_random_answers_is_refused(exported_run: Path, flambeau: Any) -> None:
    trained(flambeau, exported_run, "Dropped")
    answer = flambeau("export run --min-agreement 0 --allow-slower --out shipped")
    assert answer.code == 2
    assert "gives other answers to the same images when it is asked again" in answer.err
    assert not Path("shipped").exists()
