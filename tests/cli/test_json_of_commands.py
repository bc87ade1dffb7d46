"""`--json` of the commands that say what they have made or found: one object, which equals the facts."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

TRAIN = "--model tiny_convnet --image-size 8 --batch-size 6 --duration 1st --device cpu --out run"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answer(flambeau: Any, *words: Any, code: int = 0) -> dict[str, Any]:
    result = flambeau(*words, "--json")
    assert result.code == code, result.err
    (line,) = result.out.splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def test_what_is_verified_and_made_of_a_run(flambeau: Any, images: Path) -> None:
    assert flambeau("train", images, TRAIN).code == 0
    run = answer(flambeau, "verify run")
    assert (run["folder"], run["kind"], run["good"]) == ("run", "run", True)
    assert run["lines"] == flambeau("verify run").out.splitlines()
    checkpoint = next(Path("run/checkpoints").glob("step-*"))
    assert answer(flambeau, "verify", checkpoint)["kind"] == "checkpoint"

    converted = answer(flambeau, "convert run new.safetensors")
    assert converted["tensors"] == len(safetensors.torch.load_file("new.safetensors"))
    assert converted["bytes"] == Path("new.safetensors").stat().st_size
    assert converted["taken"].startswith("run, ")

    features = answer(flambeau, "features run", images, "f.npy")
    assert features["file"] == "f.npy" and Path(features["list"]).is_file()
    assert all(shape[0] == features["images"] for shape in features["shapes"].values())

    report = answer(flambeau, "report run --out page.html")
    assert report == {"file": "page.html", "runs": ["run"]}
    assert Path("page.html").is_file()

    with Path("run/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    damaged = answer(flambeau, "verify run", code=1)
    assert not damaged["good"]
    assert any("DAMAGED" in line for line in damaged["lines"])


def test_what_is_packed_and_listed(flambeau: Any, images: Path) -> None:
    packed = answer(flambeau, "pack", images / "train", "a.rec")
    num = len(list((images / "train").rglob("*.png")))
    assert (packed["files"], packed["images"], packed["bad"]) == (["a.rec"], num, [])
    assert not packed["already"]
    assert answer(flambeau, "pack", images / "train", "a.rec")["already"]
    listed = answer(flambeau, "pack", images / "train", "b.lst --list")
    assert (listed["files"], listed["images"]) == (["b.lst"], num)


def test_recipes_are_one_object_per_line(flambeau: Any) -> None:
    rows = [json.loads(line) for line in flambeau("recipes list --json").out.splitlines()]
    assert {"folder": "training", "name": "ema"}.items() <= next(
        row for row in rows if row["name"] == "ema"
    ).items()
    text = flambeau("recipes").out
    assert all(row["line"] in text for row in rows)
    assert len(rows) == sum(line.startswith("  ") for line in text.splitlines())
