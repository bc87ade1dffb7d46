"""A chart in a notebook's cell that is updated while a run trains."""

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

# Fields of a line of metrics.jsonl that are not figures of the model.
_NOT_DRAWN = {
    "step",
    "epoch",
    "learning_rate",
    "learning_rates",
    "images_per_s",
    "data_wait",
    "loss_scale",
}
_MAX_POINTS = 2000  # per curve; more than a chart has columns


class NotebookChart:
    """The figures of metrics.jsonl by epoch: losses left, all others right."""

    def __init__(self, *, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._curves: dict[str, list[tuple[float, float]]] = {}
        self._handle: Any = None
        self._can_draw = _can_draw()

    def load(self, path: Path) -> None:
        """Start with the lines of an earlier start."""
        self._curves.clear()
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a last line that a power cut has torn
                self.add(json.loads(line))

    def add(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name not in _NOT_DRAWN and isinstance(value, float | int) and math.isfinite(value):
                point = row["step"] / self._steps_per_epoch, value
                self._curves.setdefault(name, []).append(point)

    def draw(self) -> None:
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
        groups = [group for group in (losses, others) if group]
        figure = Figure(figsize=(4.5 * len(groups), 3), dpi=100, layout="constrained")
        for axes, group in zip(
            figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True
        ):
            _draw_curves(axes, group)
        file = io.BytesIO()
        FigureCanvasAgg(figure).print_figure(file, format="png")
        return file.getvalue()


@functools.cache
def _can_draw() -> bool:
    """Whether matplotlib is installed; a message says it once if it is not."""
    if importlib.util.find_spec("matplotlib") is None:
        say('a chart would grow here with matplotlib: pip install "flambeau[plot]"')
        return False
    return True


def _draw_curves(axes: "Axes", curves: Mapping[str, list[tuple[float, float]]]) -> None:
    for name, points in curves.items():
        shown = points[:: len(points) // _MAX_POINTS + 1]
        x, y = zip(*shown, strict=True)
        axes.plot(x, y, label=name, marker="" if name.startswith("train_") else "o", markersize=3)
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.3)
    axes.legend()
