"""Changes of a model from outside: same parameters, same results to rounding, and the change in effect."""

import copy
import sys
import tracemalloc

import pytest
import torch
from torch import Tensor, nn

from flambeau.tune.watch.changes import apply_changes, change_model
from flambeau.tune.watch.loader_clock import CachedBatches
from flambeau.tune.watch.step_watch import tracer_name


class Seen(nn.Module):
    """Notes the dtype and memory format that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.was_channels_last = x.is_contiguous(memory_format=torch.channels_last)
        features = self.conv(x)
        self.dtype_inside = features.dtype
        return {"logits": self.head(features.mean((2, 3)))}


def test_autocast_runs_inside_and_gives_float32() -> None:
    model = Seen()
    x = torch.randn(2, 3, 8, 8)
    expected = copy.deepcopy(model)(x)["logits"]
    parameters = list(model.parameters())
    change_model(model, {"autocast": "bfloat16"})
    logits = model(x)["logits"]
    assert model.dtype_inside == torch.bfloat16 and logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_channels_last_keeps_the_parameters_that_an_optimizer_has() -> None:
    model = Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8, 8)
    expected = copy.deepcopy(model)(x)["logits"]
    change_model(model, {"channels_last": True})
    logits = model(x)["logits"]
    assert model.was_channels_last
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(logits, expected)
    before = model.head.weight.clone()
    logits.sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.head.weight)


class Loader:
    """Counts how often it is read."""

    def __init__(self, batches: int) -> None:
        self.count, self.read = batches, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> object:
        for number in range(self.count):
            self.read += 1
            yield [torch.full((2,), float(number)), {"id": number}]


def test_cached_batches_read_a_loader_no_more_than_asked() -> None:
    loader = Loader(5)
    cache = CachedBatches(iter, 3)
    epochs = [[batch[1]["id"] for batch in cache.batches(loader)] for _ in range(2)]
    assert epochs == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]
    assert loader.read == 3


def test_a_script_that_changes_its_batches_gets_copies() -> None:
    loader = Loader(2)
    cache = CachedBatches(iter, 2)
    sums = []
    for _ in range(4):
        for batch in cache.batches(loader):
            sums.append(batch[0].sum().item())
            batch[0] += 1
    # The kept batches are changed once, until that is seen; then never again.
    assert sums[-2:] == sums[-4:-2]


@pytest.mark.parametrize(("way", "other"), [("foreach", "fused"), ("fused", "foreach")])
def test_optimizers_are_made_in_another_way(
    way: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in vars(torch.optim).values():
        if isinstance(kind, type):
            monkeypatch.setattr(kind, "__init__", kind.__init__)  # given back after the test
    apply_changes({way: True})
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **{other: True})
    assert optimizer.defaults[way] is True
    assert not optimizer.defaults[other]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_cudnn_may_try_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    apply_changes({"cudnn_benchmark": True})
    assert torch.backends.cudnn.benchmark


def test_freed_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "flambeau.tune.watch.changes.keep_freed_memory", lambda: calls.append(1) or True
    )
    apply_changes({})
    assert calls == []
    apply_changes({"keep_freed": True})
    assert calls == [1]


def test_threads_are_limited_and_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers ask for one; a limit of two that they got instead made them fight."""
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "8")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        apply_changes({"threads": 2})
        assert torch.get_num_threads() == 1
        torch.set_num_threads(16)
        assert torch.get_num_threads() == 2
    finally:
        monkeypatch.undo()
        torch.set_num_threads(before)


def test_threads_of_workers_are_limited_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("os.register_at_fork", lambda **_: None)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    apply_changes({"worker_threads": 1})
    torch.set_num_threads(16)
    monkeypatch.setattr("flambeau.tune.watch.changes.get_worker_info", lambda: "a worker")
    torch.set_num_threads(16)
    assert asked == [16, 1]


def test_tracemalloc_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracemalloc, "start", tracemalloc.start)  # put back at the end
    tracemalloc.start()
    apply_changes({"no_tracemalloc": True})
    assert not tracemalloc.is_tracing()
    tracemalloc.start(25)
    assert not tracemalloc.is_tracing()


def test_a_tracer_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getprofile()
    for name in ("settrace", "setprofile"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # put back at the end

    def counts(*_: object) -> None: ...

    sys.setprofile(counts)
    named = tracer_name()
    sys.setprofile(before)
    apply_changes({"no_tracer": True})
    sys.setprofile(counts)
    assert named.endswith("counts") and sys.getprofile() is before
