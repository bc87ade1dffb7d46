"""Folds of a cross-validation, beside scikit-learn's."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.model_selection import StratifiedGroupKFold

import flambeau
from flambeau.data.sources.fold_name import parse_fold
from flambeau.data.sources.folds import fold_sources, folds_of, subset_of
from flambeau.data.sources.targets import TargetChoice
from flambeau.errors import InputError


class Named:
    """Labels, names and groups, as a source has them."""

    def __init__(self, labels: list[int], groups: list[str] | None = None) -> None:
        self.labels = torch.tensor(labels)
        self.classes = tuple(f"c{number}" for number in range(max(labels) + 1))
        self.groups = groups
        self.names = [f"{number}.png" for number in range(len(labels))]

    def __len__(self) -> int:
        return len(self.labels)


def test_each_fold_has_its_share_of_each_class() -> None:
    labels = [0] * 50 + [1] * 23 + [2] * 7
    folds = folds_of(Named(labels), 5)  # type: ignore[arg-type]
    assert max(Counter(folds.tolist()).values()) - min(Counter(folds.tolist()).values()) <= 1
    for one in range(3):
        counts = Counter(folds[np.array(labels) == one].tolist())
        assert len(counts) == 5
        assert max(counts.values()) - min(counts.values()) <= 1


def test_an_image_more_moves_few_others_between_processes_and_orders() -> None:
    source = Named([0, 1] * 40)
    shuffled = Named([0, 1] * 40)
    order = np.random.default_rng(0).permutation(80)
    shuffled.labels = source.labels[torch.from_numpy(order)]
    shuffled.names = [source.names[index] for index in order]
    assert (folds_of(shuffled, 4) == folds_of(source, 4)[order]).all()  # type: ignore[arg-type]


def test_groups_stay_together_as_evenly_as_with_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    groups = [f"p{number}" for number in rng.integers(0, 40, 400)]
    labels = [int(rng.random() < 0.2 + 0.4 * (int(group[1:]) % 3 == 0)) for group in groups]
    ours = folds_of(Named(labels, groups), 5)  # type: ignore[arg-type]
    assert all(len(set(ours[np.array(groups) == group])) == 1 for group in set(groups))

    theirs = np.empty(400, int)
    for fold, (_, held) in enumerate(StratifiedGroupKFold(5).split(labels, labels, groups)):
        theirs[held] = fold

    def unevenness(folds: np.ndarray) -> float:  # type: ignore[type-arg]
        counts = np.array(
            [[np.sum((folds == f) & (np.array(labels) == c)) for c in (0, 1)] for f in range(5)]
        )
        return float((counts / counts.sum(0)).std(0).mean())

    assert unevenness(ours) <= unevenness(theirs) + 0.005


def test_a_column_of_ones_own_folds() -> None:
    own = ["b", "a", "c", "a", "b", "c"] * 4
    folds = folds_of(Named([0, 1, 0, 0, 1, 1] * 4, own), 3)  # type: ignore[arg-type]
    assert folds.tolist() == ["abc".index(name) for name in own]


@pytest.mark.parametrize(
    ("labels", "groups", "why"),
    [
        ([0] * 9 + [1] * 4, None, "class 'c1' has 4 images, and there are 5 folds"),
        ([0, 1] * 10, ["a"] * 10 + ["b"] * 10, "class 'c0' has 2 groups"),
        (
            [0, 1] * 30,
            ["a"] * 40 + [f"g{number // 2}" for number in range(20)],
            "group 'a' has 40 of 60 images",
        ),
    ],
)
def test_what_does_not_fit(labels: list[int], groups: list[str] | None, why: str) -> None:
    with pytest.raises(InputError, match=why):
        folds_of(Named(labels, groups), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0/5", "6/5", "1/1", "1", "a/b", "1/101"])
def test_names_of_folds(text: str) -> None:
    with pytest.raises(InputError, match="fold must be such as 2/5"):
        parse_fold(text)


def test_every_image_is_held_out_once(tmp_path: Path) -> None:
    source = Named([0, 1, 1] * 12)
    held: list[str] = []
    for number in range(1, 5):
        train, val = fold_sources(source, (number, 4))  # type: ignore[arg-type]
        assert not {*train.names} & {*val.names}
        assert len(train) + len(val) == 36
        held += val.names
    assert sorted(held) == sorted(source.names)


def test_subsets_lie_in_each_other_and_have_their_share_of_each_class() -> None:
    source = Named([0] * 60 + [1] * 20 + [2] * 3)
    shares = (0.05, 0.1, 0.5, 1.0)
    found = [subset_of(source, TargetChoice(subset=share)) for share in shares]  # type: ignore[arg-type]
    names = [{*one.names} for one in found]
    assert names[0] < names[1] < names[2] < names[3] == {*source.names}
    assert found[2].labels.bincount().tolist() == [30, 10, 2]
    assert found[0].labels.bincount().tolist() == [3, 1, 1]


def test_a_run_on_a_subset_is_evaluated_on_what_it_has_not_seen(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(40):
        place = tmp_path / "images" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        levels = rng.integers(0, 99, (16, 16, 3), dtype=np.uint8) + 99 * (number % 2)
        Image.fromarray(levels.astype(np.uint8)).save(place / f"{number}.png")
    images = tmp_path / "images"
    run = tmp_path / "run"
    flambeau.train(images, out=run, model="tiny_convnet", epochs=1, subset=0.25, bar=False)
    facts = json.loads((run / "dataset.json").read_text())
    assert (facts["train_samples"], facts["val_samples"]) == (
        8,
        4,
    )  # a quarter of 18 and 18, rounded
    assert flambeau.evaluate(run, images).num_images == 40 - facts["train_samples"]
