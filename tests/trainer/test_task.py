"""The task is a seam: another one needs a class with the same methods, and nothing else of the trainer."""

import re
from pathlib import Path

import pytest
import torch
from sklearn.metrics import f1_score

from flambeau.trainer.tasks.classification import Classification, rankings
from flambeau.trainer.tasks.task import Task

SRC = Path(__file__).resolve().parents[2] / "src" / "flambeau" / "trainer"
TASK = Classification(("ant", "bee", "cat"))


def test_classification_is_a_task() -> None:
    task: Task = TASK
    assert (task.num_outputs, task.main_figure) == (3, "val_accuracy")
    outputs = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0]])
    targets = torch.tensor([0, 1])
    figures = task.evaluation_figures(outputs, targets)
    assert task.main_figure in figures
    assert figures["val_accuracy"].tolist() == [1, 0]
    losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    torch.testing.assert_close(figures["val_loss"], losses)
    assert task.training_figures(outputs, targets)["train_accuracy"].tolist() == [1, 0]
    for best, names in (("val_loss", []), ("val_macro_f1", ["macro_f1"])):
        metric = task.sample_results(best)
        metric.update(torch.arange(2), targets, outputs)
        given = metric.compute()
        assert list(given) == names
    expected = f1_score(targets, outputs.argmax(1), average="macro", labels=[0, 1], zero_division=0)
    assert given == {"macro_f1": pytest.approx(expected)}
    both = task.mean_of_views(outputs, outputs.flip(1))
    expected = (outputs.softmax(1) + outputs.flip(1).softmax(1)) / 2
    torch.testing.assert_close(both.softmax(1), expected)
    assert task.predictions([(outputs, [])]).classes == ("ant", "cat")
    assert rankings(outputs, TASK.classes, 1)[1][0][0] == "cat"


def test_nothing_else_asks_which_task_it_is() -> None:
    asks = re.compile(r"isinstance\([^)]*Classification|task == |task is ")
    found = [file for file in SRC.rglob("*.py") if asks.search(file.read_text(encoding="utf-8"))]
    assert found == []
