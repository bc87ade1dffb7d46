import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.recipes.training.metrics import MeanOnDevice, confusion, correct

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "bincount", "masked_select"}


class Recorder(TorchDispatchMode):
    """The names of all operations; the ones in WAITS read a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def scores(num_samples: int = 50, num_classes: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_samples, num_classes, generator=generator)
    return logits, torch.randint(num_classes, (num_samples,), generator=generator)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64]
)
def test_mean_of_samples_is_that_of_a_loop(dtype):
    metric, values = MeanOnDevice(), []
    generator = torch.Generator().manual_seed(0)
    for size in (4, 4, 1, 3):
        batch = (4 * torch.rand(size, generator=generator) - 1).to(dtype)
        metric.update(batch)
        values += [float(x) for x in batch]
    expected = torch.tensor(math.fsum(values) / len(values), dtype=torch.float64)
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-14, atol=0)
    assert metric.num_samples == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_of_batches_weigh_as_much_as_their_samples(dtype):
    metric, total = MeanOnDevice(), 0.0
    for mean, num_samples in ((0.7, 64), (0.3, 64), (5.0, 3)):
        value = torch.tensor(mean, dtype=dtype)
        metric.update(value, num_samples=num_samples)
        total += float(value) * num_samples
    expected = torch.tensor(total / 131, dtype=torch.float64)
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-14, atol=0)
    # Not the mean of the means.
    assert abs(float(metric.compute()) - 2.0) > 1


def test_no_count_is_lost():
    """float32 stops at 2**24 and bfloat16 at 256; the sum goes on."""
    metric = MeanOnDevice()
    metric.update(torch.ones((), dtype=torch.bfloat16), num_samples=2**24)
    for _ in range(300):
        metric.update(torch.ones(1, dtype=torch.bfloat16))
    metric.update(torch.zeros(1, dtype=torch.bool))
    assert metric.sums().tolist() == [2**24 + 300, 2**24 + 301]


def test_sums_of_ranks_add_up():
    whole, ranks = MeanOnDevice(), [MeanOnDevice(), MeanOnDevice()]
    for i, values in enumerate((torch.rand(3), torch.rand(4), torch.rand(1))):
        whole.update(values)
        ranks[i % 2].update(values)
    total = ranks[0].sums() + ranks[1].sums()  # what all_reduce does
    torch.testing.assert_close(total[0] / total[1], whole.compute(), rtol=1e-14, atol=0)
    before = whole.sums()
    before.zero_()  # a copy
    assert whole.sums()[1] == 8


def test_no_graph_is_kept():
    metric, weight = MeanOnDevice(), torch.ones(2, requires_grad=True)
    metric.update((weight * 2).mean(), num_samples=2)
    metric.update(weight * 3)
    assert not metric.compute().requires_grad
    assert metric.compute() == 2.5


def test_reset_forgets():
    metric = MeanOnDevice()
    metric.update(torch.tensor([1.0, 2.0]))
    metric.reset()
    with pytest.raises(ValueError, match="no samples since the last reset"):
        metric.compute()
    metric.update(torch.tensor([5.0]))
    assert metric.compute() == 5


def test_state_goes_on_to_the_bit(tmp_path):
    batches = [torch.rand(5, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    through, first, second = MeanOnDevice(), MeanOnDevice(), MeanOnDevice()
    for batch in batches:
        through.update(batch)
    for batch in batches[:3]:
        first.update(batch)
    state = first.state_dict()
    first.update(torch.ones(1))  # the state is a copy
    torch.save(state, tmp_path / "state.pt")
    second.update(torch.ones(9))  # what is loaded replaces all
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for batch in batches[3:]:
        second.update(batch)
    assert torch.equal(through.compute(), second.compute())
    assert second.num_samples == 30


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"keys sum and num_samples, got \['step'\]"):
        MeanOnDevice().load_state_dict({"step": torch.tensor(1)})


@pytest.mark.parametrize(
    ("values", "num_samples"),
    [
        (torch.tensor(1.0), None),
        (torch.tensor(1.0), 0),
        (torch.ones(3), 3),
        (torch.ones(3, 2), None),
    ],
)
def test_an_unclear_update_is_refused(values, num_samples):
    metric = MeanOnDevice()
    with pytest.raises(ValueError, match="update takes"):
        metric.update(values, num_samples)
    assert metric.sums().tolist() == [0, 0]


def test_update_in_inference_mode_and_out_of_it():
    metric = MeanOnDevice()
    with torch.inference_mode():
        metric.update(torch.tensor([1.0, 0.0]))
    metric.update(torch.tensor([1.0, 1.0]))
    assert metric.compute() == 0.75


@pytest.mark.parametrize("k", [1, 2, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correct_is_that_of_a_loop(k, dtype):
    logits, targets = scores()
    # Distinct in bfloat16 too: which of equal logits comes first is torch's choice.
    logits = logits.argsort(1).to(dtype)
    expected = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        ranking = sorted(range(len(row)), key=lambda c: -row[c])
        expected.append(target in ranking[:k])
    result = correct(logits, targets, k=k)
    assert result.dtype == torch.bool
    assert result.tolist() == expected
    assert len(set(expected)) == (1 if k == 7 else 2)


def test_a_model_that_says_nothing_is_not_right():
    """All logits alike: k of C classes are right, not all of them."""
    targets = torch.arange(10)
    for k in (1, 3):
        assert correct(torch.zeros(10, 10), targets, k=k).sum() == k


def test_confusion_is_that_of_a_loop():
    logits, targets = scores()
    expected = [[0] * 7 for _ in range(7)]
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        expected[target][row.index(max(row))] += 1
    result = confusion(logits, targets, num_classes=7)
    assert result.dtype == torch.int64
    assert result.tolist() == expected
    assert result.diagonal().sum() == correct(logits, targets).sum()
    assert result.tolist() != result.T.tolist()


def test_confusion_of_batches_adds_up_and_may_be_empty():
    logits, targets = scores()
    parts = sum(
        confusion(logits[rows], targets[rows], num_classes=7)
        for rows in (slice(0, 20), slice(20, 20), slice(20, 50))
    )
    assert torch.equal(parts, confusion(logits, targets, num_classes=7))


def test_nothing_is_read_on_the_host():
    logits, targets = scores()
    metric, loss = MeanOnDevice(), torch.tensor(1.0)
    with Recorder() as recorder:
        metric.update(loss, num_samples=50)
        metric.update(correct(logits, targets))
        metric.update(correct(logits, targets, k=3))
        confusion(logits, targets, num_classes=7)
        metric.compute()
        metric.sums()
        metric.reset()
    assert "index_add_" in recorder.names  # it does record
    assert not recorder.names & WAITS


def test_results_are_on_the_device_of_the_input():
    logits = torch.empty(5, 3, device="meta")
    targets = torch.empty(5, dtype=torch.int64, device="meta")
    metric = MeanOnDevice("meta")
    metric.update(correct(logits, targets))
    for result in (
        metric.compute(),
        metric.sums(),
        correct(logits, targets, k=2),
        confusion(logits, targets, num_classes=3),
    ):
        assert result.device.type == "meta"


@pytest.mark.parametrize("function", [correct, lambda *x: confusion(*x, num_classes=3)])
@pytest.mark.parametrize(
    ("logits", "targets", "error", "message"),
    [
        (torch.zeros(4), torch.zeros(4).long(), ValueError, r"logits must be \(N, C\)"),
        (torch.zeros(4, 3), torch.zeros(3).long(), ValueError, r"got \(4, 3\) and \(3,\)"),
        (torch.zeros(4, 3), torch.zeros(4, 3), ValueError, r"pass .argmax\(1\)"),
        (torch.zeros(4, 3), torch.zeros(4).int(), TypeError, "targets must be int64"),
    ],
)
def test_bad_scores_are_refused(function, logits, targets, error, message):
    with pytest.raises(error, match=message):
        function(logits, targets)


@pytest.mark.parametrize("k", [0, 8])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(ValueError, match=rf"k must be in \[1, 7\], .* got {k}"):
        correct(*scores(), k=k)


def test_classes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"logits must be \(N, 5\), got \(50, 7\)"):
        confusion(*scores(), num_classes=5)
    logits, targets = scores()
    with pytest.raises((IndexError, RuntimeError)):
        confusion(logits, targets + 7, num_classes=7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_nothing_waits():
    logits, targets = scores()
    there = logits.cuda(), targets.cuda()
    metric, loss = MeanOnDevice("cuda"), torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        metric.update(correct(*there))
        metric.update(correct(*there, k=3))
        metric.update(loss, num_samples=1)
        matrix = confusion(*there, num_classes=7)
        mean = metric.compute()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(matrix.cpu(), confusion(logits, targets, num_classes=7))
    hits = correct(logits, targets).sum() + correct(logits, targets, k=3).sum() + 1
    torch.testing.assert_close(mean.cpu(), hits / 101, rtol=1e-6, atol=0, check_dtype=False)
