import io
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flambeau.recipes.setup.seeding import rng_state, seed_everything, set_rng_state

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(autouse=True)
def generators_are_put_back() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def draw() -> list[Any]:
    """Odd numbers of gaussians, so that each generator uses and leaves a cached one."""
    return [
        torch.rand(3).tolist(),
        torch.randn(1, dtype=torch.float64).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.random(3).tolist(),
        np.random.standard_normal(1).tolist(),
        int(np.random.randint(1 << 30)),
    ]


def test_same_seed_same_draws_of_every_generator() -> None:
    seed_everything(11)
    first = draw()
    torch.rand(5), random.random(), np.random.random(2)
    seed_everything(11)
    second = draw()
    assert first == second
    seed_everything(12)
    other = draw()
    assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))


def test_streams_are_those_of_the_libraries_own_seeding() -> None:
    seed_everything(1029)
    drawn = draw()
    torch.manual_seed(1029)
    random.seed(1029)
    np.random.seed(1029)
    assert drawn == draw()


@pytest.mark.parametrize("seed", [1 << 32, (1 << 63) + 5, (1 << 64) - 1])
def test_large_seeds(seed: int) -> None:
    seed_everything(seed)
    drawn = draw()
    seed_everything(seed ^ 1)
    assert all(mine != theirs for mine, theirs in zip(drawn, draw(), strict=True))
    seed_everything(seed ^ 1 << 40)
    same = [mine == theirs for mine, theirs in zip(drawn, draw(), strict=True)]
    # As documented: the high bits count, but not in torch's generator on the CPU.
    assert same == [True, True, False, False, False, False, False]


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"seed must be in \[0, 2\*\*64\), got {seed}"):
        seed_everything(seed)


def test_seed_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError, match="seed must be an int, got float"):
        seed_everything(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("gaussians", [0, 1, 2, 3])
def test_state_through_a_file_continues_to_the_bit(gaussians: int) -> None:
    """With an odd number drawn, `random` and NumPy each hold a cached gaussian."""
    seed_everything(3)
    for _ in range(gaussians):
        random.gauss(0, 1)
        np.random.standard_normal()
        torch.randn(1, dtype=torch.float64)
    assert (random.getstate()[2] is not None) == (gaussians % 2 == 1)
    state = through_a_file(rng_state())
    expected = draw()
    seed_everything(99)
    draw()
    set_rng_state(state)
    assert draw() == expected
    set_rng_state(state)  # reading a state does not use it up
    assert draw() == expected


def test_taking_the_state_draws_nothing() -> None:
    seed_everything(5)
    expected = draw()
    seed_everything(5)
    rng_state()
    assert draw() == expected


def test_state_holds_plain_data_only() -> None:
    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            for part in value:
                yield from leaves(part)
        else:
            yield value

    random.gauss(0, 1)
    kinds = {type(leaf) for leaf in leaves(rng_state())}
    assert kinds <= {torch.Tensor, int, float, str, type(None)}
    assert {torch.Tensor, int, float, str} <= kinds


def test_state_stays_on_the_cpu_under_another_default_device() -> None:
    with torch.device("meta"):
        state = rng_state()
    assert state["python"][1].device.type == state["numpy"][1].device.type == "cpu"


def test_a_state_without_numpy_leaves_numpy_alone() -> None:
    seed_everything(1)
    state = rng_state() | {"numpy": None}
    np.random.seed(77)
    set_rng_state(state)
    mine = np.random.random()
    np.random.seed(77)
    assert mine == np.random.random()


def test_numpy_state_without_numpy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    state = rng_state()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numpy", None)
        assert rng_state()["numpy"] is None
        before = torch.get_rng_state()
        torch.rand(1)
        with pytest.raises(ImportError, match="pip install numpy"):
            set_rng_state(state)
        assert not torch.equal(torch.get_rng_state(), before)  # refused before anything was set
        seed_everything(0)  # does without


def test_foreign_dict_is_refused() -> None:
    with pytest.raises(ValueError, match="pass what rng_state"):
        set_rng_state({"torch": torch.get_rng_state()})


def test_more_devices_than_here_are_refused() -> None:
    state = rng_state()
    state["cuda"] = [state["torch"]] * (torch.cuda.device_count() + 1)
    with pytest.raises(ValueError, match="shorten state"):
        set_rng_state(state)


def test_another_numpy_bit_generator_is_refused() -> None:
    mine = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(RuntimeError, match="generator is PCG64, only MT19937 can be saved"):
            rng_state()
    finally:
        np.random.set_bit_generator(mine)


def test_hash_seed_of_a_running_process_cannot_be_changed() -> None:
    """Why `seed_everything` leaves PYTHONHASHSEED alone."""
    script = (
        "import os\n"
        "before = hash('abc')\n"
        "os.environ['PYTHONHASHSEED'] = '1'\n"
        "print(before == hash('abc'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


@pytest.mark.gpu
@needs_cuda
def test_cuda_generators_continue_to_the_bit() -> None:
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    torch.ones(1, device="cuda")
    seed_everything(3)
    state = through_a_file(rng_state())
    assert len(state["cuda"]) == len(devices)
    expected = [torch.randn(5, device=device) for device in devices]
    seed_everything(4)
    set_rng_state(state)
    for device, mine in zip(devices, expected, strict=True):
        torch.testing.assert_close(torch.randn(5, device=device), mine, rtol=0, atol=0)
