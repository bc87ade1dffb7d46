"""What `load(run)(images)` gives is a table in a notebook, for every task."""

import torch

from flambeau.trainer.evaluation.answers import answers_table
from flambeau.trainer.tasks.classification import Predictions
from flambeau.trainer.tasks.multilabel import LabelAnswers
from flambeau.trainer.tasks.regression import NumberAnswers


def test_classes_with_their_probabilities() -> None:
    html = Predictions(("<cat>", "dog"), torch.tensor([[2.0, 0.0], [0.0, 1.0]]))._repr_html_()
    assert html.count("<tr>") == 3
    assert "&lt;cat&gt; 88.1%, dog 11.9%" in html
    assert "dog 73.1%, &lt;cat&gt; 26.9%" in html


def test_labels_and_numbers() -> None:
    labels = LabelAnswers(("red", "round"), torch.tensor([[0.9, 0.2]]), torch.tensor([0.5, 0.5]))
    assert "red" in labels._repr_html_()
    assert "round" not in labels._repr_html_()
    numbers = NumberAnswers(("age",), torch.tensor([[31.5], [40.0]]))
    assert "age 31.5" in numbers._repr_html_()


def test_of_many_the_first() -> None:
    html = answers_table(f"answer {number}" for number in range(1000))
    assert "answer 19<" in html
    assert "answer 20<" not in html
    assert "..." in html
