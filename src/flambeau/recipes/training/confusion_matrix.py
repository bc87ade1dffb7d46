"""Confusion matrix: accuracy, precision, recall, F1 and IoU from one table of counts.

哪一类被当成了哪一类：由一张计数表得到准确率、精确率、召回率、F1 和 IoU。

Source: the definitions of scikit-learn's precision_recall_fscore_support with zero_division=0; mean IoU as
in PASCAL VOC segmentation (Everingham et al., "The PASCAL Visual Object Classes (VOC) Challenge", IJCV 2010,
section 4.2). Not for metrics that need scores (area under a curve, calibration).

N: samples, or any shape of pixels; C: classes.
"""

import torch
from torch import Tensor


class ConfusionMatrix:
    """Counts of (true class, predicted class), kept on the device and exact over any number of batches.

    Args:
        num_classes: C, at least 2.
        ignore_index: a target that is not counted, such as 255 at the border of an object.
        device: of the predictions and targets.

    Raises:
        ValueError: fewer than two classes.

    Example:
        >>> matrix = ConfusionMatrix(2)
        >>> matrix.update(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), torch.tensor([1, 1, 0]))
        >>> matrix.counts  # rows are the true classes, columns the predicted ones
        tensor([[0, 1],
                [1, 1]])
        >>> matrix.compute()["accuracy"]
        tensor(0.3333, dtype=torch.float64)
        >>> matrix.per_class()["precision"]
        tensor([0.0000, 0.5000], dtype=torch.float64)
    """

    def __init__(
        self,
        num_classes: int,
        *,
        ignore_index: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        self.num_classes, self._ignore_index = num_classes, ignore_index
        # The extra cell counts values outside [0, C), which are reported when the counts are read.
        self._cells = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        """The device of the counts."""
        return self._cells.device

    @property
    def counts(self) -> Tensor:
        """(C, C) int64 on the device, a copy: rows are the true classes, columns the predicted ones.

        Raises:
            ValueError: a target or predicted class was outside [0, C). This check waits for the device.
        """
        if num_outside := int(self._cells[-1]):
            raise ValueError(
                f"{num_outside} targets or predicted classes are outside [0, {self.num_classes}); "
                "what is not to count needs ignore_index"
            )
        return self._cells[:-1].view(self.num_classes, self.num_classes).clone()

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Count a batch, without waiting for the device.

        Args:
            predictions: floating-point logits or probabilities, (N, C), or (N, C, H, W) for targets (N, H,
                W); or int64 classes of the targets' shape.
            targets: int64 classes in [0, C), or ignore_index.

        Raises:
            ValueError: shapes that do not fit.
            TypeError: targets not int64.
        """
        shape = tuple(predictions.shape)
        if predictions.is_floating_point():
            fits = shape[1:2] == (self.num_classes,)
            if not fits or shape[:1] + shape[2:] != tuple(targets.shape):
                raise ValueError(
                    f"logits must be (N, {self.num_classes}, ...) for targets (N, ...), "
                    f"got {shape} and {tuple(targets.shape)}"
                )
            predictions = predictions.argmax(1)
        elif shape != tuple(targets.shape):
            raise ValueError(
                "predicted classes must have the shape of the targets, "
                f"got {shape} and {tuple(targets.shape)}"
            )
        if targets.dtype != torch.int64 or predictions.dtype != torch.int64:
            raise TypeError(f"classes must be int64, got {predictions.dtype} and {targets.dtype}")
        size = self.num_classes
        inside = (targets >= 0) & (targets < size) & (predictions >= 0) & (predictions < size)
        cells = torch.where(inside, targets * size + predictions, size * size).flatten()
        counted = torch.ones_like(cells)
        if self._ignore_index is not None:
            counted = (targets != self._ignore_index).to(torch.int64).flatten()
        # bincount would wait for the device, because its length depends on the values.
        self._cells.index_add_(0, cells, counted)

    def per_class(self) -> dict[str, Tensor]:
        """Metrics per class, (C,) on the device: float64 (float32 on MPS), counts int64.

        Returns:
            `precision`: hits / predicted; `recall`: hits / support; `f1`: their harmonic mean; `iou`:
            intersection over union; `support`, `predicted`: number of samples of, and predicted as, the
            class. A class with samples that was never predicted has precision 0. Without samples recall is
            NaN, and if it was not predicted either, all metrics are.

        Raises:
            ValueError: as `counts`.
        """
        counts = self.counts
        real = torch.float32 if counts.device.type == "mps" else torch.float64
        hits = counts.diagonal()
        support = counts.sum(1)
        predicted = counts.sum(0)
        either = support + predicted - hits  # the union
        seen = either > 0
        nan = torch.full((), torch.nan, dtype=real, device=counts.device)

        def share(part: Tensor, whole: Tensor, defined: Tensor) -> Tensor:
            return torch.where(defined, part.to(real) / whole.clamp(min=1).to(real), nan)

        return {
            "precision": share(hits, predicted, seen),
            "recall": share(hits, support, support > 0),
            "f1": share(2 * hits, support + predicted, seen),
            "iou": share(hits, either, seen),
            "support": support,
            "predicted": predicted,
        }

    def compute(self) -> dict[str, Tensor]:
        """Metrics of all classes together, 0-d on the device; NaN if nothing was counted.

        Returns:
            `accuracy`; `macro_precision`, `macro_recall` (balanced accuracy) and `macro_f1`, means over the
            classes with samples; `mean_iou`, the mean over classes with samples or predictions.

        Raises:
            ValueError: as `counts`.
        """
        figures = self.per_class()
        recall, support = figures["recall"], figures["support"]
        hits = self._cells[:-1].view(self.num_classes, self.num_classes).diagonal().sum()
        result = {"accuracy": hits.to(recall.dtype) / support.sum().to(recall.dtype)}
        for name in ("precision", "recall", "f1"):
            result[f"macro_{name}"] = figures[name].where(support > 0, torch.nan).nanmean()
        result["mean_iou"] = figures["iou"].nanmean()
        return result

    def reset(self) -> None:
        """Forget all samples."""
        self._cells.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """`cells`, (C * C + 1,) int64, a copy: the table row by row, then the number of invalid values."""
        return {"cells": self._cells.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a `state_dict` from any device."""
        self._cells.copy_(self._checked(state))

    def merge(self, state: dict[str, Tensor]) -> None:
        """Add the `state_dict` of another ConfusionMatrix of the same classes, such as another rank's."""
        self._cells.add_(self._checked(state).to(self._cells.device))

    def _checked(self, state: dict[str, Tensor]) -> Tensor:
        if state.keys() != {"cells"} or state["cells"].shape != self._cells.shape:
            shapes = {name: tuple(value.shape) for name, value in state.items()}
            raise ValueError(
                f"a state holds cells of shape {tuple(self._cells.shape)}, got {shapes}"
            )
        return state["cells"]
