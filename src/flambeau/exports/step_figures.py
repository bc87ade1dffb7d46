"""What a step of an export changes, measured on images: predictions, accuracy, bytes, latency."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flambeau.exports.formats.classifier import Classifier
from flambeau.trainer.parts.device import num_threads
from flambeau.trainer.prediction.sample_images import SampleImages
from flambeau.trainer.tasks.task import Task

BATCH_SIZES = (1, 32)
_SECONDS = 1.0  # per model and cell of the table
_ROUNDS = range(5, 101)  # fewest and most calls


@dataclass(frozen=True)
class Stage:
    """A model after one step; `num_bytes` of its weights or its file; `open` takes a number of threads."""

    name: str
    open: Callable[[int], Classifier]
    num_bytes: int


@dataclass(frozen=True)
class Latency:
    """The time of a call in milliseconds, from n calls."""

    batch: int
    threads: int
    median_ms: float
    p95_ms: float
    n: int
    times_before: float | None
    """Median ratio of this time to that of the stage before, called alternately."""


@dataclass(frozen=True)
class StepFigures:
    """A step compared with the run.

    Attributes:
        agreement: share of the images with the run's prediction.
        max_difference, mean_difference: of decoded outputs, to the run's.
        figure, figure_name, figure_text: `Task.main_figure`, such as accuracy; None without targets.
    """

    name: str
    agreement: float
    max_difference: float
    mean_difference: float
    figure: float | None
    figure_name: str
    figure_text: str
    num_bytes: int
    latencies: tuple[Latency, ...]

    @property
    def times_before(self) -> float | None:
        """Geometric mean of ratios to the stage before; above 1 is slower; None for the first."""
        ratios = [one.times_before for one in self.latencies]
        if not ratios or None in ratios:
            return None
        return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios if ratio))


def figures_of(
    stage: Stage, before: Stage | None, run: Tensor, images: SampleImages, *, task: Task
) -> StepFigures:
    """Measure a stage against the run's logits (N, K) of N images, in turn with the stage before."""
    logits = batched_logits(stage.open(torch.get_num_threads()), images.pixels)
    difference = (task.decode(logits) - task.decode(run)).abs()
    figure = None
    if images.labels is not None:
        figures = task.evaluation_figures(logits, images.labels)
        figure = float(figures[task.main_figure].double().mean())
    return StepFigures(
        stage.name,
        agreement=float(task.agrees(logits, run).double().mean()),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        figure=figure,
        figure_name=task.main_figure.removeprefix("val_"),
        figure_text="-" if figure is None else task.shown_figure(figure),
        num_bytes=stage.num_bytes,
        latencies=tuple(_latencies(stage, before, images.pixels)),
    )


def batched_logits(classify: Classifier, pixels: Tensor) -> Tensor:
    """Logits (N, K) float32 of (N, S, S, C) images."""
    size = torch.tensor(pixels.shape[1:3])
    return torch.cat([classify(part, size).float() for part in pixels.split(BATCH_SIZES[-1])])


def _latencies(stage: Stage, before: Stage | None, pixels: Tensor) -> Iterator[Latency]:
    for threads in dict.fromkeys((1, torch.get_num_threads())):
        with num_threads(threads):
            opened = [one.open(threads) for one in (before, stage) if one is not None]
            for batch in BATCH_SIZES:
                shown = pixels.repeat(math.ceil(batch / len(pixels)), 1, 1, 1)[:batch]
                times = _times_in_turn(opened, shown)
                measured = sorted(times[-1])
                yield Latency(
                    batch,
                    threads,
                    median_ms=statistics.median(measured),
                    p95_ms=measured[math.ceil(0.95 * len(measured)) - 1],
                    n=len(measured),
                    times_before=None if before is None else _ratio(times),
                )


def _times_in_turn(opened: Sequence[Classifier], pixels: Tensor) -> list[list[float]]:
    """Milliseconds of each call of each model, called alternately."""
    size = torch.tensor(pixels.shape[1:3])
    times: list[list[float]] = [[] for _ in opened]
    for classify in opened:
        for _ in range(2):  # warm up memory and caches
            classify(pixels, size)
    end = time.perf_counter() + _SECONDS * len(opened)
    while len(times[0]) < _ROUNDS[0] or (time.perf_counter() < end and len(times[0]) < _ROUNDS[-1]):
        for classify, measured in zip(opened, times, strict=True):
            start = time.perf_counter()
            classify(pixels, size)
            measured.append(1000 * (time.perf_counter() - start))
    return times


def _ratio(times: Sequence[Sequence[float]]) -> float:
    [(before, after)] = pairwise(times)
    return statistics.median(b / a for a, b in zip(before, after, strict=True))


def as_rows(figures: Sequence[StepFigures]) -> list[dict[str, Any]]:
    return [
        {
            "step": one.name,
            "agreement": one.agreement,
            "max_difference": one.max_difference,
            "mean_difference": one.mean_difference,
            one.figure_name: one.figure,
            "bytes": one.num_bytes,
            "latencies": [vars(latency) for latency in one.latencies],
        }
        for one in figures
    ]


def as_table(figures: Sequence[StepFigures]) -> list[list[str]]:
    figure = figures[0].figure_name
    cells = [(one.batch, one.threads) for one in figures[0].latencies]
    head = ["step", "same answer", "max |dp|", "mean |dp|", figure, "MB"]
    head += [
        f"{batch} image{'s' * (batch > 1)}, {threads} thread{'s' * (threads > 1)}: ms (95 %)"
        for batch, threads in cells
    ]
    return [head] + [
        [
            one.name,
            f"{one.agreement:.2%}",
            f"{one.max_difference:.1e}",
            f"{one.mean_difference:.1e}",
            one.figure_text,
            f"{one.num_bytes / 1e6:.2f}",
            *(f"{cell.median_ms:.3g} ({cell.p95_ms:.3g})" for cell in one.latencies),
        ]
        for one in figures
    ]
