"""--portable-bits: the switches reach torch, a resume keeps them, and what they cannot hold is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flambeau
from flambeau.errors import InputError
from flambeau.parallel.preemption import EXIT_CODE, PAUSE_AFTER
from flambeau.recipes.setup.environment import environment
from flambeau.run.options import portable_bits
from flambeau.run.options.portable_bits import SWITCHES, hold, why_not_held
from flambeau.trainer.parts.portable_bits import refused_operations

_HAS_AVX2 = "avx2" in environment()["cpu_features"]


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_bits, "_set_here", set())


def test_switches_are_set_before_torch_is_loaded() -> None:
    variables = {"OTHER": "1", "ONEDNN_MAX_CPU_ISA": "avx2"}
    hold(2, environment=variables, modules=())
    assert variables == {"OTHER": "1", **SWITCHES}
    untouched: dict[str, str] = {}
    hold(None, environment=untouched, modules=())
    assert untouched == {}


def test_another_choice_of_the_user_is_refused() -> None:
    variables = {"MKL_CBWR": "AVX2"}
    with pytest.raises(InputError, match="needs MKL_CBWR=COMPATIBLE, and the environment has AVX2"):
        hold(2, environment=variables, modules=())
    assert variables == {"MKL_CBWR": "AVX2"}


def test_it_is_too_late_once_torch_is_loaded(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables: dict[str, str] = {}
    hold(2, environment=variables)
    assert variables == {}
    for name, value in SWITCHES.items():  # what is set now, torch does not read any more
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torch was loaded without ATEN_CPU_CAPABILITY=avx2"):
        flambeau.train(images, out=tmp_path / "run", epochs=1, portable_bits=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_it_cannot_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, SWITCHES[name])  # undone afterwards, as `hold` does not
    hold(1, modules=())
    assert why_not_held(cpu_kernels="AVX2", world=1) is None
    assert "no AVX2 (torch: DEFAULT)" in str(why_not_held(cpu_kernels="DEFAULT", world=1))
    assert "there are 2" in str(why_not_held(cpu_kernels="AVX2", world=2))
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    assert "without MKL_CBWR=COMPATIBLE\n" in str(why_not_held(cpu_kernels="AVX2", world=1))


@pytest.mark.parametrize(
    "function", [torch.sqrt, lambda x: x**0.5, torch.acos, torch.log10, lambda x: x.sqrt_()]
)
def test_an_operation_that_depends_on_the_processor_is_named(
    function: Callable[[Tensor], Tensor],
) -> None:
    with (
        refused_operations(),
        pytest.raises(InputError, match=r"the model uses torch\.(sqrt|acos|log10)"),
    ):
        function(torch.rand(4))
    with refused_operations():
        assert torch.rsqrt(torch.full((1,), 4.0)) ** 2 == 0.25
    assert function(torch.ones(1)).shape == (1,)  # afterwards all are allowed


@pytest.mark.skipif(not _HAS_AVX2, reason="needs Linux on a processor with AVX2")
def test_a_run_keeps_its_switches(images: Path, tmp_path: Path) -> None:
    def command(*words: str, code: int = 0, **more: str) -> str:
        variables = {k: v for k, v in os.environ.items() if k not in SWITCHES}
        done = subprocess.run(
            [sys.executable, "-m", "flambeau", *words],
            env=variables | more, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def exactness() -> dict[str, Any]:
        folder = max((tmp_path / "run" / "checkpoints").iterdir())
        meta: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())["meta"]
        return {**meta["exactness"], "step": meta["step"]}

    short = ["--epochs", "2", "--batch-size", "8", "--image-size", "16", "--workers", "0"]
    new = ["train", str(images), "--out", "run", *short, "--portable-bits", "2"]
    command(*new, code=EXIT_CODE, **{PAUSE_AFTER: "1"})
    expected = {**SWITCHES, "cpu_kernels": "AVX2", "threads": 2}
    assert exactness() == exactness() | expected | {"step": 2}
    assert "exact, from step 2, on any x86-64 processor with AVX2" in command("verify", "run")
    said = command("train", "--out", "run")  # without the setting, which the run has
    assert exactness() == exactness() | expected | {"step": 4}
    assert "not to the same bits" not in said
