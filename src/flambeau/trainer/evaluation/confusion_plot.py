"""A picture of a confusion matrix; needs matplotlib, but neither a display nor a choice of backend."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from flambeau.optional_packages import extra
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.trainer.evaluation.predictions_file import refuse_existing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# By eye, on screens and on paper:
_NUMBERED = 30  # up to so many classes the cells hold their counts
_NAMED = 120  # up to so many classes the axes hold their names, else their numbers
_CELL = {"few": 0.55, "many": 0.17}  # side of a cell, inches
_WIDEST = 20.0  # inches; 3000 pixels
_LONGEST = 24  # characters of a name

_SUFFIXES = (".png", ".pdf", ".svg")
# For names that matplotlib's own font lacks; those that are installed are used, in this order.
_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "SimHei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Arial Unicode MS",
    "Noto Sans",
)


def check_plot(path: Path, *, force: bool, remedy: str = "force=True") -> None:
    """Refuse at once what `plot_confusion` would refuse.

    Raises:
        InputError: matplotlib is missing, another ending, or the file exists and not `force`.
    """
    extra("matplotlib", what="a picture of the confusion matrix")
    refuse_existing(path, suffixes=_SUFFIXES, force=force, remedy=remedy)


def plot_confusion(
    counts: Tensor, classes: Sequence[str], path: Path, *, force: bool = False
) -> None:
    """Draw the table: colors are shares of each row, so that rare classes are as visible as frequent ones.

    Args:
        counts: (C, C) int64 on the CPU; rows are the true classes, columns the predicted ones.
        classes: C names.
        path: NAME.png, .pdf or .svg; written whole or not at all.
        force: replace a file.

    Raises:
        InputError: as `check_plot`.
        OSError: the disk is full or failing.
    """
    check_plot(path, force=force)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fonts, names = _drawable(classes)
    few = len(classes) <= _NUMBERED
    side = min(max(2.5, len(classes) * _CELL["few" if few else "many"]), _WIDEST)
    label = 0.09 * max(map(len, names))  # inches that the longest name takes
    with rc_context({"font.family": fonts, "svg.fonttype": "path"}):
        figure = Figure(figsize=(side + label + 1.6, side + label + 1.2), layout="constrained")
        FigureCanvasAgg(figure)  # else it would be drawn by whatever was chosen elsewhere
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
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix.lower()[1:], dpi=150)
    write_file(path, picture.getvalue())


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


def _drawable(classes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Fonts, and names that they have all characters of; the class's number stands in for others."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    installed = set(font_manager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in _FONTS if name in installed)]
    known: set[int] = set()
    for name in fonts:
        known |= FT2Font(font_manager.findfont(name)).get_charmap().keys()
    names = []
    for number, name in enumerate(classes):
        short = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
        drawable = short.isprintable() and short.strip() and all(ord(c) in known for c in short)
        names.append(short if drawable else f"({number})")
    return fonts, names
