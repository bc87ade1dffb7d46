"""A picture of a confusion matrix."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from flambeau.trainer.evaluation.plot_file import LONGEST, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By eye, on screens and on paper:
_NUMBERED = 30  # up to so many classes the cells hold their counts
_NAMED = 120  # up to so many classes the axes hold their names, else their numbers
_CELL = {"few": 0.55, "many": 0.17}  # side of a cell, inches
_WIDEST = 20.0  # inches; 3000 pixels


def plot_confusion(
    counts: Tensor, classes: Sequence[str], path: Path, *, force: bool = False
) -> None:
    """Draw (C, C) counts on the CPU as NAME.png, .pdf or .svg: rows are the true classes.

    Colors are shares of each row, so that rare classes are as visible as frequent ones.
    """
    few = len(classes) <= _NUMBERED
    side = min(max(2.5, len(classes) * _CELL["few" if few else "many"]), _WIDEST)
    label = 0.09 * max(
        len(name[:LONGEST]) for name in classes
    )  # inches that the longest name takes

    def fill(figure: "Figure", names: list[str]) -> None:
        axes = figure.add_subplot()
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        image = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
        figure.colorbar(image, ax=axes, label="share of the images of the class", shrink=0.8)
        axes.set(xlabel="predicted", ylabel="label")
        if len(names) <= _NAMED:
            places = range(len(names))
            size = 9 if few else 6
            axes.set_xticks(places, names, rotation=90, fontsize=size, parse_math=False)
            axes.set_yticks(places, names, fontsize=size, parse_math=False)
        if few:
            _write_counts(axes, counts.tolist(), shares.tolist())

    draw(path, classes, (side + label + 1.6, side + label + 1.2), fill, force=force)


def _write_counts(
    axes: "Axes", counts: Sequence[Sequence[int]], shares: Sequence[Sequence[float]]
) -> None:
    longest = max(len(str(count)) for row in counts for count in row)
    size = min(9.0, 32 / longest)  # points: that many digits fit into a cell
    for y, row in enumerate(counts):
        for x, count in enumerate(row):
            if count:
                color = "white" if shares[y][x] > 0.5 else "black"
                axes.text(x, y, str(count), ha="center", va="center", color=color, fontsize=size)
