"""Operations of three steps, by torch's profiler, and what other programs on the CPU do to their times."""

import torch

from flambeau.tune.watch.operations import Operations, undisturbed


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
