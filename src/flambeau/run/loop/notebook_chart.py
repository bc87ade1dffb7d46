"""A chart in a notebook's cell that grows while a run trains."""

import contextlib
import functools
import importlib.util
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.terminal import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of a line of metrics.jsonl, what is no figure of the model.
_NOT_DRAWN = {
    "step",
    "epoch",
    "learning_rate",
    "learning_rates",
    "images_per_s",
    "data_wait",
    "loss_scale",
}
_MOST_POINTS = 2000  # per curve; more than a chart has columns


class NotebookChart:
    """The figures of metrics.jsonl by epoch: losses left, all others right.

    Args:
    """

    def __init__(self, *, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._curves: dict[str, list[tuple[float, float]]] = {}
        self._handle: Any = None
        self._can_draw = _can_draw()

    def load(self, path: Path) -> None:
        """Begin with what the lines of an earlier start hold."""
        self._curves.clear()
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a last line that a power cut has torn
                self.add(json.loads(line))

    def add(self, row: Mapping[str, Any]) -> None:
        """Take note of a line."""
        for name, value in row.items():
            if name not in _NOT_DRAWN and isinstance(value, float | int) and math.isfinite(value):
                point = row["step"] / self._steps_per_epoch, value
                self._curves.setdefault(name, []).append(point)

    def draw(self) -> None:
        """Show the chart, in the place of the last one."""
        if not self._can_draw or not self._curves:
            return
        from IPython.display import Image, display

        image = Image(data=self._png())
        if self._handle is None:
            self._handle = display(image, display_id=True)
        else:
            self._handle.update(image)

    def _png(self) -> bytes:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        losses = {name: curve for name, curve in self._curves.items() if "loss" in name}
        others = {name: curve for name, curve in self._curves.items() if name not in losses}
        parts = [part for part in (losses, others) if part]
        figure = Figure(figsize=(4.5 * len(parts), 3), dpi=100, layout="constrained")
        axes = figure.subplots(1, len(parts), squeeze=False)[0]
        for part, place in zip(parts, axes, strict=True):
            _draw_curves(place, part)
        file = io.BytesIO()
        FigureCanvasAgg(figure).print_figure(file, format="png")
        return file.getvalue()


@functools.cache
def _can_draw() -> bool:
    """Whether matplotlib is there; said once if it is not."""
    if importlib.util.find_spec("matplotlib") is None:
        say('a chart would grow here with matplotlib: pip install "flambeau[plot]"')
        return False
    return True


def _draw_curves(axes: "Axes", curves: Mapping[str, list[tuple[float, float]]]) -> None:
    for name, points in curves.items():
        shown = points[:: len(points) // _MOST_POINTS + 1]
        x, y = zip(*shown, strict=True)
        axes.plot(x, y, label=name, marker="" if name.startswith("train_") else "o", markersize=3)
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.3)
    axes.legend()
