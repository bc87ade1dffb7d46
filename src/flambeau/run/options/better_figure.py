"""Whether more or less of a figure is better, by the words of its name."""

import re
from typing import Literal

DEFAULT_BEST = "val_accuracy"
"""The default figure that chooses the best checkpoint."""
# Words in the name of a metric.
_LOWER_IS_BETTER = {
    "loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "mape", "nll", "bce", "wer", "cer",
    "fid", "lpips", "kl", "entropy", "divergence", "distance", "brier", "ece", "regret", "negative",
}  # fmt: skip
# 'f', 'r' and 'top' are from f1, r2 and top5.
_HIGHER_IS_BETTER = {
    "accuracy", "acc", "top", "correct", "auc", "auroc", "precision", "recall", "sensitivity", "specificity",
    "f", "r", "spearman", "map", "iou", "miou", "dice", "jaccard", "bleu", "rouge", "psnr", "ssim", "score",
    "kappa", "mcc", "correlation", "likelihood", "reward",
}  # fmt: skip


def better_by_name(figure: str) -> Literal["max", "min"] | None:
    """Whether more or less of a figure is better, by the words of its name, if they say it."""
    words = set(re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", figure).lower()))
    low = not words.isdisjoint(_LOWER_IS_BETTER)
    high = not words.isdisjoint(_HIGHER_IS_BETTER)
    return ("min" if low else "max") if low != high else None
