"""`flambeau doctor` of a model or a run: what a step costs, what is written, what is refused."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.cli import doctor
from flambeau.tune.doctor.answer import Answer

QUICK = "--no-trials --json"


def test_a_model(flambeau: Any, tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json.gz", tmp_path / "page.html"
    words = "doctor tiny_convnet --input 2,3,32,32 --rounds 2 --trace"
    code, out, _ = flambeau(words, trace, "--html", page)
    assert code == 0
    assert out.startswith("SmallConvNet, random input 2x3x32x32, AdamW; ")
    assert re.search(
        r"^A step takes [\d.]+ ms, \d+ % of it for (forward|backward|optim)", out, re.MULTILINE
    )
    assert re.search(
        r"^Memory: .* at the peak of a step, above .* of parameters", out, re.MULTILINE
    )
    assert out.index("cudnn.benchmark") < out.index("convolution_backward")  # what to do first
    assert re.search(r"^cudnn.benchmark .*needs a GPU +torch.backends", out, re.MULTILINE)
    assert re.search(r"^del .* MiB at the peak +del output", out, re.MULTILINE)
    assert re.search(r"^num_workers .* needs data: give a run", out, re.MULTILINE)
    assert re.search(r"^step .*100 %$", out, re.MULTILINE)
    assert re.search(r"^convolution_backward .*\d %  +9$", out, re.MULTILINE)
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert "<td>needs a GPU</td>" in page.read_text() and "flambeau report" in page.read_text()


def test_a_batch_of_a_plain_model(flambeau: Any) -> None:
    found = json.loads(flambeau("doctor tiny_convnet", QUICK).out)
    assert found["about"] == "SmallConvNet, random input 8x3x32x32, AdamW"
    assert found["read_s"] is None and found["advice"] == []
    assert found["memory"]["peak_bytes"] > 0 and found["memory"]["owners"]


@pytest.fixture
def run(flambeau: Any, images: Path, tmp_path: Path) -> Path:
    shutil.copytree(images, tmp_path / "data")
    words = "--duration 1st --batch-size 4 --accumulate 2 --device cpu"
    assert flambeau("train", tmp_path / "data", "--out", tmp_path / "run", words).code == 0
    return tmp_path / "run"


def test_a_run_on_its_data(flambeau: Any, run: Path) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    found = json.loads(flambeau("doctor", run, "--rounds 2 --json").out)
    parts = [part["name"] for part in found["parts"]]
    assert parts == ["wait for data", "forward", "backward and optimizer"]
    assert found["read_s"] > 0 and ", 4 images of " in found["about"]
    names = {one["name"]: one["verdict"] for one in found["advice"]}
    assert names["channels_last"].endswith("; the run has it")
    assert not re.search("channels_last|fused optimizer", found["verdict"])
    assert {"num_workers=0", "num_workers=1"} <= set(names) and "num_workers" not in names
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    config = run / "config.toml"
    config.write_text(config.read_text().replace('compile = "none"', 'compile = "default"'))
    found = json.loads(flambeau("doctor", run, QUICK).out)
    assert found["about"].endswith(", not compiled") and found["modules"]
    data = run.parent / "data"
    shutil.rmtree(data)
    code, out, err = flambeau("doctor", run)
    assert (code, out) == (2, "")
    assert str(data) in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tiny_convnet --input 2,5", "a training step of SmallConvNet fails: "),
        ("tiny_convnet --trace FOLDER/x.txt", "--trace .*x.txt: a time line is a JSON file"),
        ("tiny_convnet --memory FOLDER/x.svg", "--memory .*x.svg: a record of memory is a pickle"),
        ("tiny_convnet --seconds 3", "--seconds is only for a script"),
        ("tiny_convnet --trials-may-write", "--trials-may-write is only for a script"),
        ("tiny_convnet --rounds 0", "--rounds must be from 1 to 100000, got 0"),
        ("tiny_convnt", "unknown model 'tiny_convnt'; did you mean 'tiny_convnet'"),
        ("nothere", "no file, no run folder and no model nothere: (.|\n)*doctor takes a script "),
        ("nothere.py", "no file, no run folder and no model nothere.py: "),
        ("--input 2,3,8,8 photos --model resnet18", "--input is only for RUN or MODEL"),
        ("--trust -- train.py", "--trust is only for RUN or MODEL"),
        pytest.param(
            "tiny_convnet --memory FOLDER/x.pickle", "--memory records the memory of a CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)  # fmt: skip
def test_wrong_input(flambeau: Any, tmp_path: Path, words: str, said: str) -> None:
    code, out, err = flambeau(f"doctor {words.replace('FOLDER', str(tmp_path))}")
    assert (code, out) == (2, "")
    assert re.search(said, err), err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("resnet18", "step"),
        ("torchvision:resnet18", "step"),
        ("net.py:make", "step"),
        ("a_run", "step"),
        ("torchvision:cifar10", "script"),
        ("hf:mnist", "script"),
        ("photos", "script"),
        ("far/away", "script"),
        ("resnet18 --epochs 1", "script"),
        ("photos --trust", "script"),
        ("-- net.py:make", "script"),
        ("", "script"),
    ],
)
def test_what_is_meant(
    words: str, asked: str, tmp_path: Path, monkeypatch: Any, flambeau: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Path("a_run").mkdir()
    Path("a_run/config.toml").touch()
    for name in ("script", "step"):
        told = Answer("about", f"of a {name}", (), {})
        door = "_of_script" if name == "script" else "_of_steps"
        monkeypatch.setattr(doctor, door, lambda *_, told=told: told)
    assert flambeau("doctor", words).out == f"about\n\nof a {asked}\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_gpu(flambeau: Any, tmp_path: Path) -> None:
    file = tmp_path / "memory.pickle"
    assert flambeau("doctor tiny_convnet --no-trials --memory", file).code == 0
    assert file.stat().st_size > 10_000


def test_a_step_that_fails_later(flambeau: Any, tmp_path: Path) -> None:
    """Not in the first step, which is tried before all others."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Tired(nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        Tired.calls += 1\n"
        "        if Tired.calls > 2:\n"
        "            raise RuntimeError('no more')\n"
        "        return super().forward(x)\n"
        "def make():\n"
        "    return Tired(4, 4)\n"
    )
    code, out, err = flambeau("doctor", f"{tmp_path / 'net.py'}:make", "--input 2,4")
    assert (code, out) == (2, "")
    assert err.endswith("flambeau: a training step fails: RuntimeError: no more\n")
