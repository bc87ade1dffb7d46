"""The file of a picture that matplotlib draws; needs neither a display nor a choice of backend."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flambeau.optional_packages import extra
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.trainer.evaluation.predictions_file import refuse_existing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 24  # characters of a name
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
    """Refuse at once what `draw` would: no matplotlib, another ending, an existing file without `force`."""
    extra("matplotlib", what="a picture of an evaluation")
    refuse_existing(path, suffixes=_SUFFIXES, force=force, remedy=remedy)


def draw(
    path: Path,
    names: Sequence[str],
    size: tuple[float, float],
    fill: "Callable[[Figure, list[str]], None]",
    *,
    force: bool = False,
) -> None:
    """Draw a picture as NAME.png, .pdf or .svg, of a size in inches, whole or not at all.

    `fill` draws into a figure, with `names` as installed fonts can show them.
    """
    check_plot(path, force=force)
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fonts, drawable = _drawable(names)
    with rc_context({"font.family": fonts, "svg.fonttype": "path"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)  # else it would be drawn by whatever was chosen elsewhere
        fill(figure, drawable)
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix.lower()[1:], dpi=150)
    write_file(path, picture.getvalue())


def _drawable(all_names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Fonts, and names that they have all characters of; a number stands in for others."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    installed = set(font_manager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in _FONTS if name in installed)]
    known: set[int] = set()
    for name in fonts:
        known |= FT2Font(font_manager.findfont(name)).get_charmap().keys()
    names = []
    for number, name in enumerate(all_names):
        short = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
        drawable = short.isprintable() and short.strip() and all(ord(c) in known for c in short)
        names.append(short if drawable else f"({number})")
    return fonts, names
