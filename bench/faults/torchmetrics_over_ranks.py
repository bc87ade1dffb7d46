#!/usr/bin/env python
"""Every metric and wrapper of torchmetrics, over 1 to 3 ranks and in one process.

    python bench/faults/torchmetrics_over_ranks.py

Prints one JSON line: how many were compared; those whose figure over ranks is neither that of all samples nor
that of one process which gets the same shares; those where it is only the latter, because `update` depends on
how batches are cut or in which order they come; those that `metrics=` refuses over ranks; and those that
could not be tried here, with the reason. It ends with 1 if there are any of the first.

Each class is made with whatever of a pool of arguments it takes, and fed with the first of a pool of inputs
on which it works. A global batch is dealt to the ranks as `Run` deals it; the ranks are made one after the
other in this process, and their states meet in `EvaluationMetrics`.
"""

import contextlib
import importlib
import inspect
import io
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor
from torchmetrics import wrappers

from flambeau.data.loading.micro_batch import share_of
from flambeau.errors import InputError
from flambeau.run.loop.evaluation_metrics import EvaluationMetrics

DOMAINS = (
    "aggregation", "audio", "classification", "clustering", "detection", "image", "multimodal", "nominal",
    "regression", "retrieval", "segmentation", "shape", "text", "video",
)  # fmt: skip
# By parameter name; a class gets those that it asks for without a default.
POOL: dict[str, Any] = {
    "num_classes": 3, "num_labels": 3, "num_groups": 2, "num_outputs": 1, "task": "multiclass",
    "beta": 1.0, "min_recall": 0.5, "min_precision": 0.5, "min_sensitivity": 0.5,
    "min_specificity": 0.5, "fs": 8000, "mode": "speaker-wise", "p": 2.0,
    "metric_func": torchmetrics.functional.scale_invariant_signal_noise_ratio, "num_features": 2,
    "things": {0, 1}, "stuffs": {2}, "threshold": 0.5,
    "mouth_map": [0, 1], "n_clusters": 3, "max_k": 2, "data_range": 1.0, "upper_bound": 4,
}  # fmt: skip
WORDS = ("the", "cat", "sat", "on", "mats")
BATCHES = (16, 16, 7)
WORLDS = (1, 2, 3)
# The kinds of inputs to try first; some metrics take hours on others.
FIRST = {
    "clustering": ("features", "whole numbers"),
    "nominal": ("whole numbers",),
    "text": ("references", "texts", "tokens"),
    "audio": ("speakers", "sound", "complex"),
}
DOWNLOADS = {"DeepNoiseSuppressionMeanOpinionScore", "NonIntrusiveSpeechQualityAssessment"}


class OneOfSeveral:
    """A rank whose `gather` knows what the others would send."""

    def __init__(self, rank: int, world: int, others: list[Any]) -> None:
        self.rank, self.world, self.is_first = rank, world, rank == 0
        self.others, self.sent = others, None

    def gather(self, value: Any) -> list[Any]:
        self.sent = value
        return [value, *self.others]

    def first(self, work: Callable[[], Any]) -> Any:
        return work() if self.is_first else {}


def inputs() -> Iterator[tuple[str, Callable[[int, torch.Generator], tuple[Any, ...]]]]:
    """Kinds of batches by name: what `update` gets for n samples."""

    def rand(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
        return lambda n, g: torch.rand(n, *shape, generator=g)

    def ints(high: int, *shape: int) -> Callable[[int, torch.Generator], Tensor]:
        return lambda n, g: torch.randint(high, (n, *shape), generator=g)

    def classes(n: int, g: torch.Generator) -> tuple[Any, ...]:
        return torch.rand(n, 3, generator=g).softmax(1), torch.randint(3, (n,), generator=g)

    def words(n: int, g: torch.Generator) -> list[str]:
        drawn = torch.randint(5, (n, 6), generator=g).tolist()
        return [" ".join(WORDS[i] for i in row) for row in drawn]

    def boxes(n: int, g: torch.Generator) -> tuple[Any, ...]:
        def one(scored: bool) -> dict[str, Tensor]:
            low = torch.rand(4, 2, generator=g) * 50
            size = torch.rand(4, 2, generator=g) * 50 + 1
            found = {"boxes": torch.cat([low, low + size], 1), "labels": torch.arange(4) % 3}
            return {**found, "scores": torch.rand(4, generator=g)} if scored else found

        return [one(True) for _ in range(n)], [one(False) for _ in range(n)]

    yield "values", lambda n, g: (rand()(n, g),)
    yield "speakers", lambda n, g: (rand(2, 400)(n, g), rand(2, 400)(n, g))
    yield "sound", lambda n, g: (rand(800)(n, g), rand(800)(n, g))
    yield "classes", classes
    yield "binary", lambda n, g: (rand()(n, g), ints(2)(n, g))
    yield "labels", lambda n, g: (rand(3)(n, g), ints(2, 3)(n, g))
    yield "groups", lambda n, g: (rand()(n, g), ints(2)(n, g), ints(2)(n, g))
    yield "pairs", lambda n, g: (rand()(n, g) + 0.1, rand()(n, g) + 0.1)
    yield "rows", lambda n, g: (rand(4)(n, g).softmax(1), rand(4)(n, g).softmax(1))
    yield "whole numbers", lambda n, g: (ints(3)(n, g), ints(3)(n, g))
    yield "features", lambda n, g: (rand(4)(n, g), ints(3)(n, g))
    yield "queries", lambda n, g: (rand()(n, g), ints(2)(n, g), ints(4)(n, g))
    yield "images", lambda n, g: (rand(3, 48, 48)(n, g), rand(3, 48, 48)(n, g))
    yield "one image", lambda n, g: (rand(3, 48, 48)(n, g),)
    yield "gray images", lambda n, g: (rand(1, 48, 48)(n, g), rand(1, 48, 48)(n, g))
    yield "masks", lambda n, g: (ints(2, 3, 8, 8)(n, g), ints(2, 3, 8, 8)(n, g))
    yield "panoptic", lambda n, g: (ints(3, 8, 8, 2)(n, g), ints(3, 8, 8, 2)(n, g))
    yield "complex", lambda n, g: (rand(33, 20, 2)(n, g), rand(33, 20, 2)(n, g))
    yield "points", lambda n, g: (rand(10, 3)(n, g), rand(10, 3)(n, g))
    yield "texts", lambda n, g: (words(n, g), words(n, g))
    yield "references", lambda n, g: (words(n, g), [[text] for text in words(n, g)])
    yield "tokens", lambda n, g: (rand(5, 6)(n, g), ints(6, 5)(n, g))
    yield "boxes", boxes
    yield "real or not", lambda n, g: (ints(255, 3, 64, 64)(n, g).byte(), True)


def shared(arguments: tuple[Any, ...], rank: int, world: int) -> tuple[Any, ...] | None:
    size = len(arguments[0])
    share = share_of(size, rank=rank, world=world, full_size=size)
    if share is None:
        return None
    return tuple(a[share] if isinstance(a, (Tensor, list)) else a for a in arguments)


def alone(make: Callable[[], Any], batches: list[Any]) -> Any:
    """What one process computes."""
    torch.manual_seed(0)
    metric = make()
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


def figure(make: Callable[[], Any], batches: list[Any], world: int) -> Any:
    """What `compute` gives on rank 0 after all ranks have counted their shares."""
    torch.manual_seed(0)
    states: list[Any] = []
    found: list[Any] = []
    for rank in reversed(range(world)):
        metric = make()
        compute = metric.compute
        metric.compute = lambda compute=compute: found.append(compute()) or 0.0
        ranks: Any = OneOfSeveral(rank, world, states[::-1] if rank == 0 else [])
        counted = EvaluationMetrics({"m": metric}, device=torch.device("cpu"), ranks=ranks)
        with counted.counting():
            for batch in batches:
                share = shared(batch, rank, world)
                if share is not None:
                    counted.update("m", share, len(share[0]))
        counted.figures({})
        states.append(ranks.sent)
    return found[-1]


def is_close(one: Any, many: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == many.keys() and all(is_close(one[k], many[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(many) and all(map(is_close, one, many))
    if isinstance(one, (Tensor, float, int)):
        a = torch.as_tensor(one).double()
        b = torch.as_tensor(many).double()
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    return bool(one == many)


def all_metrics() -> Iterator[tuple[str, Callable[[], Any]]]:
    for domain in DOMAINS:
        module = importlib.import_module(f"torchmetrics.{domain}")
        for name in sorted(vars(module)):
            kind = getattr(module, name)
            if (
                isinstance(kind, type)
                and issubclass(kind, torchmetrics.Metric)
                and name != "Metric"
            ):
                yield f"{domain}.{name}", lambda kind=kind: made(kind)


def made(kind: type) -> Any:
    """With what it needs; or else, of families such as Accuracy, with all that it takes of the pool."""
    parameters = inspect.signature(kind).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty} & POOL.keys()
    try:
        return kind(**{name: POOL[name] for name in needed})
    except ValueError:
        task = {"num_classes", "min_precision", "min_recall", "min_sensitivity", "min_specificity"}
        takes = {p.name for p in inspect.signature(kind.__new__).parameters.values()} | {
            p.name for p in parameters
        }
        return kind(**{name: POOL[name] for name in needed | (takes & task)})


def all_wrappers() -> Iterator[tuple[str, Callable[[], Any]]]:
    tm = torchmetrics.classification

    def accuracy(average: str | None = "macro") -> Any:
        return tm.MulticlassAccuracy(3, average=average)

    def exact() -> Any:
        return [tm.MulticlassAUROC(3), tm.MulticlassAveragePrecision(3)]

    def tracked() -> Any:
        tracker = wrappers.MetricTracker(accuracy())
        tracker.increment()
        return tracker

    yield "ClasswiseWrapper", lambda: wrappers.ClasswiseWrapper(accuracy(None))
    yield (
        "ClasswiseWrapper of lists",
        lambda: wrappers.ClasswiseWrapper(tm.MulticlassAUROC(3, average=None)),
    )
    yield (
        "MetricCollection",
        lambda: torchmetrics.MetricCollection([accuracy(), tm.MulticlassRecall(3)]),
    )
    yield "MetricCollection of lists", lambda: torchmetrics.MetricCollection(exact())
    yield (
        "MetricCollection of ClasswiseWrapper",
        lambda: torchmetrics.MetricCollection(
            {"a": wrappers.ClasswiseWrapper(accuracy(None)), "b": accuracy()}
        ),
    )
    yield "MinMaxMetric", lambda: wrappers.MinMaxMetric(accuracy())
    yield "MultioutputWrapper", lambda: wrappers.MultioutputWrapper(torchmetrics.R2Score(), 4)
    yield "BootStrapper", lambda: wrappers.BootStrapper(accuracy(), num_bootstraps=4)
    yield "Running", lambda: wrappers.Running(torchmetrics.MeanMetric(), window=2)
    yield "MetricTracker", tracked
    yield (
        "BinaryTargetTransformer",
        lambda: wrappers.BinaryTargetTransformer(tm.BinaryAccuracy(), threshold=0.5),
    )
    yield (
        "LambdaInputTransformer",
        lambda: wrappers.LambdaInputTransformer(tm.BinaryAccuracy(), lambda p: 1 - p),
    )
    yield "CompositionalMetric", lambda: 2 * accuracy() + tm.MulticlassRecall(3)
    yield "CompositionalMetric of one metric twice", lambda: (lambda a: a + a)(accuracy())


def compared(make: Callable[[], Any], first: tuple[str, ...]) -> dict[str, Any] | str:
    """The kind of input and whether each world gives the figure of one process; or why it was not tried."""
    reasons = []
    for kind, draw in sorted(inputs(), key=lambda one: one[0] not in first):
        generator = torch.Generator().manual_seed(0)
        batches = [draw(size, generator) for size in BATCHES]
        try:
            expected = alone(make, batches)
        except Exception as error:  # a benchmark over other people's code: the reason is printed
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:90]}")
            if not isinstance(error, (ValueError, RuntimeError, TypeError, IndexError, KeyError)):
                break
            continue
        equal = {}
        for world in WORLDS:
            try:
                found = figure(make, batches, world)
                shares = [shared(batch, rank, world) for rank in range(world) for batch in batches]
                equal[world] = is_close(expected, found)
                if not equal[world]:
                    as_one = alone(make, [share for share in shares if share is not None])
                    equal[world] = (
                        "as one process with these shares" if is_close(as_one, found) else False
                    )
            except InputError as error:
                equal[world] = f"refused: {error}"
            except Exception as error:
                equal[world] = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
        return {"input": kind, "equal": equal}
    return max(reasons, key=reasons.count) if reasons else "no input fits"


def main() -> int:
    warnings.simplefilter("ignore")
    different, by_cut, refused, not_tried = {}, {}, {}, {}
    num = 0
    for name, make in (*all_metrics(), *all_wrappers()):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            np.random.seed(0)
            result = compared(make, FIRST.get(name.split(".")[0], ()))
        if isinstance(result, str):
            not_tried[name] = result
            continue
        num += 1
        told = [v for v in result["equal"].values() if v is not True]
        if told and all(isinstance(v, str) and v.startswith("refused") for v in told):
            refused[name] = told[0]
        elif told and all(isinstance(v, str) and v.startswith(("as one", "refused")) for v in told):
            by_cut[name] = result
        elif told:
            different[name] = result
    line = {
        "bench": "torchmetrics_over_ranks", "compared": num, "different": different, "by_cut": by_cut,
        "refused": refused,
        "not_tried": not_tried, "torchmetrics": torchmetrics.__version__, "torch": torch.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    print(json.dumps(line))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
