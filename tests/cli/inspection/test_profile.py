"""`flambeau inspect --profile`: of a model, of a run on its data, what is refused."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest


def test_a_model(flambeau: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    code, out, _ = flambeau("inspect tiny_convnet --input 2,3,32,32 --profile --trace", trace)
    assert code == 0
    assert out.startswith("SmallConvNet, random input 2x3x32x32, AdamW\non ")
    assert re.search(r"^whole step .*100%$", out, re.MULTILINE)
    assert re.search(r"^convolution_backward .*\d%  +9$", out, re.MULTILINE)
    assert "no data were read" in out
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    code, out, err = flambeau("inspect tiny_convnet --profile --trace", trace)
    assert (code, out) == (2, "")
    assert err.startswith(f"flambeau: {trace} exists\n")


def test_a_batch_of_a_plain_model(flambeau: Any) -> None:
    found = json.loads(flambeau("inspect tiny_convnet --profile --json").out)
    assert found["about"] == "SmallConvNet, random input 8x3x32x32, AdamW"
    assert found["read_s"] is None and found["trace"] is None


def test_a_run_on_its_data(flambeau: Any, images: Path, tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    shutil.copytree(images, data)
    words = "--duration 1st --batch-size 4 --accumulate 2 --device cpu"
    assert flambeau("train", data, "--out", run, words).code == 0
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    found = json.loads(flambeau("inspect", run, "--profile --json").out)
    parts = [part["name"] for part in found["parts"]]
    assert parts == ["wait for data", "forward", "backward and optimizer"]
    assert found["read_s"] > 0 and ", 4 images of " in found["about"]
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    config = run / "config.toml"
    config.write_text(config.read_text().replace('compile = "none"', 'compile = "default"'))
    found = json.loads(flambeau("inspect", run, "--profile --json").out)
    assert found["about"].endswith(", not compiled") and found["modules"]
    alone = json.loads(flambeau("inspect", run, "--input 2,1,32,32 --profile --json").out)
    assert alone["read_s"] is None
    shutil.rmtree(data)
    code, out, err = flambeau("inspect", run, "--profile")
    assert (code, out) == (2, "")
    assert str(data) in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tiny_convnet --trace FOLDER/x.json.gz", "--trace has no effect without --profile"),
        ("tiny_convnet --profile --depth 1", "--depth has no effect with --profile"),
        ("tiny_convnet --profile --graph FOLDER/x.svg", "--graph has no effect with --profile"),
        ("tiny_convnet --checklist --profile", "--checklist has no effect with --profile"),
        ("tiny_convnet --checklist --depth 1", "--depth has no effect with --checklist"),
        ("tiny_convnet --checklist --input 2,5", "a training step of SmallConvNet fails: "),
        ("tiny_convnet --profile --compile", "--profile has no effect with --compile"),
        ("tiny_convnet --profile --trace FOLDER/x.json", "the name of this file must end with .gz"),
        ("tiny_convnet --profile --input 2,5", "a training step of SmallConvNet fails: "),
        ("nothing_known --profile", "unknown model 'nothing_known'"),
    ],
)
def test_wrong_input(flambeau: Any, tmp_path: Path, words: str, said: str) -> None:
    code, out, err = flambeau(f"inspect {words.replace('FOLDER', str(tmp_path))}")
    assert (code, out) == (2, "")
    assert re.search(said, err), err
    assert not list(tmp_path.iterdir())


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
    code, out, err = flambeau("inspect", f"{tmp_path / 'net.py'}:make", "--input 2,4 --profile")
    assert (code, out) == (2, "")
    assert err == "flambeau: a training step fails: RuntimeError: no more\n"


def test_checklist_of_a_model(flambeau: Any) -> None:
    code, out, _ = flambeau("inspect tiny_convnet --input 2,3,32,32 --checklist")
    assert code == 0
    assert out.startswith("SmallConvNet, random input 2x3x32x32, AdamW\non ")
    assert re.search(r"^cudnn.benchmark +torch.backends.* needs a GPU$", out, re.MULTILINE)
    assert re.search(r"^del .* MiB at the peak$", out, re.MULTILINE)
    assert re.search(r"^num_workers .* needs data: give a run", out, re.MULTILINE)


def test_checklist_of_a_run(flambeau: Any, images: Path, tmp_path: Path) -> None:
    words = "--duration 1st --batch-size 4 --device cpu"
    assert flambeau("train", images, "--out", tmp_path / "run", words).code == 0
    found = json.loads(flambeau("inspect", tmp_path / "run", "--checklist --json").out)
    names = [one["name"] for one in found["advice"]]
    assert {"num_workers=0", "num_workers=1"} <= set(names) and "num_workers" not in names
