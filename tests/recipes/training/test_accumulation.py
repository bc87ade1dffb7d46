import contextlib
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flambeau.recipes.training.accumulation import accumulate_gradients, micro_batch_weights


def problem(num_samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        x = torch.randn(num_samples, 6, dtype=torch.float64)
        return model, x, torch.randint(4, (num_samples,))


def gradients(model: nn.Module) -> list[Tensor]:
    out = [p.grad for p in model.parameters()]
    model.zero_grad()
    return out


class SavedTensors:
    """Counts the numbers that autograd keeps for the backward pass: now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> list[Tensor]:
        class Box(list):  # a list can be referenced weakly only in a subclass
            pass

        self.now += tensor.numel()
        self.most = max(self.most, self.now)
        box = Box([tensor])
        weakref.finalize(box, self._drop, tensor.numel())
        return box

    def _drop(self, count: int) -> None:
        self.now -= count

    def watch(self) -> contextlib.AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box[0])


SIZES = [(12, 4), (12, 12), (10, 4), (7, 3), (5, 8), (5, 1), (1, 1)]


@pytest.mark.parametrize(("num_samples", "size"), SIZES)
def test_loss_and_gradients_are_those_of_one_batch(num_samples, size):
    model, x, y = problem(num_samples)
    whole = F.cross_entropy(model(x), y)
    whole.backward()
    expected = gradients(model)
    seen = []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(x))
        return F.cross_entropy(model(x), y)

    loss = accumulate_gradients(loss_of, [x, y], micro_batch_size=size)
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-10, atol=1e-14)
    assert sum(seen) == num_samples
    assert set(seen[:-1]) <= {size}


@pytest.mark.parametrize("wrong", ["equal weights", "no weights"])
def test_the_usual_ways_are_not_that_gradient(wrong):
    """Dividing by the number of micro-batches is wrong when the last one is smaller."""
    model, x, y = problem(10)
    F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    for part in (slice(0, 4), slice(4, 8), slice(8, 10)):
        weight = 1 / 3 if wrong == "equal weights" else 1.0
        (weight * F.cross_entropy(model(x[part]), y[part])).backward()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(gradients(model), expected, rtol=1e-2, atol=1e-3)


def test_gradients_are_added_to_those_that_are_there():
    model, x, y = problem(6)
    for _ in range(2):
        accumulate_gradients(lambda x, y: F.cross_entropy(model(x), y), (x, y), micro_batch_size=4)
    twice = gradients(model)
    F.cross_entropy(model(x), y).backward()
    once = gradients(model)
    torch.testing.assert_close(twice, [2 * g for g in once], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("scale", [1024.0, torch.tensor(1024.0)])
def test_scale_multiplies_the_gradients_alone(scale):
    model, x, y = problem(7)
    F.cross_entropy(model(x), y).backward()
    expected = [1024 * g for g in gradients(model)]
    loss = accumulate_gradients(
        lambda x, y: F.cross_entropy(model(x), y), [x, y], micro_batch_size=3, scale=scale
    )
    torch.testing.assert_close(gradients(model), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, F.cross_entropy(model(x), y).detach(), rtol=1e-12, atol=0)


def test_scale_of_a_rank_gives_the_mean_over_all_ranks():
    """DDP averages: two ranks of 7 and 3 samples, each with N * world_size / 10."""
    model, x, y = problem(10)
    F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    ranks = []
    for rows in (slice(0, 7), slice(7, 10)):
        samples = rows.stop - rows.start
        accumulate_gradients(
            lambda x, y: F.cross_entropy(model(x), y),
            [x[rows], y[rows]],
            micro_batch_size=4,
            scale=samples * 2 / 10,
        )
        ranks.append(gradients(model))
    averaged = [(a + b) / 2 for a, b in zip(*ranks, strict=True)]
    torch.testing.assert_close(averaged, expected, rtol=1e-10, atol=1e-14)


def test_scale_from_a_gradient_scaler_is_unscaled_by_it():
    model, x, y = problem(5)
    model.float()
    x = x.float()
    F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    accumulate_gradients(
        lambda x, y: F.cross_entropy(model(x), y),
        [x, y],
        micro_batch_size=2,
        scale=scaler.scale(torch.ones(())),
    )
    scaler.unscale_(optimizer)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)


def test_gradients_travel_with_the_last_micro_batch_alone():
    model, x, y = problem(10)
    inside, log = False, []

    @contextlib.contextmanager
    def no_sync():
        nonlocal inside
        inside = True
        yield
        inside = False

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.register_hook(lambda gradient: log.append((inside, float(gradient))))
        return loss

    accumulate_gradients(loss_of, [x, y], micro_batch_size=4, no_sync=no_sync)
    # Backward of each starts with its weight, and inside of no_sync for all but the last.
    assert log == [(True, 0.4), (True, 0.4), (False, 0.2)]


def test_two_forwards_and_one_backward_keep_both_graphs():
    model, x, y = problem(32)
    halves = [(x[:16], y[:16]), (x[16:], y[16:])]
    together, one_by_one, whole = SavedTensors(), SavedTensors(), SavedTensors()
    with whole.watch():
        F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    with together.watch():
        losses = [F.cross_entropy(model(a), b) for a, b in halves]
        (sum(losses) / 2).backward()
    del losses
    torch.testing.assert_close(gradients(model), expected, rtol=1e-10, atol=1e-14)
    with one_by_one.watch():
        accumulate_gradients(lambda x, y: F.cross_entropy(model(x), y), [x, y], micro_batch_size=16)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-10, atol=1e-14)
    assert together.now == one_by_one.now == 0  # the count is right
    assert together.most >= whole.most  # both graphs at once save nothing ...
    assert one_by_one.most < 0.6 * together.most  # ... one graph at a time does


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loss_is_summed_in_float32(dtype):
    x = torch.full((1000, 1), 1.0, dtype=dtype)
    weight = torch.ones((), dtype=dtype, requires_grad=True)
    loss = accumulate_gradients(lambda x: (weight * x).mean(), [x], micro_batch_size=1)
    assert loss.dtype == torch.float32
    assert not loss.requires_grad
    torch.testing.assert_close(loss, torch.tensor(1.0), rtol=1e-4, atol=0)


def test_weights_cover_the_batch_once():
    for num_samples, size in SIZES:
        parts = micro_batch_weights(num_samples, size)
        rows = [i for part in parts for i in range(num_samples)[part.rows]]
        assert rows == list(range(num_samples))
        assert sum(part.weight for part in parts) == pytest.approx(1.0, abs=1e-12)
        for part in parts:
            assert part.weight == (part.rows.stop - part.rows.start) / num_samples


@pytest.mark.parametrize(("num_samples", "size"), [(0, 1), (3, 0), (3, -1)])
def test_numbers_below_one_are_refused(num_samples, size):
    with pytest.raises(ValueError, match=f"at least 1, got {num_samples} and {size}"):
        micro_batch_weights(num_samples, size)


@pytest.mark.parametrize("lengths", [[], [3, 2]])
def test_tensors_of_other_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="tensors of one length"):
        accumulate_gradients(torch.mean, [torch.ones(n) for n in lengths], micro_batch_size=1)


def test_losses_that_are_no_mean_are_refused():
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"return a 0-d mean, got \(2,\)"):
        accumulate_gradients(lambda x: x, [x], micro_batch_size=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_nothing_waits():
    model, x, y = problem(10)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = accumulate_gradients(
            lambda x, y: F.cross_entropy(model(x), y), [x, y], micro_batch_size=4
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.is_cuda
    torch.testing.assert_close(gradients(model), expected, rtol=1e-8, atol=1e-12)
