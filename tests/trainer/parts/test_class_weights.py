"""Classes of uneven size: against scikit-learn's weights, in the lines, the loss and the order."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torch.nn.functional import cross_entropy

from flambeau.data.sources.source import Source
from flambeau.errors import InputError
from flambeau.trainer.loss import TrainingLoss
from flambeau.trainer.parts.class_weights import balanced_sampler, class_weights
from flambeau.trainer.parts.data import DataFacts
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.tasks.classification import class_lines

LABELS = torch.tensor([0] * 90 + [1] * 8 + [2] * 2)
NAMES = ("ant", "bee", "cat")


def of(classes: tuple[str, ...]) -> Source:
    """A source of these labels."""
    source: Any = SimpleNamespace(labels=LABELS, classes=classes)
    return cast(Source, source)


def test_auto_is_scikit_learns_balanced() -> None:
    found = class_weights(Settings(class_weights="auto"), of(NAMES))
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS.numpy())
    assert found == pytest.approx(expected.tolist())
    # A class without images has no say in it.
    assert class_weights(Settings(class_weights="auto"), of((*NAMES, "dog"))) == [*found, 1.0]
    assert class_weights(Settings(), of(NAMES)) is None


def test_a_file_holds_a_number_for_each_class(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    file.write_text('{"cat": 3, "ant": 0.5, "bee": 0}', encoding="utf-8")
    told = Settings(class_weights=str(file))
    assert class_weights(told, of(NAMES)) == [0.5, 0.0, 3.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must be 'auto' or a file of a JSON object of a number .*it is missing"),
        ("[1, 2, 3]", "the file must hold a JSON object of a number for each class"),
        ("{", "must be 'auto' or a file"),
        ("[" * 100_000, "must be 'auto' or a file"),
        (" " * (1 << 22) + "{}", "it has more than 4194304 bytes"),
        ('{"ant": 1, "bee": 1}', "class 'cat' has no weight; give it a number"),
        ('{"ant": 1, "bee": 1, "cat": null}', "class 'cat' needs a number, got null"),
        ('{"ant": 1, "bee": 1, "cat": 1, "ant": 2}', "number for .*: it gives 'ant' twice"),
        ('{"ant": 1, "bee": 1, "cat": "2"}', "class 'cat' needs a number, got .2."),
        ('{"ant": 1, "bee": 1, "cat": true}', "class 'cat' needs a number, got true"),
        ('{"ant": 1, "bee": 1, "cat": -1}', "'cat' must be from 0 to 3.4e38, got -1"),
        ('{"ant": 1, "bee": 1, "cat": NaN}', "'cat' must be from 0 to 3.4e38, got nan"),
        ('{"ant": 1, "bee": 1, "cat": 1e999}', "'cat' must be from 0 to 3.4e38, got inf"),
        ('{"ant": 1, "bee": 1, "cat": 1e39}', "'cat' must be from 0 to 3.4e38, got 1"),
        (f'{{"ant": 1, "bee": 1, "cat": {10**400}}}', "'cat' must be from 0 to 3.4e38, got 1"),
        ('{"ant": 0, "bee": 0, "cat": 0}', "all weights are 0"),
        ('{"ant": 1, "be": 1, "cat": 1}', "no class 'be'; did you mean 'bee'"),
    ],
)
def test_other_files_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        class_weights(Settings(class_weights=str(file)), of(NAMES))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "weights.json")
    with pytest.raises(InputError, match="it is not a file"):
        class_weights(Settings(class_weights=str(tmp_path / "weights.json")), of(NAMES))


@pytest.mark.parametrize(
    ("balance", "shares"),
    [("full", [1 / 3] * 3), ("sqrt", [n**0.5 / (90**0.5 + 8**0.5 + 2**0.5) for n in (90, 8, 2)])],
)
def test_what_is_drawn(balance: str, shares: list[float]) -> None:
    settings: Any = Settings(balance=balance, seed=4)
    sampler = balanced_sampler(settings, LABELS)
    assert sampler is not None
    assert len(sampler) == len(LABELS)
    drawn = LABELS[torch.cat([sampler.order(epoch) for epoch in range(300)])]
    found = torch.bincount(drawn) / len(drawn)
    assert found.tolist() == pytest.approx(shares, abs=0.012)  # three standard deviations


@pytest.mark.parametrize(
    ("counts", "settings", "lines"),
    [
        ([5, 5], {}, ["2 classes of 5 training images each"]),
        ([5, 4], {}, ["training images: a 5, b 4"]),
        (
            [2, 90, 8],
            {},
            [
                "training images: b 90, c 8, a 2",
                "the classes are uneven: b has 45 times the images of a; --balance sqrt (or full) draws rare "
                "ones more often, --class-weights auto weighs them more",
            ],
        ),
        ([2, 90, 8], {"balance": "sqrt"}, ["training images: b 90, c 8, a 2"]),
        ([2, 90, 8], {"class_weights": "auto"}, ["training images: b 90, c 8, a 2"]),
        ([3, 0, 4], {}, ["training images: c 4, a 3, b 0", "no training image of b"]),
        ([7] * 12 + [9], {}, ["13 classes of 7 (l) to 9 (m) training images"]),
    ],
)
def test_lines(counts: list[int], settings: dict[str, str], lines: list[str]) -> None:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    names = "abcdefghijklm"[: len(counts)]
    assert class_lines(Settings(**settings), labels, list(names)) == lines  # type: ignore[arg-type]


def test_weights_are_in_the_loss() -> None:
    model = nn.Linear(4, 3)
    facts = DataFacts(["a", "b", "c"], 1, [0.5], [0.2], 9, 3, "", "", None, None, [0.5, 1.0, 4.0])
    told = {
        "image_size": 8,
        "workers": 0,
        "model": "x",
        "duration": "1ep",
        "batch_size": 7,
        "lr": 0.1,
    }
    settings = ResolvedSettings(**told, precision="fp32", label_smoothing=0.1)  # type: ignore[arg-type]
    loss = TrainingLoss(
        model, settings, facts, device=torch.device("cpu"), normalize=lambda x: x, teacher=None
    )
    x, targets = torch.randn(7, 4), torch.tensor([0, 1, 2, 2, 1, 0, 2])
    theirs = cross_entropy(
        model(x),
        targets,
        weight=torch.tensor([0.5, 1.0, 4.0]),
        label_smoothing=0.1,
        reduction="none",
    )
    torch.testing.assert_close(loss(x, targets, step=0), theirs.mean())


def test_a_run_of_uneven_classes(flambeau: Any, images: Path, tmp_path: Path) -> None:
    for file in sorted((images / "train" / "b").iterdir())[1:]:
        file.unlink()
    short = f"--batch-size 3 --precision fp32 --duration 3st --out {tmp_path / 'run'}"
    answer = flambeau("train", images, short)
    assert (
        "training images: a 8, b 1\n"
        "the classes are uneven: a has 8 times the images of b; --balance sqrt (or full)\n"
        "  draws rare ones more often, --class-weights auto weighs them more\n" in answer.err
    )
    answer = flambeau("train", images, short, "--balance full --class-weights auto --fresh")
    assert (answer.code, "both make up for rare classes" in answer.err) == (2, True)
    answer = flambeau("train", images, short, "--balance full --fresh")
    assert answer.code == 0
    assert "the classes are uneven" not in answer.err
    answer = flambeau("train", images, short, "--balance sqrt")
    assert (answer.code, "balance: 'full' there, 'sqrt' now" in answer.err) == (2, True)

    weights = tmp_path / "weights.json"
    weights.write_text('{"a": 1, "b": 8}', encoding="utf-8")
    weighted = f"--class-weights {weights}"
    assert flambeau("train", images, short, weighted, "--fresh").code == 0
    facts = json.loads((tmp_path / "run" / "dataset.json").read_text(encoding="utf-8"))
    assert facts["class_weights"] == [1.0, 8.0]
    assert flambeau("evaluate", tmp_path / "run", images).code == 0
    weights.write_text('{"a": 1, "b": 9}', encoding="utf-8")
    answer = flambeau("train", images, short, weighted)
    assert answer.code == 2
    assert re.search(r"the weights in .*weights\.json have changed since the run", answer.err)
    assert flambeau("train", images, short, "--class-weights auto --fresh").code == 0
    facts = json.loads((tmp_path / "run" / "dataset.json").read_text(encoding="utf-8"))
    assert facts["class_weights"] == pytest.approx([9 / 16, 9 / 2])
