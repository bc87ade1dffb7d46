"""Several labels per image, and numbers, from a user's function."""

import math
from pathlib import Path
from typing import Any

import pytest

from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.source import ConcatSource
from flambeau.data.sources.targets import TargetChoice, separator_of, task_of
from flambeau.errors import InputError

CODE = """\
import numpy as np
import torch

class Data:
    {attribute}
    def __len__(self):
        return 12
    def __getitem__(self, index):
        label = {label}
        return np.full((8, 8), index, np.uint8), label

def load():
    return Data()
"""


def opened(folder: Path, label: str, attribute: str = "pass", **choice: Any) -> Any:
    path = folder / "data.py"
    path.write_text(CODE.format(label=label, attribute=attribute))
    parts = open_sources(Path(f"{path}:load"), choice=TargetChoice(**choice))
    source = ConcatSource(parts)
    for index in range(12):
        source.read(index)  # compares the target of each sample with that read before
    order = sorted(range(12), key=lambda at: source.names[at].rpartition("/")[2])
    return task_of(source), source.classes, source.labels[order].tolist(), separator_of(source)


@pytest.mark.parametrize("label", ["['a', 'b'][: index % 3]", "{*('a', 'b')[: index % 3]}"])
def test_names_of_labels(tmp_path: Path, label: str) -> None:
    task, names, rows, separator = opened(tmp_path, label)
    assert (task, names, separator) == ("multilabel", ("a", "b"), "|")
    assert rows == [[0, 0], [1, 0], [1, 1]] * 4


@pytest.mark.parametrize(
    "label",
    [
        "torch.tensor([index % 2, index % 3 == 0, 1.0 if index else torch.nan])",
        "np.array([index % 2, index % 3 == 0, 1.0 if index else np.nan])",
        "[index % 2, index % 3 == 0, 1 if index else None]",
    ],
)
def test_a_value_for_each_label(tmp_path: Path, label: str) -> None:
    task, names, rows, _ = opened(tmp_path, label, "classes = ['a', 'b', 'c']")
    assert (task, names) == ("multilabel", ("a", "b", "c"))
    assert rows[0][:2] == [0, 1] and math.isnan(rows[0][2])
    assert rows[1:4] == [[1, 0, 1], [0, 0, 1], [1, 1, 1]]


def test_a_tensor_of_all_targets(tmp_path: Path) -> None:
    targets = "targets = torch.tensor([[k % 2, k % 3 == 0, k > 3] for k in range(12)]).float()"
    task, names, rows, _ = opened(tmp_path, "self.targets[index]", targets)
    assert (task, names) == ("multilabel", ("0", "1", "2"))
    assert rows[9] == [1, 1, 1]


@pytest.mark.parametrize("label", ["index + 0.5", "torch.tensor(index + 0.5)", "[index + 0.5]"])
def test_numbers(tmp_path: Path, label: str) -> None:
    task, names, rows, _ = opened(tmp_path, label)
    assert (task, names) == ("regression", ("value",))
    assert rows == [[k + 0.5] for k in range(12)]


def test_several_numbers_with_names(tmp_path: Path) -> None:
    task, names, rows, _ = opened(
        tmp_path, "(index * 1.5, float('nan') if index == 2 else 7 + index)", "classes = ['x', 'y']"
    )
    assert (task, names, rows[4]) == ("regression", ("x", "y"), [6.0, 11.0])
    assert math.isnan(rows[2][1])


def test_whole_numbers_are_what_the_user_says(tmp_path: Path) -> None:
    assert opened(tmp_path, "index % 2")[0] == "classification"
    assert opened(tmp_path, "index", task="regression")[2][5] == [5]


@pytest.mark.parametrize(
    ("label", "choice", "message"),
    [
        (
            "torch.eye(3)[index % 3]",
            {},
            "one-hot vector, as all others are\nReturn .* its argmax; or",
        ),
        ("[1, 0, 1][: 2 + index % 2]", {}, "sample 1: its target has 3 values, that of sample 0 2"),
        ("[1.0, 0] if index else 1", {}, "sample 0: its target is 1, and others are lists"),
        ("[0.5, 'a']", {}, "sample 0: its label is"),
        ("['a', 'a']", {}, "label 'a' stands there twice"),
    ],
)
def test_what_is_refused(tmp_path: Path, label: str, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        opened(tmp_path, label, **choice)


def test_a_target_that_changes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"its label is .*, and when all samples were read for it"):
        opened(tmp_path, "[np.random.rand(), 1.5]")


def test_both_parts_are_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "data.py"
    code = CODE.format(label="index * self.step", attribute="step = 0.5")
    path.write_text(
        code + "\n\ndef both():\n    val = Data()\n    val.step = 2\n    return Data(), val\n"
    )
    train, val = open_sources(Path(f"{path}:both"))
    assert (task_of(train), task_of(val)) == ("regression", "regression")
    assert val.labels[:3].flatten().tolist() == [0, 2, 4]
