"""Operations of three steps, by torch's profiler, and what other programs on the CPU do to their times."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flambeau.tune.watch.operations import Operations, covered, undisturbed


def found_in(layers: int, width: int) -> dict[str, float]:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    x = torch.ones(4, width)
    operations = Operations()
    operations.start()
    while True:
        model(x).sum().backward()
        if not operations.count_step():
            return operations.result(None)


def test_operations_are_counted_per_step() -> None:
    found = found_in(30, 8)
    assert found["count"] > 30
    assert 0 < found["small_s"] <= found["seconds"] < 1
    assert found["device_s"] == 0 and 0 < found["memory_bound"] < 1


def test_a_call_that_lost_its_cpu_once_counts_as_in_the_other_steps() -> None:
    """Two calls, a short and a long one, in three steps; in the second step the short one was interrupted."""
    assert undisturbed([2.0, 50.0, 4000.0, 52.0, 3.0, 49.0], 3) == [2.0, 49.0]
    unequal = [1.0, 2.0, 3.0, 6.0, 3.0]
    assert undisturbed(unequal, 3) == [3.0, 3.0]
    assert undisturbed([], 3) == []


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0), ([(1, 2)], 1), ([(3, 4), (1, 2)], 2), ([(0, 10), (2, 3), (4, 5)], 10),
        ([(0, 2), (1, 3), (5, 6), (5, 6)], 4),
    ],
)  # fmt: skip
def test_streams_that_compute_at_the_same_time_count_once(
    intervals: list[tuple[float, float]], expected: float
) -> None:
    assert covered(intervals) == expected


def test_on_a_gpu_kernels_count_and_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the kernels' time is batch norm and a sum of torch.compile's; NCCL's computes nothing."""

    def event(name: str, device: str, start: float, end: float, *kernels: tuple[str, float]) -> Any:
        return SimpleNamespace(
            name=name, device_type=SimpleNamespace(name=device), self_cpu_time_total=1.0,
            time_range=SimpleNamespace(start=start, end=end), is_user_annotation=False,
            kernels=[SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels],
        )  # fmt: skip

    copy = "Memcpy HtoD (Pageable -> Device)"
    events = [
        event("aten::copy_", "CPU", 0, 1, (copy, 600.0)),
        event("aten::convolution", "CPU", 1, 2, ("conv", 300.0)),
        event("aten::batch_norm", "CPU", 2, 3, ("norm", 300.0)),
        event(copy, "CUDA", 0, 600), event("conv", "CUDA", 600, 900), event("norm", "CUDA", 900, 1200),
        event("ncclDevKernel_AllReduce_Sum_f32", "CUDA", 1200, 1500),
        event("triton_poi_fused_add_0", "CUDA", 1500, 1700), event("triton_tem_mm_1", "CUDA", 1700, 1900),
    ]  # fmt: skip
    operations = Operations()
    seen = SimpleNamespace(stop=lambda: None, events=lambda: events)
    monkeypatch.setattr(operations, "_profile", seen)
    found = operations.result(None)
    assert found["memory_bound"] == 0.5
    assert found["device_s"] == pytest.approx(1000e-6 / 3)
    assert found["active_s"] == pytest.approx(1900e-6 / 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_gpu_computes_is_not_what_is_copied_to_it() -> None:
    """Three products of 30 to 150 ms of its time each, and copies of 64 MiB."""
    x, big = torch.randn(8192, 8192), torch.randn(8192, 8192, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    (big @ big).sum()
    operations = Operations()
    operations.start()
    events[0].record()
    for _ in range(3):
        x[:2048].cuda()
        big @ big
        operations.count_step()
    events[1].record()
    torch.cuda.synchronize()
    found = operations.result(None)
    products = events[0].elapsed_time(events[1]) / 1000 / 3
    assert 0.3 * products < found["device_s"] < 0.99 * products
    assert found["memory_bound"] < 0.1  # of kernels, and of no copy
