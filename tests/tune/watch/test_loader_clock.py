"""Loaders that are made anew are told from others of the same line, and one takes the place of all."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from flambeau.tune.watch.loader_clock import LoaderClock, watch_loaders

SCRIPT = """
def loader_of(data):
    return DataLoader(data, batch_size=2)

for epoch in range(3):
    train = loader_of([1, 2, 3, 4])
    read.append([batch.tolist() for batch in train])
    first_step()
    held_out = loader_of([5, 6])
    read.append([batch.tolist() for batch in held_out])
    facts.append([facts_of(train), facts_of(held_out)])

late = [loader_of(data) for data in ([7, 8], [9])]
facts.append([facts_of(one) for one in late])
"""


def ran(tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in ("__init__", "__iter__"):
        monkeypatch.setattr(DataLoader, name, getattr(DataLoader, name))  # put back at the end
    clock = watch_loaders(change, tmp_path)

    def first_step() -> None:
        if not told["facts"]:
            clock.made_again.clear()

    told: dict[str, Any] = {"facts": [], "read": [], "first_step": first_step}
    told |= {"DataLoader": DataLoader, "facts_of": lambda loader: is_anew(clock, loader)}
    exec(compile(SCRIPT, "/home/me/train.py", "exec"), told)
    return told


def is_anew(clock: LoaderClock, loader: Any) -> bool:
    clock.last = loader
    facts = clock.loader_facts()
    assert facts["place"][:2] == ("/home/me/train.py", 3)
    return bool(facts["is_made_anew"])


def test_a_helper_makes_loaders_of_which_some_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first epoch none, later those of each epoch, but not one that is made late and once."""
    facts = ran(tmp_path, {}, monkeypatch)["facts"]
    assert facts == [[False, False], [True, True], [True, True], [False, False]]


def test_a_cache_of_batches_is_that_of_all_loaders_of_one_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterated = []
    iterate = DataLoader.__iter__
    monkeypatch.setattr(
        DataLoader, "__iter__", lambda self: (iterated.append(id(self)), iterate(self))[1]
    )
    told = ran(tmp_path, {"cached": 1}, monkeypatch)
    assert len(iterated) == 2
    assert told["read"] == [[[1, 2], [1, 2]], [[5, 6]]] * 3


def test_one_loader_per_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iterated = []
    iterate = DataLoader.__iter__
    monkeypatch.setattr(
        DataLoader, "__iter__", lambda self: (iterated.append(id(self)), iterate(self))[1]
    )
    told = ran(tmp_path, {"once": True}, monkeypatch)
    assert told["read"] == [[[1, 2], [3, 4]], [[5, 6]]] * 3, "a held-out set is no training set"
    assert iterated == iterated[:2] * 3
