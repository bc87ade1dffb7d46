import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.recipes.training.label_smoothing import cross_entropy

N, C = 6, 5


def batch(num_classes: int = C, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(N, num_classes, generator=generator)).to(dtype)
    return logits.requires_grad_(), torch.randint(num_classes, (N,), generator=generator)


def probabilities(num_classes: int = C) -> Tensor:
    return torch.rand(N, num_classes, generator=torch.Generator().manual_seed(1)).softmax(1)


def naive(logits: Tensor, one_hot: Tensor, smoothing: float, definition: str) -> list[float]:
    """The loss of each sample, from the words of the definition, in Python's floats."""
    losses = []
    for row, target in zip(logits.tolist(), one_hot.tolist(), strict=True):
        log_sum = math.log(sum(math.exp(x) for x in row))
        loss = 0.0
        for wanted, share in enumerate(target):  # a soft target is a mixture of smoothed classes
            for k, x in enumerate(row):
                if definition == "uniform":
                    q = (1 - smoothing) * (k == wanted) + smoothing / len(row)
                else:
                    q = 1 - smoothing if k == wanted else smoothing / (len(row) - 1)
                loss -= share * q * (x - log_sum)
        losses.append(loss)
    return losses


@pytest.mark.parametrize("definition", ["uniform", "others"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("num_classes", [2, C])
@pytest.mark.parametrize("soft", [False, True])
def test_loss_is_that_of_the_definition(definition, smoothing, num_classes, soft):
    logits, classes = batch(num_classes)
    targets = probabilities(num_classes) if soft else classes
    one_hot = targets if soft else F.one_hot(classes, num_classes)
    expected = torch.tensor(naive(logits.detach(), one_hot, smoothing, definition))
    for reduction, want in [
        ("none", expected),
        ("sum", expected.sum()),
        ("mean", expected.mean()),
    ]:
        loss = cross_entropy(
            logits, targets, smoothing=smoothing, definition=definition, reduction=reduction
        )
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_torch_with_the_same_number(soft, dtype):
    logits, targets = batch(dtype=dtype)
    if soft:
        targets = probabilities().to(dtype)
    ours = cross_entropy(logits, targets, smoothing=0.1)
    theirs = F.cross_entropy(logits, targets, label_smoothing=0.1)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (ours_grad,) = torch.autograd.grad(ours, logits)
    (theirs_grad,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_weights_are_torchs_and_the_mean_is_over_the_samples(soft, smoothing):
    logits, targets = batch()
    if soft:
        targets = probabilities()
    weight = torch.rand(C, generator=torch.Generator().manual_seed(3)) + 0.1
    each = F.cross_entropy(
        logits, targets, weight=weight, label_smoothing=smoothing, reduction="none"
    )
    for reduction, expected in (("none", each), ("sum", each.sum()), ("mean", each.mean())):
        ours = cross_entropy(
            logits, targets, smoothing=smoothing, weight=weight, reduction=reduction
        )
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    # So a batch in two parts has the gradient of the whole.
    (whole,) = torch.autograd.grad(
        cross_entropy(logits, targets, smoothing=smoothing, weight=weight), logits
    )
    half = len(logits) // 2
    parts = [
        cross_entropy(logits[part], targets[part], smoothing=smoothing, weight=weight)
        * len(logits[part])
        / len(logits)
        for part in (slice(half), slice(half, None))
    ]
    (summed,) = torch.autograd.grad(sum(parts), logits)
    torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_classes", [2, C])
@pytest.mark.parametrize("soft", [False, True])
def test_others_is_torch_with_another_number(num_classes, soft):
    logits, targets = batch(num_classes)
    if soft:
        targets = probabilities(num_classes)
    ours = cross_entropy(logits, targets, smoothing=0.1, definition="others")
    theirs = F.cross_entropy(logits, targets, label_smoothing=0.1 * num_classes / (num_classes - 1))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (ours_grad,) = torch.autograd.grad(ours, logits)
    (theirs_grad,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-5, atol=1e-7)
    same_number = F.cross_entropy(logits, targets, label_smoothing=0.1)
    assert (ours - same_number).detach().abs() > 1e-3  # often taken for the same


def test_without_smoothing_it_is_torch_to_the_bit():
    logits, targets = batch()
    assert torch.equal(cross_entropy(logits, targets), F.cross_entropy(logits, targets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft", [False, True])
def test_low_precision_logits_give_a_float32_loss(dtype, soft):
    logits, targets = batch(dtype=dtype)
    if soft:
        targets = probabilities().to(dtype)
    loss = cross_entropy(logits, targets, smoothing=0.1)
    assert loss.dtype == torch.float32
    exact = F.cross_entropy(
        logits.detach().double(), targets.double() if soft else targets, label_smoothing=0.1
    )
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype


def test_loss_stays_float32_under_autocast():
    logits, targets = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(logits.bfloat16(), targets, smoothing=0.1)
    assert loss.dtype == torch.float32


def test_float64_probabilities_do_not_change_the_type_of_the_loss():
    logits, _ = batch()
    assert cross_entropy(logits, probabilities().double(), smoothing=0.1).dtype == torch.float32


def test_targets_stay_as_they_were():
    logits, _ = batch()
    targets = probabilities()
    before = targets.clone()
    cross_entropy(logits, targets, smoothing=0.1)
    assert torch.equal(targets, before)


@pytest.mark.parametrize("soft", [False, True])
def test_result_is_on_the_device_of_the_logits(soft):
    targets = torch.empty(N, C) if soft else torch.zeros(N, dtype=torch.int64)
    loss = cross_entropy(torch.empty(N, C, device="meta"), targets.to("meta"), smoothing=0.1)
    assert loss.device.type == "meta"
    assert loss.shape == ()


def test_others_may_spread_up_to_the_uniform_target():
    logits, targets = batch(10)
    loss = cross_entropy(logits, targets, smoothing=0.9, definition="others")
    everywhere = cross_entropy(logits, torch.full((N, 10), 0.1))
    torch.testing.assert_close(loss, everywhere, rtol=1e-6, atol=0)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, math.nan])
def test_smoothing_out_of_range_is_refused(smoothing):
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\)"):
        cross_entropy(*batch(), smoothing=smoothing)


@pytest.mark.parametrize(("num_classes", "smoothing"), [(1, 0.1), (2, 0.6), (10, 0.91)])
def test_others_that_would_teach_a_wrong_class_is_refused(num_classes, smoothing):
    with pytest.raises(ValueError, match=f"got {smoothing} and C={num_classes}"):
        cross_entropy(*batch(num_classes), smoothing=smoothing, definition="others")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("index", [-100, -1, C])
def test_a_class_that_is_not_there_is_never_left_out(smoothing, index):
    logits, targets = batch()
    targets[2] = index
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy(logits, targets, smoothing=smoothing)


@pytest.mark.parametrize(
    ("logits", "targets", "error", "message"),
    [
        (torch.zeros(N), torch.zeros(N).long(), ValueError, r"logits must be \(N, C\)"),
        (torch.zeros(N, C).long(), torch.zeros(N).long(), TypeError, "logits must be floating"),
        (torch.zeros(N, C), torch.zeros(N).int(), TypeError, r"convert classes with .long\(\)"),
        (torch.zeros(N, C), torch.zeros(N, C).long(), ValueError, r"must be \(6,\), got \(6, 5\)"),
        (torch.zeros(N, C), torch.zeros(N), ValueError, r"shape of the logits, \(6, 5\), got"),
        (torch.zeros(N, C), torch.zeros(N, C - 1), ValueError, r"got \(6, 4\)"),
    ],
)
def test_bad_tensors_are_refused(logits, targets, error, message):
    with pytest.raises(error, match=message):
        cross_entropy(logits, targets)


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="definition must be 'uniform' or 'others', got 'torch'"):
        cross_entropy(*batch(), definition="torch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reduction must be .* got 'avg'"):
        cross_entropy(*batch(), reduction="avg")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("definition", ["uniform", "others"])
def test_on_cuda_nothing_waits(definition):
    logits, targets = batch()
    there = logits.detach().cuda().requires_grad_(), targets.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = cross_entropy(*there, smoothing=0.1, definition=definition)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = cross_entropy(logits, targets, smoothing=0.1, definition=definition)
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=1e-6)
