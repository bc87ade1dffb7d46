"""Operations of three steps, by torch's profiler, and what other programs on the CPU do to their times."""

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
        if not operations.goes_on():
            return operations.found(None)


def test_operations_are_counted_per_step() -> None:
    found = found_in(30, 8)
    assert found["count"] > 30
    assert 0 < found["small_s"] <= found["seconds"] < 1
    assert found["device_s"] == 0


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
        operations.goes_on()
    events[1].record()
    torch.cuda.synchronize()
    found = operations.found(None)["device_s"]
    products = events[0].elapsed_time(events[1]) / 1000 / 3
    assert 0.3 * products < found < 0.99 * products
