"""Exact area under the ROC curve: how often a positive sample scores higher than a negative one.

ROC 曲线下面积，精确值：正样本的得分高于负样本的频率。

Source: Hanley and McNeil, "The meaning and use of the area under a ROC curve", Radiology 1982: the area is
the Mann-Whitney statistic, ties counted as one half. With more than two classes, each class against the rest
(Provost and Domingos, 2000), averaged without weights. Not for data whose scores do not fit into memory.

N: samples, C: classes.
"""

import torch
from torch import Tensor


class AUROC:
    """The area for two classes, or the mean of the areas of each class against all others.

    Computed from all sorted scores, without bins: the device keeps 4 bytes per sample for two classes, else 4
    C. States are merged by concatenation.

    Example:
        >>> area = AUROC()
        >>> area.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        >>> area.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Keep a batch, without waiting for the device.

        Args:
            logits: floating-point: (N, C), C at least 2, or the .log() of probabilities; or (N,) scores,
                higher for class 1.
            targets: (N,) int64 classes in [0, C); 0 or 1 for (N,) scores.

        Raises:
            ValueError: shapes that do not fit, or another C than before.
            TypeError: targets are not int64.
        """
        if (
            logits.ndim not in (1, 2)
            or targets.shape != logits.shape[:1]
            or logits.shape[1:] == (1,)
        ):
            raise ValueError(
                "logits must be (N, C), C at least 2, or (N,) scores, and targets (N,) classes, "
                f"got {tuple(logits.shape)} and {tuple(targets.shape)}"
            )
        if targets.dtype != torch.int64:
            raise TypeError(f"targets must be int64, got {targets.dtype}")
        logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        if logits.shape[1:] == (2,):
            # In the same order as the probabilities, but not rounded to 0 and 1.
            logits = logits[:, 1] - logits[:, 0]
        elif logits.ndim == 2:
            logits = logits.log_softmax(1)
        if self._scores and self._scores[0].shape[1:] != logits.shape[1:]:
            raise ValueError("all batches must have as many classes as the first one")
        self._scores.append(logits.clone())
        self._targets.append(targets.clone())

    def per_class(self) -> Tensor:
        """The area of each class against the rest, (C,) float64; (1,) for two classes.

        NaN if all samples or none are of the class. It waits for the device.

        Raises:
            ValueError: nothing was counted, or a target is not a class.
        """
        if not self._scores:
            raise ValueError("no samples since the last reset: there is no area")
        scores, targets = torch.cat(self._scores), torch.cat(self._targets)
        num_classes = scores.shape[1] if scores.ndim == 2 else 2
        if bool(((targets < 0) | (targets >= num_classes)).any()):
            raise ValueError(f"targets must be classes in [0, {num_classes})")
        if scores.ndim == 1:
            return torch.stack([_area(scores, targets == 1)])
        return torch.stack([_area(scores[:, c], targets == c) for c in range(num_classes)])

    def compute(self) -> Tensor:
        """The area, or the mean over classes that have one, 0-d float64 (float32 on MPS); NaN if none has.

        Raises:
            ValueError: as `per_class`.
        """
        return self.per_class().nanmean()

    def reset(self) -> None:
        """Forget all samples."""
        self._scores.clear()
        self._targets.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """`scores` and `targets` of all samples so far; empty if there are none."""
        if not self._scores:
            return {}
        return {"scores": torch.cat(self._scores), "targets": torch.cat(self._targets)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a `state_dict`."""
        self.reset()
        self.merge(state)

    def merge(self, state: dict[str, Tensor]) -> None:
        """Add the `state_dict` of another AUROC, such as another rank's."""
        if not state:
            return
        if state.keys() != {"scores", "targets"}:
            raise ValueError(f"a state has the keys scores and targets, got {sorted(state)}")
        scores, targets = state["scores"], state["targets"]
        if self._scores:
            scores, targets = scores.to(self._scores[0].device), targets.to(self._scores[0].device)
            if scores.shape[1:] != self._scores[0].shape[1:]:
                raise ValueError("both must be of as many classes")
        self._scores.append(scores.clone())
        self._targets.append(targets.clone())


def _area(scores: Tensor, positive: Tensor) -> Tensor:
    """Mann-Whitney: the fraction of pairs of a positive and a negative sample that are in order."""
    real = torch.float32 if scores.device.type == "mps" else torch.float64
    positives = scores[positive].contiguous()
    negatives = scores[~positive].sort().values
    below = torch.searchsorted(negatives, positives)
    not_above = torch.searchsorted(negatives, positives, right=True)
    in_order = (below + not_above).sum().to(real) / 2
    num_pairs = len(positives) * len(negatives)
    area = in_order / num_pairs if num_pairs else in_order * torch.nan
    return torch.where(scores.isnan().any(), torch.nan, area)
