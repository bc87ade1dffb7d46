"""`flambeau inspect --graph`: the file, what is printed, what is refused."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest


def test_graphs_of_a_model(flambeau: Any, tmp_path: Path) -> None:
    file = tmp_path / "graph.svg"
    code, out, _ = flambeau("inspect tiny_convnet --graph", file)
    assert code == 0
    assert out.startswith(f"{file}: ")
    assert re.search(r"^\d+ operations of autograd and \d+ leaves in \d+ nodes$", out, re.MULTILINE)
    ElementTree.parse(file)
    code, out, err = flambeau("inspect tiny_convnet --graph", file)
    assert (code, out) == (2, "")
    assert err == f"flambeau: {file} exists\nName another file, or give --force\n"
    before = file.read_bytes()
    code, out, _ = flambeau("inspect tiny_convnet --depth 1 --json --force --graph", file)
    found = json.loads(out)
    assert found["modules"]["depth"] == 1 and found["file"] == str(file)
    assert (
        found["kept_bytes"] > 0 and len(found["autograd"]["edges"]) and file.read_bytes() != before
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("resnet18 --graph FOLDER/x.png", r"x.png: the name of this file must end with .svg"),
        ("resnet18 --graph FOLDER/no/x.svg", r"no/x.svg cannot be made: there is no folder .*no\nMake"),
        ("resnet18 --input 1,3 --graph FOLDER/x.svg", r"ResNet does not take \(float32 \(1, 3\)\)"),
        ("resnet18 --compile --graph FOLDER/x.svg", "--graph has no effect with --compile"),
        ("--conv 9,k3 --graph FOLDER/x.svg", "--graph has no effect with --conv"),
        ("resnet18 --force", "--force has no effect without a file to write"),
        ("resnet18 --memory FOLDER/x.png", "x.png: the name of this file must end with .svg"),
        ("resnet18 --memory FOLDER/x.svg --graph FOLDER/y.svg", "--graph has no effect with --memory"),
        ("tiny_convnet --memory FOLDER/x.svg --input 2,5", "a training step of SmallConvNet fails: "),
    ],
)  # fmt: skip
def test_wrong_input(flambeau: Any, tmp_path: Path, words: str, said: str) -> None:
    code, out, err = flambeau(f"inspect {words.replace('FOLDER', str(tmp_path))}")
    assert (code, out) == (2, "")
    assert re.search(said, err), err
    assert not list(tmp_path.iterdir())


def test_memory_of_a_step(flambeau: Any, tmp_path: Path) -> None:
    file = tmp_path / "memory.svg"
    code, out, _ = flambeau("inspect tiny_convnet --input 2,3,32,32 --memory", file)
    assert code == 0
    assert out.startswith(f"{file}: SmallConvNet, random input 2x3x32x32, AdamW\n")
    assert re.search(r"at the peak, above .* of parameters and buffers", out)
    ElementTree.parse(file)
    assert flambeau("inspect tiny_convnet --memory", file).code == 2
    found = json.loads(flambeau("inspect tiny_convnet --json --force --memory", file).out)
    assert (
        found["peak_bytes"] > 0 and found["about"] == "SmallConvNet, random input 8x3x32x32, AdamW"
    )


def test_memory_of_a_run(flambeau: Any, images: Path, tmp_path: Path) -> None:
    words = "--duration 1st --batch-size 4 --device cpu"
    assert flambeau("train", images, "--out", tmp_path / "run", words).code == 0
    code, out, err = flambeau("inspect", tmp_path / "run", "--memory", tmp_path / "memory.svg")
    assert code == 0, err
    assert ", 4 images of " in out
