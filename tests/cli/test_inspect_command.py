"""`flambeau inspect`: models by name, from a file and of a run; inputs; wrong input."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from flambeau.trainer.prediction.trained_model import load_trained

NET = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.left = nn.Linear(4, 4)

    def forward(self, ids, scale=None):
        x = self.embed(ids).mean(1)
        return self.head(x if scale is None else x * scale)

def make():
    return Two()

def wrong():
    return 3
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path / "net.py"


def inspected(flambeau: Any, *words: Any) -> dict[str, Any]:
    code, out, err = flambeau("inspect", *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_table_and_totals(flambeau: Any) -> None:
    code, out, _ = flambeau("inspect torchvision:resnet18 --depth 1")
    assert code == 0
    rows = [line.split() for line in out.partition("\n\n")[0].splitlines()]
    assert rows[0][:4] == ["module", "kind", "output", "parameters"]
    assert rows[9][:7] == ["layer4", "Sequential", "1x512x7x7", "8.4", "M", "822.1", "M"]
    assert rows[9][-1] == "435x435"
    assert len(rows) == 2 + len(list(torchvision.models.resnet18().children()))
    assert "11,689,512 parameters (11,689,512 trainable), 9,620 numbers in buffers" in out
    assert "3,628,146,688 FLOPs of matrix products" in out
    assert "a training step of this input with AdamW: " in out


@pytest.mark.skipif(
    not torch.__version__.startswith("2.15."), reason="the page shows figures of torch 2.15"
)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_shows_what_is_printed(flambeau: Any, language: str) -> None:
    page = Path(__file__).parents[2] / "docs" / language / "inspect.md"
    (shown, *_) = re.findall(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert flambeau("inspect resnet18 --depth 1").out == shown


def test_depth(flambeau: Any) -> None:
    def names(depth: int) -> list[str]:
        table = flambeau(f"inspect tiny_convnet --depth {depth}").out.partition("\n\n")[0]
        return [line.split()[0] for line in table.splitlines()[1:]]

    assert names(0) == ["(model)"]
    assert "stages.0" in names(2) and "stages.0" not in names(1)


def test_a_model_of_a_file(flambeau: Any, net: Path) -> None:
    found = inspected(flambeau, f"{net}:make", "--input 5,7:int64 --input scale=5,4")
    assert found["modules"][0]["output"] == [[5, 3]]
    assert found["modules"][0]["parameters"] == 36 + 15 + 20
    assert found["unused"] == ["left"]
    assert found["training"]["activations"] > 0
    assert found["no_training"] is None
    out = flambeau("inspect", f"{net}:make", "--input 5,7:int64").out
    assert "not used in evaluation: left (20 parameters)" in out


def test_an_input_that_is_a_dict(flambeau: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("""
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
    def forward(self, batch, scale=None):
        x = self.embed(batch["text"]["ids"]).mean(1) + batch["add"]
        return self.head(x if scale is None else x * scale)
def make():
    return Net()
""")
    words = "--input batch.text.ids=5,7:int64 --input batch.add=5,4 --input scale=5,4"
    found = inspected(flambeau, f"{tmp_path / 'net.py'}:make", words)
    assert found["modules"][0]["output"] == [[5, 3]]
    assert found["training"]["activations"] > 0


def test_lazy_layers_have_a_training_step_too(flambeau: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("""
from torch import nn
def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
""")
    lazy, plain = (
        inspected(flambeau, f"{tmp_path / 'net.py'}:{name}", "--input 5,3,2,2")
        for name in ("lazy", "plain")
    )
    assert lazy["training"] == plain["training"]
    assert lazy["ran"]
    out = flambeau("inspect", f"{tmp_path / 'net.py'}:lazy", "--input 5,3,2,2").out
    assert "the model ran on random values, as it reads some or has lazy layers" in out


def test_a_model_that_no_training_step_can_take_says_why(flambeau: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("""
from torch import nn
def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4))
""")
    code, out, _ = flambeau("inspect", tmp_path / "net.py:make", "--input 1,3,2,2")
    assert code == 0
    assert "no training step can be followed, so its memory is not known: Expected more" in out
    found = inspected(flambeau, tmp_path / "net.py:make", "--input 1,3,2,2")
    assert found["training"] is None
    assert found["no_training"].startswith("Expected more than 1 value per channel")


@pytest.fixture
def run(flambeau: Any, images: Path, tmp_path: Path) -> Path:
    words = "--duration 1st --batch-size 4 --device cpu --eval-size 24"
    assert flambeau("train", images, "--out", tmp_path / "run", words).code == 0
    return tmp_path / "run"


def test_the_model_of_a_run(flambeau: Any, run: Path) -> None:
    found = inspected(flambeau, run)
    trained = load_trained(run, say=print)
    assert found["modules"][0]["parameters"] == sum(p.numel() for p in trained.model.parameters())
    assert found["modules"][1]["output"][0][-1] == 24
    again = inspected(flambeau, run, "--input 2,1,32,32")
    assert again["modules"][1]["output"][0][0] == 2
    assert again["training"]["activations"] > found["training"]["activations"]


def test_the_input_chooses_channels_and_size(flambeau: Any) -> None:
    found = inspected(flambeau, "vit_tiny_patch16_224 --input 2,1,64,64")
    assert found["modules"][0]["output"] == [[2, 1000]]
    assert found["modules"][2]["output"] == [[2, 192, 4, 4]]


REFUSES = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="the embedding of a fake tensor takes any dtype"
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("resnt18", r"unknown model 'resnt18'; did you mean 'resnet18'\?"),
        pytest.param(
            "NET:make",
            r"Two does not take \(float32 \(1, 3, 224, 224\)\): RuntimeError: ",
            marks=REFUSES,
        ),
        pytest.param(
            "NET:make --input 1,7", r"Two does not take \(float32 \(1, 7\)\)", marks=REFUSES
        ),
        ("NET:make --input bias=1,7:int64", r"unexpected keyword argument 'bias'"),
        ("NET:wrong", r"net.py:wrong must return a torch.nn.Module, it returned int"),
        ("NET:absent", r"absent"),
        ("resnet18 --input 1,3", r"ResNet does not take \(float32 \(1, 3\)\)"),
        ("resnet18 --input 1x3x64x64", r"--input 1x3x64x64: give sizes such as 1,3,224,224"),
        (
            "resnet18 --input 1,3,64,64:int46",
            r"no dtype 'int46'; did you mean 'int64'\? \(known: ",
        ),
        ("resnet18 --input 0,3,64,64", r"--input 0,3,64,64: sizes must be at least 1"),
        ("resnet18 --input 99999,3,999,999", r"at most 12 sizes and 8,589,934,592 numbers"),
        ("resnet18 --input 2-x=1,3", r"'2-x' is no name of an argument"),
        ("resnet18 --input x=1,3 --input x=1,3", r"'x' is given twice"),
        ("resnet18 --input x.=1,3", r"'x.' is no name of an argument"),
        ("resnet18 --input x=1 --input x.y=1", r"--input x.y=1: 'x' is given as a tensor, too"),
        ("resnet18 --input x.y=1 --input x=1", r"--input x=1: 'x' is given twice"),
        ("resnet18 --depth -1", r"--depth must be at least 0, got -1"),
        ("resnet18 --depth 1 --json", r"--depth has no effect with --json"),
        ("resnet18 --depth 1 --compile", r"--depth has no effect with --compile"),
        ("--conv 9,k3 --input 1,3,9,9", r"--input has no effect with --conv"),
        ("--conv 9,k3 --compile", r"--compile has no effect with --conv"),
        ("EMPTY", r"holds no run|is not|no run"),
    ],
)
def test_wrong_input(flambeau: Any, net: Path, tmp_path: Path, words: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    given = words.replace("NET", str(net)).replace("EMPTY", str(tmp_path / "empty"))
    code, out, err = flambeau(f"inspect {given}")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) <= 2
    assert re.search(said, err), err


def test_graph_breaks(flambeau: Any, tmp_path: Path) -> None:
    text = NET.replace(
        "        return self.head", "        print('seen')\n        return self.head"
    )
    (tmp_path / "net.py").write_text(text)
    model = f"{tmp_path / 'net.py'}:make"
    code, out, _ = flambeau("inspect", model, "--input 5,7:int64 --compile")
    assert code == 0
    line = next(n for n, text in enumerate(text.splitlines(), 1) if "print(" in text)
    assert re.search(rf"^\d+ graphs of \d+ operations, broken at:\n{re.escape(str(tmp_path))}", out)
    assert f"net.py:{line}  print('seen')" in out
    assert "seen\n" not in out.replace("print('seen')", "")
    found = inspected(flambeau, model, "--input 5,7:int64 --compile")
    assert found["breaks"][0]["line"] == line
    assert flambeau("inspect tiny_convnet --compile").out.startswith("one graph of ")
    assert inspected(flambeau, model, "--input 5,7:int64")[
        "modules"
    ]  # its words are not in the JSON


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
        ("resnet18 --force", "--force has no effect without --graph"),
    ],
)  # fmt: skip
def test_wrong_graphs(flambeau: Any, tmp_path: Path, words: str, said: str) -> None:
    code, out, err = flambeau(f"inspect {words.replace('FOLDER', str(tmp_path))}")
    assert (code, out) == (2, "")
    assert re.search(said, err), err
    assert not list(tmp_path.iterdir())


def test_convolutions_in_a_row(flambeau: Any) -> None:
    out = flambeau("inspect --conv 9,k3,s2,p1 --conv k3,d2 --conv k2,s2,t").out
    table, *pictures = out.strip().split("\n\n")
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["9,k3,s2,p1", "9", "5", "0", "3", "2"],
        ["k3,d2", "5", "1", "2", "11", "2"],
        ["k2,s2,t", "1", "2", "0", "11", "1"],
    ]
    assert pictures[0].splitlines()[:2] == ["+012345678+", "###........"]
    assert pictures[1:] == ["01234\n#.#.#", "01\n##"]
    out = flambeau("inspect --conv 4,k3,s2,p1,t,o1 --conv k3,s2,ceil --json").out
    pool = torch.nn.MaxPool2d(3, stride=2, ceil_mode=True)
    up = torch.nn.ConvTranspose2d(1, 1, 3, stride=2, padding=1, output_padding=1)
    image = torch.zeros(1, 1, 4, 4)
    sizes = [stage["size"] for stage in json.loads(out)["stages"]]
    assert sizes == [up(image).shape[-1], pool(up(image)).shape[-1]]
    out = flambeau("inspect --conv 224,k7,s2,p3 --json").out
    assert json.loads(out)["stages"] == [{"size": 112, "unused": 0, "sees": 7, "jump": 2}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "name a MODEL or a RUN"),
        ("resnet18 --conv 224,k7", "--conv is without MODEL"),
        ("--conv k7", r"--conv k7: give it as 224,k7,s2,p3, with d2 for a dilation, t for transposed"),
        ("--conv 9,k3,o1", "--conv 9,k3,o1: output_padding is for a transposed convolution"),
        ("--conv 9,k3,k4", "--conv 9,k3,k4: give it as"),
        ("--conv 9,s2", "--conv 9,s2: give it as"),
        ("--conv 9,k3 --conv 7,k3", r"--conv 7,k3: give it as k3,s2,p1 \(the input comes "),
        ("--conv 9,k0", "--conv 9,k0: kernel must be at least 1, got 0"),
        ("--conv 9,k3 --conv k9", "--conv: window 2: a window of 9 positions does not fit 7 with 0"),
    ],
)  # fmt: skip
def test_wrong_convolutions(flambeau: Any, words: str, said: str) -> None:
    code, out, err = flambeau(f"inspect {words}")
    assert (code, out) == (2, "")
    assert re.search(said, err), err


def test_nothing_is_left_behind(flambeau: Any) -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    assert flambeau("inspect tiny_convnet --depth 0").code == 0
    assert torch.backends.mha.get_fastpath_enabled() == before
