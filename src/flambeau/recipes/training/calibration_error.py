"""Expected calibration error: the difference between a classifier's confidence and its accuracy.

期望校准误差（ECE）：分类器给出的概率与它实际答对的频率相差多少。

Source: Naeini, Cooper and Hauskrecht, "Obtaining Well Calibrated Probabilities Using Bayesian Binning", AAAI
2015; Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, section 2, equation 3, with its 15
bins of equal width. Not for few samples: with tens per bin it is above 0 for a perfect classifier too.

N: samples, C: classes, B: bins.
"""

import torch
from torch import Tensor


class CalibrationError:
    """The mean of |accuracy - confidence| over bins of confidence, weighted by their samples.

    Confidence is the largest probability. Bin b of B is (b / B, (b + 1) / B]. Sums stay on the device, in
    float64 (float32 on MPS).

    Args:
        num_bins: B, at least 1.
        device: of the logits and targets.

    Raises:
        ValueError: no bin.

    Example:
        >>> error = CalibrationError()
        >>> certain = torch.tensor([[9.0, 0.0], [9.0, 0.0]])  # of class 0, which is wrong once
        >>> error.update(certain, torch.tensor([0, 1]))
        >>> error.compute()
        tensor(0.4999, dtype=torch.float64)
    """

    def __init__(self, num_bins: int = 15, *, device: torch.device | str = "cpu") -> None:
        if num_bins < 1:
            raise ValueError(f"num_bins must be at least 1, got {num_bins}")
        device = torch.device(device)
        self._real = torch.float32 if device.type == "mps" else torch.float64
        self.num_bins = num_bins
        self._sums = torch.zeros(num_bins, 3, dtype=self._real, device=device)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch, without waiting for the device.

        Args:
            logits: (N, C) floating-point, or the .log() of probabilities.
            targets: (N,) int64 classes in [0, C).

        Raises:
            ValueError: shapes that do not fit.
            TypeError: targets are not int64.
        """
        if logits.ndim != 2 or targets.shape != logits.shape[:1]:
            raise ValueError(
                "logits must be (N, C) and targets (N,) classes, "
                f"got {tuple(logits.shape)} and {tuple(targets.shape)}"
            )
        if targets.dtype != torch.int64:
            raise TypeError(f"targets must be int64, got {targets.dtype}")
        confidence, predicted = logits.detach().to(self._real).softmax(1).max(1)
        self.update_confidence(confidence, predicted == targets)

    def update_confidence(self, confidence: Tensor, right: Tensor) -> None:
        """Count a batch from confidences instead of logits.

        Args:
            confidence: (N,) floating-point, the largest probability of each sample.
            right: (N,) bool, whether the predicted class is right.
        """
        confidence, right = confidence.to(self._real), right.to(self._real)
        bins = (confidence * self.num_bins).ceil().sub(1).clamp(0, self.num_bins - 1)
        rows = torch.stack([torch.ones_like(right), confidence, right], 1)
        # A NaN goes into the first bin and makes the result NaN.
        self._sums.index_add_(0, bins.nan_to_num(0).long(), rows)

    def per_bin(self) -> dict[str, Tensor]:
        """The data of a reliability diagram, (B,) on the device.

        Returns:
            `num_samples`, and the means `confidence` and `accuracy` of each bin: NaN for an empty one.
        """
        count, confidence, right = self._sums.unbind(1)
        return {
            "num_samples": count.clone(),
            "confidence": confidence / count,
            "accuracy": right / count,
        }

    def compute(self) -> Tensor:
        """The error, from 0 to 1, 0-d on the device; NaN if nothing was counted."""
        count, confidence, right = self._sums.unbind(1)
        return (right - confidence).abs().sum() / count.sum()

    def reset(self) -> None:
        """Forget all samples."""
        self._sums.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """`sums`, (B, 3), a copy: per bin the numbers of samples, sum of confidences, and number right."""
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a `state_dict` from any device."""
        self._sums.copy_(self._checked(state))

    def merge(self, state: dict[str, Tensor]) -> None:
        """Add the `state_dict` of another CalibrationError with equally many bins, such as another rank's."""
        self._sums.add_(self._checked(state).to(self._sums))

    def _checked(self, state: dict[str, Tensor]) -> Tensor:
        if state.keys() != {"sums"} or state["sums"].shape != self._sums.shape:
            shapes = {name: tuple(value.shape) for name, value in state.items()}
            raise ValueError(f"a state holds sums of shape {tuple(self._sums.shape)}, got {shapes}")
        return state["sums"]
