"""Pictures of several labels and of numbers: precision and recall, and predicted against given numbers."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from flambeau.trainer.evaluation.label_figures import average_precisions, precision_recall
from flambeau.trainer.evaluation.plot_file import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CURVES = 10  # drawn; of more, readers could not tell the colors apart
_PANELS = 12  # columns of numbers; a picture of more is no longer read
_POINTS = 5000  # images; of more the density is drawn


def plot_precision_recall(
    probabilities: Tensor,
    labels: Tensor,
    thresholds: Tensor,
    names: Sequence[str],
    path: Path,
    *,
    force: bool = False,
) -> None:
    """Draw each label's curve, with a dot at its threshold; of many those with the lowest precision.

    Probabilities and labels are (N, K), thresholds (K,); errors as of `draw`.
    """
    precisions = average_precisions(probabilities, labels).tolist()
    known = [at for at, value in enumerate(precisions) if not math.isnan(value)]
    shown = sorted(sorted(known, key=precisions.__getitem__)[:_CURVES])
    chosen = [names[at] for at in shown]

    def fill(figure: "Figure", drawable: list[str]) -> None:
        axes = figure.add_subplot()
        lines = []
        texts = []
        for at, name in zip(shown, drawable, strict=True):
            recall, precision, scores = precision_recall(probabilities[:, at], labels[:, at])
            lines += axes.step(recall, precision, where="pre")
            texts.append(f"{name} (AP {precisions[at]:.3f})".replace("$", r"\$"))
            reached = int((scores >= float(thresholds[at])).sum())
            if reached:
                place = recall[reached - 1], precision[reached - 1]
                axes.plot(*place, marker="o", color=lines[-1].get_color())
        axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
        several = f"the {len(shown)} labels with the lowest AP, of {len(known)}"
        axes.set_title(several if len(shown) < len(known) else "dots: at the threshold of a label")
        if shown:  # not by their own texts: matplotlib hides those that begin with _
            axes.legend(lines, texts, loc="lower left", fontsize=8)

    draw(path, chosen, (6.4, 5.6), fill, force=force)


def plot_numbers(
    given: Tensor, predicted: Tensor, names: Sequence[str], path: Path, *, force: bool = False
) -> None:
    """Draw predicted against given numbers, (N, K), NaN: missing, a panel per column; errors as of `draw`."""
    shown = names[:_PANELS]
    across = min(len(shown), 4)
    down = -(-len(shown) // across)

    def fill(figure: "Figure", drawable: list[str]) -> None:
        for at, name in enumerate(drawable):
            axes = figure.add_subplot(down, across, at + 1)
            known = given[:, at].isfinite()
            x = given[known, at].double().numpy()
            y = predicted[known, at].double().numpy()
            if len(x) > _POINTS:
                axes.hexbin(x, y, gridsize=50, bins="log", mincnt=1, cmap="Blues")
            else:
                axes.scatter(x, y, s=9, alpha=0.5, linewidths=0)
            if len(x):
                low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
                axes.plot([low, high], [low, high], color="gray", linewidth=1, linestyle="--")
            axes.set_title(name, parse_math=False)
            axes.set(xlabel="given", ylabel="predicted")
        if len(names) > len(shown):
            figure.suptitle(f"the first {len(shown)} of {len(names)} columns")

    draw(path, shown, (3.4 * across + 0.6, 3.3 * down + 0.4), fill, force=force)
