"""Metrics that are no means: each against scikit-learn or torchmetrics on all samples at once.

torchmetrics is imported where it is used: it takes a second, which each process of pytest would spend.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau.errors import InputError
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.training.auroc import AUROC
from flambeau.recipes.training.confusion_matrix import ConfusionMatrix
from flambeau.run.loop.evaluation_metrics import EvaluationMetrics
from flambeau.run.run import Run


def rows(length: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, 6, generator=generator)
    noise = 0.8 * torch.randn(length, 3, generator=generator)
    return TensorDataset(x, (x[:, :3] + noise).argmax(1))


class Counting:
    """No state_dict: enough for one process."""

    def __init__(self) -> None:
        self.seen = 0

    def update(self, x: Tensor) -> None:
        self.seen += len(x)

    def compute(self) -> int:
        return self.seen

    def reset(self) -> None:
        self.seen = 0


def metrics() -> dict[str, Any]:
    import torchmetrics
    import torchmetrics.classification as tm
    from torchmetrics.wrappers import ClasswiseWrapper

    class Kept(torchmetrics.Metric):
        """The largest distance of neighbours in the order of the samples; its state has no reduction."""

        kept: list[Tensor]

        def __init__(self) -> None:
            super().__init__()
            self.add_state("kept", default=[], dist_reduce_fx=None)

        def update(self, values: Tensor) -> None:
            self.kept.extend(values)

        def compute(self) -> Tensor:
            return torch.stack(self.kept).sort().values.diff().max()

    return {
        "val": ConfusionMatrix(3),
        "area": AUROC(),
        "f1": tm.MulticlassF1Score(3, average="macro"),
        "exact": tm.MulticlassAUROC(3),
        "all": torchmetrics.MetricCollection(
            [tm.MulticlassRecall(3, average="macro"), tm.MulticlassPrecision(3, average="macro")]
        ),
        "curves": torchmetrics.MetricCollection(  # they share one list
            [tm.MulticlassAUROC(3), tm.MulticlassAveragePrecision(3)]
        ),
        # Its states are those of the metric inside.
        "each": ClasswiseWrapper(tm.MulticlassRecall(3, average=None)),
        "pearson": torchmetrics.PearsonCorrCoef(),
        "largest": torchmetrics.MaxMetric(),
        "gap": Kept(),
        "twice": 2 * torchmetrics.MeanMetric(),
    }


def train(folder: Path, told: dict[str, Any], *, die_at: int = -1, **options: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run = Run(
        folder, model, optimizer, rows(48, 1), duration="3ep", batch_size=16, bar=False,
        metrics=told, best="val_mean_iou", **options,
    )  # fmt: skip
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(cross_entropy(model(x), y))
            if run.state.step == die_at:
                raise KeyboardInterrupt
        for x, y in run.evaluate(rows(131, 2)):
            logits = model(x)
            run.log(val_correct=logits.argmax(1) == y)
            for name in told.keys() & {
                "val",
                "area",
                "f1",
                "exact",
                "all",
                "curves",
                "each",
            }:
                run.log(**{name: (logits, y)})
            if "gap" in told:
                run.log(pearson=(x[:, 0], logits[:, 0]), largest=x[:, 1], gap=x[:, 2])
                run.log(twice={"value": x[:, 3]})
    return run


def lines(folder: Path) -> list[dict[str, float]]:
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if "val_correct" in line]


def test_figures_are_those_of_all_samples_at_once(tmp_path: Path) -> None:
    run = train(tmp_path / "run", metrics())
    x, y = rows(131, 2).tensors
    with torch.no_grad():
        logits = run.model(x)
    found, guess = lines(tmp_path / "run")[-1], logits.argmax(1)
    expected = {
        "val_correct": sklearn.metrics.accuracy_score(y, guess),
        "val_accuracy": sklearn.metrics.accuracy_score(y, guess),
        "val_macro_f1": sklearn.metrics.f1_score(y, guess, average="macro"),
        "val_mean_iou": sklearn.metrics.jaccard_score(y, guess, average="macro"),
        "area": sklearn.metrics.roc_auc_score(y, logits.softmax(1), multi_class="ovr"),
        "exact": sklearn.metrics.roc_auc_score(y, logits.softmax(1), multi_class="ovr"),
        "f1": sklearn.metrics.f1_score(y, guess, average="macro"),
        "all_MulticlassRecall": sklearn.metrics.recall_score(y, guess, average="macro"),
        "all_MulticlassPrecision": sklearn.metrics.precision_score(y, guess, average="macro"),
        "curves_MulticlassAUROC": sklearn.metrics.roc_auc_score(
            y, logits.softmax(1), multi_class="ovr"
        ),
        **{
            f"each_multiclassrecall_{c}": recall
            for c, recall in enumerate(sklearn.metrics.recall_score(y, guess, average=None))
        },
        "pearson": float(torch.corrcoef(torch.stack([x[:, 0], logits[:, 0]]))[0, 1]),
        "largest": float(x[:, 1].max()),
        "gap": float(x[:, 2].sort().values.diff().max()),
        "twice": 2 * float(x[:, 3].mean()),
    }
    for name, figure in expected.items():
        assert found[name] == pytest.approx(figure, abs=2e-6), name
    assert run.state.best.metrics["val_mean_iou"] == max(
        line["val_mean_iou"] for line in lines(tmp_path / "run")
    )


@pytest.mark.parametrize("world", [2, 3])
def test_several_processes_count_each_sample_once(
    start_ranks: Callable[..., Any], tmp_path: Path, world: int
) -> None:
    """131 samples in batches of 64 leave 3 for the last one."""
    told = lines(train(tmp_path / "one", metrics()).folder.path)
    results = start_ranks(
        world, lambda: train(tmp_path / "many", metrics()).state.metrics
    ).results()
    found = lines(tmp_path / "many")
    for one, many in zip(told, found, strict=True):
        assert many == pytest.approx(one, abs=2e-6)
    for figures in results:
        assert figures == pytest.approx({k: told[-1][k] for k in figures}, abs=2e-6)


def test_resumed_run_writes_the_same_lines(tmp_path: Path) -> None:
    train(tmp_path / "whole", metrics())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", metrics(), die_at=5)
    train(tmp_path / "run", metrics())
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_evaluation_that_is_left_counts_nothing(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    run = Run(
        tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), rows(16, 1),
        duration="1st", batch_size=16, bar=False, metrics={"seen": Counting()}, best="seen",
        best_mode="max",
    )  # fmt: skip
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(cross_entropy(model(x), y))
        for x, _ in run.evaluate(rows(100, 2)):
            run.log(seen=x)
            break
        for x, _ in run.evaluate(rows(100, 2)):
            run.log(seen=x)
    assert run.result is not None
    assert run.result.metrics == {"seen": 100.0}


class Vector(Counting):
    def compute(self) -> Any:
        return torch.ones(3)


class Same(Counting):
    def compute(self) -> Any:
        return {"accuracy": math.pi}


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"val": Counting}, InputError, r"metrics\['val'\] is the class Counting: give an object"),
        ({"val": "f1"}, InputError, r"metrics\['val'\] must be .* 'f1' has no update"),
        ({"step": Counting()}, InputError, "each line of metrics.jsonl has 'step' already"),
        ([Counting()], InputError, "metrics must be a dict"),
        ({"val": Vector()}, TypeError, r"must give one number .* a tensor of shape \(3,\)"),
        ({"val": Same()}, ValueError, r"metrics\['val'\] gives 'val_accuracy', which is logged"),
    ],
)
def test_what_cannot_be_a_metric(
    tmp_path: Path, told: Any, error: type[Exception], message: str
) -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(error, match=message):
        run = Run(
            tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), rows(16, 1),
            duration="1st", bar=False, metrics=told,
        )  # fmt: skip
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(cross_entropy(model(x), y))
            for x, _ in run.evaluate(rows(10, 2)):
                run.log(val=x, val_accuracy=1.0)


def test_metric_outside_of_an_evaluation(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    run = Run(
        tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), rows(16, 1),
        duration="1st", bar=False, metrics={"seen": Counting()},
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"metrics\['seen'\] counts in .*run.evaluate"):
        for _ in run.epochs():
            for x, _ in run.batches():
                run.log(seen=x)


def test_several_processes_need_a_state(start_ranks: Callable[..., Any], tmp_path: Path) -> None:
    def work() -> str:
        model = nn.Linear(6, 3)
        with pytest.raises(InputError) as refused:
            Run(
                tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), rows(16, 1),
                duration="1st", bar=False, metrics={"seen": Counting()},
            )  # fmt: skip
        return str(refused.value)

    for message in start_ranks(2, work).results():
        assert "Counting has no state_dict() and merge(state)" in message


@pytest.mark.parametrize(("world", "refused"), [(1, 1), (2, 2), (3, 3)])
def test_metrics_that_would_not_be_exact_are_refused(world: int, refused: int) -> None:
    import torchmetrics
    from torchmetrics.wrappers import MinMaxMetric, Running

    told = [
        MinMaxMetric(torchmetrics.MeanMetric()),
        Running(torchmetrics.MeanMetric()),
        torchmetrics.NormalizedRootMeanSquaredError(),
    ]
    messages = []
    for metric in told:
        try:
            EvaluationMetrics(
                {"m": torchmetrics.MetricCollection([metric])},
                device=torch.device("cpu"),
                ranks=Ranks(0, world, None),
            )
        except InputError as error:
            messages.append(str(error))
    assert len(messages) == refused
    assert all(f"would not be exact on {world} process" in text for text in messages)
