"""The search against trying every size; real allocations that fail, under limits of the process."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.memory.batch_size_finder import (
    free_bytes,
    is_out_of_memory,
    largest_batch,
    memory_limit,
    release_memory,
)

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA and /proc")


def test_a_real_failure_of_the_allocator_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert type(caught.value) is RuntimeError  # of the CPU torch raises no class of its own
    assert is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**50)
    assert is_out_of_memory(of_numpy.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("XPU out of memory."),
        RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("could not create a primitive"),
        RuntimeError("posix_memalign failed:Cannot allocate memory (12)"),
        MemoryError(),
    ],
)
def test_what_others_say(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        ValueError("out of memory"),
        torch.distributed.DistError("out of memory"),
    ],
)
def test_what_is_none(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "sizes", [[1], [1, 2], [1, 2, 3, 5, 6, 10, 15, 30], [2**k for k in range(13)]]
)
def test_it_finds_what_trying_all_finds(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gc, "collect", lambda: 0
    )  # half a second among all that the tests have loaded
    for most in (0, *sizes):
        tried: list[int] = []

        def trial(size: int, most: int = most, tried: list[int] = tried) -> None:
            tried.append(size)
            if size > most:
                raise torch.OutOfMemoryError

        found = largest_batch(trial, sizes[::-1], limit_bytes=2**40)
        assert found == max((size for size in sizes if size <= most), default=None)
        assert tried[0] == sizes[-1]  # which fits in most cases
        assert len(tried) == len(set(tried)) <= 2 + len(sizes).bit_length()


def test_other_errors_pass() -> None:
    def trial(size: int) -> None:
        raise RuntimeError(f"no model takes {size}")

    with pytest.raises(RuntimeError, match="no model takes 8"):
        largest_batch(trial, [8, 4], limit_bytes=2**40)


@pytest.mark.parametrize(("sizes", "headroom"), [([], 0.1), ([4], 1.0), ([4], -0.1)])
def test_refused(sizes: list[int], headroom: float) -> None:
    with pytest.raises(ValueError, match="sizes must not be empty"):
        largest_batch(lambda size: None, sizes, headroom=headroom)


def test_what_a_failed_pass_held_is_freed() -> None:
    held: list[weakref.ref[Tensor]] = []

    def forward() -> None:
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        torch.empty(2**50)

    try:
        try:
            forward()
        except RuntimeError:
            raise MemoryError from None
    except MemoryError as error:
        assert held[0]() is not None
        release_memory(error)
        assert held[0]() is None


@needs_linux
def test_a_limit_holds_and_goes() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory_limit(2**26):
        torch.empty(2**22, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(2**32, dtype=torch.uint8)  # more than the heap has kept free
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.empty(2**32, dtype=torch.uint8)


@needs_linux
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_what_is_free_is_what_a_limit_leaves(
    kind: str, run_python: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    code = f"""
import resource, torch
from flambeau.recipes.memory import batch_size_finder as finder
assert finder.free_bytes() > 2**28
used = finder._size_in("/proc/self/status", {"VmSize" if kind == "RLIMIT_AS" else "VmData"!r})
resource.setrlimit(resource.{kind}, (used + 2**28, resource.RLIM_INFINITY))
assert 2**27 < finder.free_bytes() <= 2**28
torch.empty(finder.free_bytes() - 2**24, dtype=torch.uint8)
try:
    torch.empty(finder.free_bytes() + 2**24, dtype=torch.uint8)
except RuntimeError as error:
    assert finder.is_out_of_memory(error)
else:
    raise AssertionError
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@needs_linux
def test_training_steps_on_a_cpu(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    """1 MiB per sample and layer, in 96 MiB: what is found fits, and twice as much does not."""
    code = """
import torch
from torch import nn
from flambeau.recipes.memory.batch_size_finder import largest_batch, memory_limit
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 2**18), nn.Tanh(), nn.Linear(2**18, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def trial(size):
    for _ in range(2):
        model(torch.zeros(size, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

trial(1)  # its state is there
found = largest_batch(trial, [2**k for k in range(10)], headroom=0.0, limit_bytes=96 * 2**20)
assert 8 <= found <= 32, found
with memory_limit(96 * 2**20):
    trial(found)
less = largest_batch(trial, [2**k for k in range(10)], headroom=0.5, limit_bytes=96 * 2**20)
assert less < found, (less, found)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_training_steps_on_a_gpu() -> None:
    """What is found leaves a tenth of the device free."""
    device, total = torch.device("cuda"), torch.cuda.mem_get_info()[1]
    model = nn.Sequential(nn.Linear(8, 2**22), nn.Tanh(), nn.Linear(2**22, 2)).to(device)

    def trial(size: int) -> Any:
        model(torch.zeros(size, 8, device=device)).sum().backward()

    sizes = [2**k for k in range(20)]
    found = largest_batch(trial, sizes, device=device)
    assert found is not None
    torch.cuda.reset_peak_memory_stats()
    trial(found)
    assert torch.cuda.max_memory_allocated() < 0.9 * total
    with pytest.raises(torch.OutOfMemoryError):
        trial(4 * found)
    assert free_bytes() > 0
