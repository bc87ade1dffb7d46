import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.recipes.training.calibration_error import CalibrationError

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "bincount", "masked_select"}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def samples(num_samples: int = 300, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(num_samples, 5, generator=generator)
    targets = torch.randint(5, (num_samples,), generator=generator)
    half = torch.rand(num_samples, generator=generator) < 0.5
    return logits.to(dtype), torch.where(half, logits.argmax(1), targets)


def naive(logits: Tensor, targets: Tensor, num_bins: int) -> float:
    """Equation 3 of Guo et al., in Python's floats."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    for row, target in zip(logits.double().softmax(1).tolist(), targets.tolist(), strict=True):
        confidence = max(row)
        for m in range(num_bins):
            if m / num_bins < confidence <= (m + 1) / num_bins:
                bins[m].append((confidence, row.index(confidence) == target))
    error = 0.0
    for held in filter(None, bins):
        accuracy = sum(right for _, right in held) / len(held)
        error += len(held) / len(targets) * abs(accuracy - sum(c for c, _ in held) / len(held))
    return error


@pytest.mark.parametrize("num_bins", [1, 2, 10, 15, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_that_of_the_paper(num_bins, dtype):
    logits, targets = samples(dtype=dtype)
    error = CalibrationError(num_bins)
    for rows in (slice(0, 100), slice(100, 100), slice(100, 300)):
        error.update(logits[rows], targets[rows])
    result = error.compute()
    assert result.dtype == torch.float64
    assert float(result) == pytest.approx(naive(logits, targets, num_bins), rel=1e-9)
    assert float(result) > 0.01


def test_probabilities_through_their_logarithm():
    """Certain and right is no error; 0.5 of two, right half of the time, is none either."""
    error = CalibrationError()
    error.update(torch.eye(4).log(), torch.arange(4))
    error.update(torch.full((6, 2), 0.5).log(), torch.tensor([0, 1, 0, 1, 0, 1]))
    assert float(error.compute()) == pytest.approx(0, abs=1e-12)
    bins = error.per_bin()
    assert bins["num_samples"].nonzero().flatten().tolist() == [7, 14]
    assert float(bins["accuracy"][7]) == 0.5
    assert bins["confidence"][0].isnan()
    error.update(torch.eye(2).log(), torch.tensor([1, 0]))  # certain and wrong
    assert float(error.compute()) == pytest.approx(2 / 6 * 6 / 12)


def test_what_is_nan_or_empty_is_nan():
    error = CalibrationError()
    assert error.compute().isnan()
    error.update(torch.full((1, 2), torch.nan), torch.tensor([0]))
    assert error.compute().isnan()


def test_parts_add_up():
    logits, targets = samples()
    whole, first, second = CalibrationError(), CalibrationError(), CalibrationError()
    whole.update(logits, targets)
    first.update(logits[:120], targets[:120])
    second.update(logits[120:], targets[120:])
    first.merge(second.state_dict())
    torch.testing.assert_close(first.compute(), whole.compute(), rtol=1e-12, atol=0)
    second.load_state_dict(whole.state_dict())
    assert torch.equal(second.compute(), whole.compute())
    second.reset()
    assert second.compute().isnan()


def test_nothing_is_read_on_the_host_and_the_device_follows():
    logits, targets = samples()
    error, meta = CalibrationError(), CalibrationError(device="meta")
    with Recorder() as recorder:
        error.update(logits.requires_grad_(), targets)
        assert not error.compute().requires_grad
    assert "index_add_" in recorder.names
    assert not recorder.names & WAITS
    meta.update(logits.to("meta"), targets.to("meta"))
    assert meta.compute().device.type == "meta"


def test_what_does_not_fit_is_refused():
    error = CalibrationError()
    with pytest.raises(ValueError, match=r"got \(4, 3\) and \(3,\)"):
        error.update(torch.zeros(4, 3), torch.zeros(3).long())
    with pytest.raises(TypeError, match="targets must be int64"):
        error.update(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        CalibrationError(0)
    for state in ({"step": torch.tensor(1)}, CalibrationError(3).state_dict()):
        with pytest.raises(ValueError, match="a state holds sums"):
            error.load_state_dict(state)
