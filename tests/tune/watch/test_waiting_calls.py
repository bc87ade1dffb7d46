"""Calls that wait for the device are found by their lines, and torch's Tensor is left as it was."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flambeau.tune.watch.waiting_calls import WaitingCalls, skip_waiting_calls

METHODS = ("item", "__bool__", "cpu", "__repr__", "tolist", "numpy", "to")


@pytest.fixture
def tensor_restored() -> Iterator[None]:
    before = {name: Tensor.__dict__.get(name) for name in (*METHODS, "__float__", "nonzero")}
    everything = dict(vars(Tensor))
    yield
    for name in set(vars(Tensor)) - set(everything):
        delattr(Tensor, name)
    for name, value in everything.items():
        if vars(Tensor)[name] is not value:
            setattr(Tensor, name, value)
    assert before == {name: Tensor.__dict__.get(name) for name in before}


def run_script(text: str, **names: object) -> dict[str, object]:
    space: dict[str, object] = {"torch": torch, **names}
    exec(compile(text, "/home/me/train.py", "exec"), space)
    return space


@pytest.mark.usefixtures("tensor_restored")
def test_each_call_is_counted_with_its_line() -> None:
    before = dict(vars(Tensor))
    calls = WaitingCalls()
    calls.start()
    run_script(
        "x = torch.ones(3)\n"
        "for _ in range(4):\n"
        "    x.sum().item()\n"
        "if x.all():\n"
        "    f'{x}'\n"
        "x.to(torch.float64)\n"
    )
    calls.stop()
    assert dict(vars(Tensor)) == before
    found = {(place.file, place.line, what): row for (place, what), row in calls.calls.items()}
    file = "/home/me/train.py"
    assert {key[1:] for key in found} == {
        (3, ".item()"), (4, "if tensor"), (5, "printing a tensor"),
    }  # fmt: skip
    assert found[file, 3, ".item()"][0] == 4
    assert found[file, 5, "printing a tensor"][0] == 1  # not the item() inside of it
    assert all(row[1] > 0 for row in found.values())


@pytest.mark.usefixtures("tensor_restored")
def test_a_copy_to_another_device_counts_its_bytes() -> None:
    calls = WaitingCalls()
    calls.start()
    run_script("torch.ones(4, 8).to('meta')\n")
    calls.stop()
    (((place, what), (count, _, copied)),) = calls.calls.items()
    assert (place.line, what, count, copied) == (1, "copy to meta, not pinned", 1, 128)


@pytest.mark.usefixtures("tensor_restored")
def test_skipped_calls_give_their_first_answer_and_others_their_own() -> None:
    skip_waiting_calls(["/home/me/train.py:3"])
    space = run_script(
        "first, other = [], []\n"
        "for k in range(3):\n"
        "    first.append(torch.tensor(k).item())\n"
        "    other.append(torch.tensor(k).item())\n"
    )
    assert (space["first"], space["other"]) == ([0, 0, 0], [0, 1, 2])
