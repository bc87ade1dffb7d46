"""Metrics that stay on the device: means over samples, top-k accuracy, the confusion matrix.

留在设备上的指标：按样本平均、前 k 准确率、混淆矩阵。

Source: original; counts are exact up to 2**53, the limit of float64.

Nothing here waits for the device; reading the number on the host does, once.
Not for metrics that need all scores at once (area under a curve, calibration).
"""

import torch
from torch import Tensor


class MeanOnDevice:
    """A mean over all samples, as one sum on the device and one count on the host.

    The sum is float64, for millions of bfloat16 or bool values without loss; on Apple's MPS float32, exact up
    to 2**24 samples.

    Example:
        >>> loss = MeanOnDevice()
        >>> loss.update(torch.tensor(2.0), num_samples=3)  # a mean over 3 samples
        >>> loss.update(torch.tensor([6.0]))  # values of single samples
        >>> loss.compute(), loss.num_samples
        (tensor(3., dtype=torch.float64), 4)
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sum = torch.zeros((), dtype=dtype, device=device)
        self.num_samples = 0
        """Samples since the last reset."""

    def update(self, values: Tensor, num_samples: int | None = None) -> None:
        """Count a batch.

        Args:
            values: (N,) of any real dtype or bool, one per sample; or 0-d, their mean.
            num_samples: of a 0-d mean, at least 1; not with (N,).

        Raises:
            ValueError: a 0-d mean without `num_samples`, or another shape.
        """
        values = values.detach()  # else the sum would keep the graph of every step
        if values.ndim == 1 and num_samples is None:
            num_samples = len(values)
            self._sum.add_(values.sum(dtype=self._sum.dtype))
        elif values.ndim == 0 and num_samples is not None and num_samples > 0:
            self._sum.add_(values, alpha=num_samples)
        else:
            raise ValueError(
                "update takes (N,) values, or a 0-d mean with num_samples=N above 0; "
                f"got shape {tuple(values.shape)} and num_samples={num_samples}"
            )
        self.num_samples += num_samples

    def sums(self) -> Tensor:
        """The sum and the count as one tensor; add those of all ranks, then divide.

        Returns:
            (2,) of the sum's dtype on the device, a copy.
        """
        return torch.stack([self._sum, torch.full_like(self._sum, self.num_samples)])

    def compute(self) -> Tensor:
        """The mean so far.

        Returns:
            0-d float64 (float32 on MPS) on the device.

        Raises:
            ValueError: no samples since the last reset.
        """
        if not self.num_samples:
            raise ValueError("no samples since the last reset: there is no mean")
        return self._sum / self.num_samples

    def reset(self) -> None:
        """Forget all samples."""
        self._sum.zero_()
        self.num_samples = 0

    def state_dict(self) -> dict[str, Tensor]:
        """The sum (0-d, on the device) and the count (0-d int64, on the CPU), as copies."""
        return {"sum": self._sum.clone(), "num_samples": torch.tensor(self.num_samples)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a `state_dict` from any device."""
        if state.keys() != {"sum", "num_samples"}:
            raise ValueError(f"a state has the keys sum and num_samples, got {sorted(state)}")
        self._sum.copy_(state["sum"])
        self.num_samples = int(state["num_samples"])


def correct(logits: Tensor, targets: Tensor, *, k: int = 1) -> Tensor:
    """Whether the class of each sample is among its k largest logits.

    Args:
        logits: (N, C) floating-point.
        targets: (N,) int64 classes in [0, C). For soft targets (mixup) pass the .argmax(1).
        k: in [1, C].

    Returns:
        (N,) bool; ties as by torch's argmax and topk.

    Raises:
        ValueError: shapes that do not fit, k out of range.
        TypeError: targets not int64.

    Example:
        >>> logits = torch.tensor([[0.1, 0.7, 0.2], [0.6, 0.1, 0.3]])
        >>> correct(logits, torch.tensor([1, 2])), correct(logits, torch.tensor([1, 2]), k=2)
        (tensor([ True, False]), tensor([True, True]))
    """
    _check(logits, targets)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in [1, {logits.shape[1]}], the number of classes, got {k}")
    if k == 1:
        return logits.argmax(1) == targets
    return (logits.topk(k, dim=1, sorted=False).indices == targets.unsqueeze(1)).any(1)


def confusion(logits: Tensor, targets: Tensor, *, num_classes: int) -> Tensor:
    """Count how often each class (row) was predicted as each class (column); sum this over batches.

    Args:
        logits: (N, num_classes) floating.
        targets: (N,) int64 classes.
        num_classes: C, at least 1.

    Returns:
        (C, C) int64; the diagonal is correct.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: targets not int64.

    Example:
        >>> logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
        >>> confusion(logits, torch.tensor([1, 1, 0]), num_classes=2)
        tensor([[0, 1],
                [1, 1]])
    """
    _check(logits, targets)
    if logits.shape[1] != num_classes:
        raise ValueError(f"logits must be (N, {num_classes}), got {tuple(logits.shape)}")
    cells = targets * num_classes + logits.argmax(1)
    # bincount would wait for the device, because its length depends on the values.
    counts = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=logits.device)
    return counts.index_add_(0, cells, torch.ones_like(cells)).view(num_classes, num_classes)


def _check(logits: Tensor, targets: Tensor) -> None:
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            "logits must be (N, C) and targets (N,) classes (of soft targets pass .argmax(1)), "
            f"got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
