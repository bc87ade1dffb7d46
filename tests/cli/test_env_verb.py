"""`flambeau env`: the whole report, aligned for people and as JSON for programs."""

import argparse
import json

import pytest
import torch

import flambeau
from flambeau.cli import env
from flambeau.data.images.jpeg.region_decode import jpeg_decoder
from flambeau.data.images.native.kernel import kernel_status
from flambeau.recipes.setup import environment as recipe


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    env.add_arguments(parser)
    return env.run(parser.parse_args(words))


def test_json_is_the_version_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == 0
    report = json.loads(capsys.readouterr().out)
    images = report.pop("images")
    assert images == {"jpeg": jpeg_decoder(), "kernel": kernel_status()}
    assert report == {"flambeau": flambeau.__version__, **recipe.environment()}
    assert report["torch"] == torch.__version__


def test_text_is_aligned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {
        "torch": "2.15.0",
        "packages": {"timm": "1.0.31", "numpy": None},
        "gpus": [],
        "usable_cpus": 2,
        "native_bf16": ["cpu", "cuda:0"],
        "container": False,
    }
    monkeypatch.setattr(recipe, "environment", lambda: report)
    assert call() == 0
    assert capsys.readouterr().out.splitlines() == [
        f"flambeau     {flambeau.__version__}",
        "torch        2.15.0",
        "packages",
        "  timm       1.0.31",
        "  numpy      none",
        "gpus         none",
        "usable cpus  2",
        "native bf16  cpu, cuda:0",
        "container    no",
        "images",
        f"  jpeg       {jpeg_decoder()}",
        f"  kernel     {kernel_status()}",
    ]


def test_text_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    text = capsys.readouterr().out
    for name, value in recipe.environment().items():
        assert name.replace("_", " ") in text
        assert isinstance(value, list | dict | None) or str(value) in text
