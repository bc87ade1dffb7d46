"""`flambeau env`: the whole report, aligned for people and as JSON for programs."""

import argparse
import json
import shutil
from collections.abc import Callable
from email.message import Message
from importlib import metadata

import pytest
import simplejpeg
import torch

import flambeau
from flambeau.cli import env, nvidia_driver
from flambeau.images.native.kernel import kernel_status
from flambeau.inspection import operation_check
from flambeau.inspection.operation_check import Difference
from flambeau.recipes.setup import environment as recipe


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    env.add_arguments(parser)
    return env.run(parser.parse_args(words))


def test_json_is_the_version_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == 0
    report = json.loads(capsys.readouterr().out)
    images = report.pop("images")
    assert report.pop("cuda_of_driver") is None or torch.version.cuda
    assert images == {"jpeg": f"simplejpeg {simplejpeg.__version__}", "kernel": kernel_status()}
    assert report.pop("problems") == []
    known = {"export", "formats", "hf", "plot", "gpu", "tensorboard", "wandb", "mlflow", "smp"}
    known |= {"remote", "gs", "az", "sweep", "lint-server"}
    assert set(report.pop("extras")) <= known
    assert 0 <= report.pop("shared_memory_free_bytes") <= shutil.disk_usage("/dev/shm").total
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
        "usable_memory_bytes": 2**31,
        "native_bf16": ["cpu", "cuda:0"],
        "container": False,
        "cuda_build": "13.2",
    }
    monkeypatch.setattr(recipe, "environment", lambda: report)
    monkeypatch.setattr(nvidia_driver, "cuda_of_driver", lambda: (13, 0))
    monkeypatch.setattr(env, "_free", lambda folder: None)
    monkeypatch.setattr(
        env, "_extras", lambda: {"plot": ["matplotlib is missing"], "hf": "installed"}
    )
    assert call() == 0
    assert capsys.readouterr().out.splitlines() == [
        f"flambeau            {flambeau.__version__}",
        "torch               2.15.0",
        "packages",
        "  timm              1.0.31",
        "  numpy             none",
        "gpus                none",
        "usable cpus         2",
        "usable memory       2.0 GiB",
        "native bf16         cpu, cuda:0",
        "container           no",
        "cuda build          13.2",
        "cuda of driver      13.0",
        "shared memory free  none",
        "images",
        f"  jpeg              simplejpeg {simplejpeg.__version__}",
        f"  kernel            {kernel_status()}",
        "extras",
        "  plot              matplotlib is missing",
        "  hf                installed",
        "problems            none",
    ]


def test_text_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    text = capsys.readouterr().out
    for name, value in recipe.environment().items():
        is_size = name.endswith("_bytes")
        assert name.removesuffix("_bytes").replace("_", " ") in text
        assert isinstance(value, list | dict | None) or is_size or str(value) in text


TOO_NEW = "torch is built for CUDA 13.2, and the NVIDIA driver here serves CUDA 12.8 at most"


def installed(versions: dict[str, str]) -> Callable[[str], str]:
    """Like metadata.version, in a made-up environment."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version


@pytest.mark.parametrize(
    ("torch_here", "needed", "said"),
    [
        ("2.15.0+cu132", "torch (>=2.14.0)", []),
        ("2.13.0", "torch>=2.14.0", ["torchvision 0.29.2 needs torch>=2.14.0, and torch 2.13.0 is here"]),
        ("2.11.0+cpu", "torch==2.11.0", []),
        ("2.14.0a0+git1", "torch (>=2.9.1)", []),
        ("2.12.0", "torch (==2.11.0)", ["torchvision 0.29.2 needs torch==2.11.0, and torch 2.12.0 is here"]),
        ("2.12.0", "torchvision-extra==1.0", []),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    torch_here: str,
    needed: str,
    said: list[str],
) -> None:
    versions = {"torch": torch_here, "torchvision": "0.29.2", "h5py": "3.12"}
    needs = {
        "torchvision": ["numpy", needed],
        "flambeau": ["torch>=2.11", "h5py>=3.12; extra == 'formats'", "lmdb>=1.6; extra == 'formats'",
                     "matplotlib>=3.9 ; extra == \"plot\"", "ruff; extra == 'dev'"],
    }  # fmt: skip
    monkeypatch.setattr(metadata, "version", installed(versions))
    monkeypatch.setattr(metadata, "requires", needs.get)
    extras = Message()
    for name in ("formats", "plot", "dev"):
        extras["Provides-Extra"] = name
    monkeypatch.setattr(metadata, "metadata", {"flambeau": extras}.__getitem__)
    assert env._problems() == said
    assert env._extras() == {"formats": ["lmdb is missing"], "plot": ["matplotlib is missing"]}


@pytest.mark.parametrize(
    ("build", "served", "said"),
    [
        ("13.2", None, []),
        ("13.2", (13, 0), []),
        ("12.6", (13, 0), []),
        (None, None, []),
        (None, (13, 0), ["torch is built without CUDA, and the NVIDIA driver here serves CUDA 13.0"]),
        ("13.2", (12, 8), [TOO_NEW]),
    ],
)  # fmt: skip
def test_torch_and_the_driver(
    build: str | None, served: tuple[int, int] | None, said: list[str]
) -> None:
    found = env._driver_problems(build, served)
    assert [line.partition(": install")[0] for line in found] == said
    assert all("uv pip install -e . --torch-backend auto" in line for line in found)


def test_selftest_ends_with_1_where_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("--selftest", "--json") == 0
    tested = json.loads(capsys.readouterr().out)["selftest"]
    assert tested["cpu"]["wrong"] == []
    assert tested["cpu"]["operations"] > 40
    monkeypatch.setattr(
        operation_check,
        "differences",
        lambda _: [
            Difference("sort", "float32", 0.5),
            Difference("conv2d", "float32", None, "no kernel image is available"),
            Difference("topk", "float16", None),
        ],
    )
    assert call("--selftest") == 1
    out = capsys.readouterr().out
    assert "sort in float32 (off by 0.5 of the largest value)" in out
    assert "conv2d in float32 (no kernel image is available)" in out
    assert "missing         topk in float16" in out
