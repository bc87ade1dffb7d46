"""The temperature that makes probabilities as sure as they are right, measured on labelled images.

Source: Guo et al., "On calibration of modern neural networks", ICML 2017, section 4.2.
"""

from torch import Tensor
from torch.nn.functional import cross_entropy

_RANGE = (0.05, 20.0)
_STEPS = 60  # each leaves 0.62 of the interval: far below what a data set can tell


def fitted_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T at which softmax(logits / T) has the least cross-entropy.

    The cross-entropy is convex in 1 / T, so that a golden-section search finds it.

    Args:
        logits: (N, K) float.
        labels: (N,) int64.

    Returns:
        T from 0.05 to 20; above 1 where the model is too sure of itself.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 0.0]] * 4)
        >>> round(fitted_temperature(logits, torch.tensor([0, 0, 0, 1])), 3)  # 2 / T = log 3
        1.82
    """
    logits = logits.double()

    def loss(inverse: float) -> float:
        return float(cross_entropy(logits * inverse, labels))

    low = 1 / _RANGE[1]
    high = 1 / _RANGE[0]
    golden = (5**0.5 - 1) / 2
    for _ in range(_STEPS):
        left = high - golden * (high - low)
        right = low + golden * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return 2 / (low + high)
