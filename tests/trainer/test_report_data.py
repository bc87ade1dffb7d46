"""evaluation.json is of the weights that the run publishes, also after a rollback and a resume."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.data.check.report_text import ReportItem
from flambeau.trainer.report_data import ReportData
from flambeau.trainer.tasks.classification import Classification

TASK = Classification(("a", "b"))


class Data:
    """Four grey images."""

    source, image_size, channels = None, 8, 1

    def __len__(self) -> int:
        return 4

    def describe(self, index: int) -> str:
        return f"{index}.png"

    def batch(self, indices: torch.Tensor, seeds: torch.Tensor) -> object:
        return (torch.zeros(len(indices), 1, 8, 8, dtype=torch.uint8), seeds), []


def evaluations(
    folder: Path, find: Callable[..., list[ReportItem]] = lambda seconds: []
) -> ReportData:
    data: Any = Data()
    return ReportData(
        folder,
        data,
        data,
        TASK,
        best="val_accuracy",
        normalized_by=([0.5], [0.5]),
        has_unit=True,
        check_data=find,
    )


def add(
    one: ReportData,
    *,
    right: int,
    step: int,
    published: int,
    is_last: bool,
    say: Callable[[str], None] = pytest.fail,
) -> None:
    """An evaluation with so many right answers of 4."""
    logits = torch.tensor([[0.0, 1.0]] * right + [[1.0, 0.0]] * (4 - right))
    one.metric.reset()
    one.metric.update(torch.arange(4), torch.ones(4, dtype=torch.int64), logits)
    one.metric.compute()
    history = TASK.history(4, fingerprint="", device=torch.device("cpu"))
    one.add(step=step, published=published, end=history if is_last else None, say=say)


def stored(folder: Path) -> tuple[int, int]:
    """Step and right answers of evaluation.json."""
    facts = json.loads((folder / "evaluation.json").read_text())
    return facts["step"], sum(facts["right"])


def test_of_the_weights_that_are_published_after_steps_were_taken_back(tmp_path: Path) -> None:
    one = evaluations(tmp_path)
    add(one, right=3, step=10, published=10, is_last=False)
    add(one, right=4, step=20, published=20, is_last=False)
    assert stored(tmp_path) == (20, 4)
    add(one, right=1, step=20, published=10, is_last=False)  # once more, after a rollback to 10
    assert stored(tmp_path) == (10, 3)
    add(one, right=1, step=30, published=10, is_last=True)
    assert stored(tmp_path) == (10, 3)
    assert "picture" in (tmp_path / "evaluation.json").read_text()


def test_a_resume_shows_nothing_of_other_weights(tmp_path: Path) -> None:
    add(evaluations(tmp_path), right=4, step=20, published=20, is_last=False)
    again = evaluations(tmp_path)  # killed before the checkpoint of step 20
    add(again, right=1, step=30, published=10, is_last=True)
    assert not (tmp_path / "evaluation.json").exists()


def test_a_resume_goes_on_with_what_was_evaluated(tmp_path: Path) -> None:
    add(evaluations(tmp_path), right=3, step=20, published=20, is_last=False)
    add(evaluations(tmp_path), right=1, step=30, published=20, is_last=True)
    assert stored(tmp_path) == (20, 3)
    assert "picture" in (tmp_path / "evaluation.json").read_text()


@pytest.mark.parametrize("index", [4, -1, "0", None])
def test_a_damaged_file_ends_no_training(tmp_path: Path, index: object) -> None:
    add(evaluations(tmp_path), right=3, step=20, published=20, is_last=False)
    path = tmp_path / "evaluation.json"
    facts = json.loads(path.read_text())
    facts["unsure"][0]["index"] = index
    path.write_text(json.dumps(facts))
    add(evaluations(tmp_path), right=1, step=30, published=20, is_last=True)
    path.write_text(json.dumps({"mistakes": [1], "unsure": [], "step": 20}))
    add(evaluations(tmp_path), right=1, step=30, published=20, is_last=True)
    assert not path.exists()


def test_leaks_and_contradictions_are_said_at_the_end(tmp_path: Path) -> None:
    asked, said = list[float](), list[str]()

    def find(*, seconds: float) -> list[ReportItem]:
        asked.append(seconds)
        kinds = ("leaks", "contradictions", "tiny", "")
        return [ReportItem(kind, f"3 of {kind}", [f"a {kind}"]) for kind in kinds]

    one = evaluations(tmp_path, find)
    add(one, right=4, step=10, published=10, is_last=False, say=said.append)
    assert (asked, said) == ([], [])
    add(one, right=4, step=20, published=20, is_last=True, say=said.append)
    assert said == ["3 of leaks; 3 of contradictions: the report names them"]
    assert asked == [1.0]
    facts = json.loads((tmp_path / "evaluation.json").read_text())
    assert facts["findings"][2] == ["3 of tiny", ["a tiny"]]


@pytest.mark.parametrize(("passed_s", "seconds"), [(10.0, 1.0), (500.0, 10.0), (1e5, 20.0)])
def test_a_look_at_the_data_takes_a_share_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed_s: float, seconds: float
) -> None:
    asked = list[float]()

    def find(*, seconds: float) -> list[ReportItem]:
        asked.append(seconds)
        return []

    one = evaluations(tmp_path, find)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + passed_s)
    add(one, right=4, step=20, published=20, is_last=True)
    assert asked == pytest.approx([seconds], rel=0.01)
