"""What a step of an export has changed, on real images: answers, accuracy, bytes, the time of a call."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flambeau.export.formats.classifier import Classifier
from flambeau.trainer.parts.device import num_threads
from flambeau.trainer.prediction.sample_images import SampleImages
from flambeau.trainer.tasks.task import Task

BATCH_SIZES = (1, 32)
_SECONDS = 1.0  # for one cell of the table, of one of two models
_ROUNDS = range(5, 101)  # fewest and most


@dataclass(frozen=True)
class Stage:
    """A model after one step.

    Attributes:
        name: of the step.
        open: makes it ready to be called, with so many threads.
        num_bytes: of its weights, or its file.
    """

    name: str
    open: Callable[[int], Classifier]
    num_bytes: int


@dataclass(frozen=True)
class Latency:
    """The time of a call: images of this batch size, threads; milliseconds, of n calls."""

    batch: int
    threads: int
    median_ms: float
    p95_ms: float
    n: int
    times_before: float | None
    """Median over the pairs of this time by that of the stage before, called in turn with it."""


@dataclass(frozen=True)
class StepFigures:
    """What one step did, beside the run.

    Attributes:
        name: of the step.
        agreement: share of the images whose most probable class is the run's.
        max_difference, mean_difference: of the probabilities, to the run's.
        accuracy: on the labels.
        num_bytes: of the weights or the file.
        latencies: per batch size and number of threads.
    """

    name: str
    agreement: float
    max_difference: float
    mean_difference: float
    accuracy: float
    num_bytes: int
    latencies: tuple[Latency, ...]

    @property
    def times_before(self) -> float | None:
        """Geometric mean of the ratios to the stage before; above 1 is slower. None of the first stage."""
        ratios = [one.times_before for one in self.latencies]
        if not ratios or None in ratios:
            return None
        return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios if ratio))


def figures_of(
    stage: Stage, before: Stage | None, run: Tensor, images: SampleImages, *, task: Task
) -> StepFigures:
    """Measure a stage.

    Args:
        stage: to measure.
        before: the stage before, which is timed in turn with it.
        run: (N, K) logits of the run itself for these images.
        images: N of them.
        task: of the run.
    """
    logits = answers(stage.open(torch.get_num_threads()), images.pixels)
    difference = (task.decode(logits) - task.decode(run)).abs()
    figures = task.evaluation_figures(logits, images.labels)
    return StepFigures(
        stage.name,
        agreement=float(task.agrees(logits, run).double().mean()),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        accuracy=float(figures[task.best].double().mean()),
        num_bytes=stage.num_bytes,
        latencies=tuple(_latencies(stage, before, images.pixels)),
    )


def answers(classify: Classifier, pixels: Tensor) -> Tensor:
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
                own = sorted(times[-1])
                yield Latency(
                    batch,
                    threads,
                    median_ms=statistics.median(own),
                    p95_ms=own[math.ceil(0.95 * len(own)) - 1],
                    n=len(own),
                    times_before=None if before is None else _ratio(times),
                )


def _times_in_turn(opened: Sequence[Classifier], pixels: Tensor) -> list[list[float]]:
    """Milliseconds of each call of each model, called in turn."""
    size = torch.tensor(pixels.shape[1:3])
    times: list[list[float]] = [[] for _ in opened]
    for classify in opened:
        for _ in range(2):  # memory and caches
            classify(pixels, size)
    end = time.perf_counter() + _SECONDS * len(opened)
    while len(times[0]) < _ROUNDS[0] or (time.perf_counter() < end and len(times[0]) < _ROUNDS[-1]):
        for classify, own in zip(opened, times, strict=True):
            start = time.perf_counter()
            classify(pixels, size)
            own.append(1000 * (time.perf_counter() - start))
    return times


def _ratio(times: Sequence[Sequence[float]]) -> float:
    [(before, after)] = pairwise(times)
    return statistics.median(b / a for a, b in zip(before, after, strict=True))


def as_rows(figures: Sequence[StepFigures]) -> list[dict[str, Any]]:
    """For export.json."""
    return [
        {
            "step": one.name,
            "agreement": one.agreement,
            "max_difference": one.max_difference,
            "mean_difference": one.mean_difference,
            "accuracy": one.accuracy,
            "bytes": one.num_bytes,
            "latencies": [vars(latency) for latency in one.latencies],
        }
        for one in figures
    ]


def as_table(figures: Sequence[StepFigures]) -> list[list[str]]:
    """Rows of text, the first with the names of the columns."""
    cells = [(one.batch, one.threads) for one in figures[0].latencies]
    head = ["step", "same answer", "max |dp|", "mean |dp|", "accuracy", "MB"]
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
            f"{one.accuracy:.2%}",
            f"{one.num_bytes / 1e6:.2f}",
            *(f"{cell.median_ms:.3g} ({cell.p95_ms:.3g})" for cell in one.latencies),
        ]
        for one in figures
    ]
