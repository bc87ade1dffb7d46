import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic

from flambeau.recipes.setup.determinism import (
    COMPILER_VARIABLE,
    make_deterministic,
    use_deterministic,
)

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def switches_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "")  # so that monkeypatch knows what was there
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv(COMPILER_VARIABLE, "")
    monkeypatch.delenv(COMPILER_VARIABLE)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.deterministic = before[2]
    torch.backends.cudnn.benchmark = before[3]
    torch.utils.deterministic.fill_uninitialized_memory = before[4]


def no_deterministic_algorithm() -> None:
    """An operation that torch lists as having no deterministic algorithm, on the CPU too."""
    torch.nn.functional.max_unpool1d(
        torch.ones(1, 1, 2), torch.tensor([[[0, 2]]]), kernel_size=2
    ).sum()


def cuda_in_use(monkeypatch: pytest.MonkeyPatch, *, in_use: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)


def test_every_switch_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_in_use(monkeypatch, in_use=False)
    torch.backends.cudnn.benchmark = True
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ[VARIABLE] == ":4096:8"


def test_an_operation_without_deterministic_algorithm_raises() -> None:
    no_deterministic_algorithm()
    make_deterministic()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        no_deterministic_algorithm()


def test_warn_only_warns_and_runs() -> None:
    make_deterministic(warn_only=True)
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        no_deterministic_algorithm()


def test_new_tensors_are_not_filled_with_nan() -> None:
    """torch's deterministic mode alone fills `torch.empty`."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(64).isnan().all()
    make_deterministic()
    fresh = [torch.empty(64) for _ in range(1000)]  # all alive: few can reuse a block full of NaN
    assert not all(t.isnan().all() for t in fresh)


def test_a_good_setting_of_the_users_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ":16:8")
    make_deterministic()
    assert os.environ[VARIABLE] == ":16:8"


def test_a_setting_that_is_not_deterministic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ":0:0")
    with pytest.raises(ValueError, match=r"must be one of :4096:8, :16:8 .* got ':0:0'"):
        make_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()


def test_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_in_use(monkeypatch, in_use=True)
    with pytest.raises(RuntimeError, match=f"start with {VARIABLE}=:4096:8"):
        make_deterministic()
    assert VARIABLE not in os.environ
    assert not torch.are_deterministic_algorithms_enabled()


def test_too_late_warns_with_warn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_in_use(monkeypatch, in_use=True)
    with pytest.warns(UserWarning, match="CUDA is in use"):
        make_deterministic(warn_only=True)
    assert VARIABLE not in os.environ
    assert torch.are_deterministic_algorithms_enabled()


def test_cuda_in_use_with_the_variable_set_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ":4096:8")
    cuda_in_use(monkeypatch, in_use=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("warn_only", [False, True])
def test_the_mode_is_that_of_torch_and_goes_back(warn_only: bool) -> None:
    use_deterministic(True, warn_only=warn_only)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    use_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_compiler_is_not_imported_and_obeys_when_it_is() -> None:
    """In a process of its own for each mode: torch imports the compiler once."""
    script = (
        "import os, sys, torch\n"
        "from flambeau.recipes.setup.determinism import use_deterministic\n"
        "mode = True\n"
        "if os.fork():\n"
        "    assert os.wait()[1] == 0\n"
        "    mode = False\n"
        "use_deterministic(mode)\n"
        "assert {'torch._inductor', 'torch._dynamo'}.isdisjoint(sys.modules)\n"
        "import torch._inductor.config as config\n"
        "assert config.deterministic is mode\n"
        "use_deterministic(not mode)\n"
        "assert config.deterministic is torch.are_deterministic_algorithms_enabled() is not mode\n"
        "print(mode, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_scatter_add_on_cuda_repeats_to_the_bit() -> None:
    """In a process of its own: the variable counts only before CUDA starts."""
    script = (
        "import torch\n"
        "from flambeau.recipes.setup.determinism import make_deterministic\n"
        "make_deterministic()\n"
        "g = torch.Generator('cuda').manual_seed(0)\n"
        "x = torch.randn(1 << 20, device='cuda', generator=g)\n"
        "i = torch.randint(16, (1 << 20,), device='cuda', generator=g)\n"
        "sums = {tuple(torch.zeros(16, device='cuda').index_add(0, i, x).tolist()) for _ in range(8)}\n"
        "a = torch.randn(512, 512, device='cuda', generator=g)\n"
        "print(len(sums), torch.equal(a @ a, a @ a))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "1 True\n"
