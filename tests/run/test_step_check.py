"""`verify_steps`: a step that is computed twice has the bits of one, and a flipped bit is found."""

import functools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flambeau.errors import InputError
from flambeau.run.loop.step_check import MachineFault
from flambeau.run.run import Run
from shared_fixtures import StartRanks

SAMPLES = 24
Hook = Callable[[Run, Tensor, int], None]


class Net(nn.Module):
    """It draws from torch, Python and NumPy, counts in buffers, and writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        hidden = self.norm(self.first(x)) * (1 + 0.01 * random.random() * np.random.rand())
        return self.last(nn.functional.dropout(hidden.relu(), 0.3, self.training))


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=draw)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=draw))


def train(folder: Path, hook: Hook | None = None, **options: Any) -> dict[str, Any]:
    """Weights, lines of metrics, and how often the body ran."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net()
    given: dict[str, Any] = {"duration": "4ep", "log_every": 3, "bar": False}
    source = options.pop("data", None) or data()
    if isinstance(source, TensorDataset):
        given["batch_size"] = 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(folder, model, optimizer, source, **given | options)
    bodies = 0
    for _ in run.epochs():
        for x, y in run.batches():
            bodies += 1
            if hook is not None:
                hook(run, x, bodies)
            with run.autocast():
                logits = model(x)
                loss = cross_entropy(logits, y)
            run.log(accuracy=logits.argmax(1) == y)
            run.step(loss)
        for x, y in run.evaluate(data()):
            run.log(val_accuracy=model(x).argmax(1) == y)
    return {"weights": model.state_dict(), "lines": lines_of(folder), "bodies": bodies}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Without speeds."""
    return [
        {key: value for key, value in line.items() if "per_s" not in key and "wait" not in key}
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    ]


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["weights"].keys() == right["weights"].keys()
    for name, value in left["weights"].items():
        assert torch.equal(value, right["weights"][name]), name
    assert left["lines"] == right["lines"]


@pytest.mark.parametrize(
    ("options", "steps", "parts"),
    [
        ({}, 24, 1),
        ({"accumulate": 2, "workers": 1}, 12, 2),
        ({"precision": "bf16", "clip_norm": 0.5, "ema": 0.9}, 24, 1),
    ],
    ids=["plain", "accumulated", "bf16"],
)
def test_the_bits_are_those_of_one_computation(
    tmp_path: Path, options: dict[str, Any], steps: int, parts: int
) -> None:
    once = train(tmp_path / "once", **options)
    twice = train(tmp_path / "twice", verify_steps="1/3", **options)
    same(once, twice)
    assert once["bodies"] == steps * parts
    assert twice["bodies"] == (steps + steps // 3) * parts


def test_a_loader_of_ones_own(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(data(), batch_size=4, shuffle=True)

    once = train(tmp_path / "once", data=loader())
    same(once, train(tmp_path / "twice", data=loader(), verify_steps="1/2"))


def test_a_resume_may_change_it(tmp_path: Path) -> None:
    once = train(tmp_path / "once")

    def stop(run: Run, x: Tensor, bodies: int) -> None:
        if bodies == 16:
            raise KeyError("stop")

    with pytest.raises(KeyError):
        train(tmp_path / "run", stop, verify_steps="1/1", checkpoint_every="2st")
    found = train(tmp_path / "run", verify_steps="1/5", checkpoint_every="2st")
    same(once, found)


class Mean:
    """An average of weights that the loop keeps itself, and gives to `state=`."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.values, self.updates = model, [torch.zeros(())], 0

    def update(self) -> None:
        self.updates += 1
        self.values[0] = self.values[0] * 0.9 + sum(p.sum() for p in self.model.parameters())

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.updates = state["values"], state["updates"]


class Counting(nn.Module):
    """Its buffer, which no checkpoint holds, grows with each forward pass, and its output with that."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = torch.cat([self.calls, torch.ones(1)])
        return self.last(x) * (1 + self.calls.sum() / 100)


def test_what_the_body_does_after_its_step_counts_once(tmp_path: Path) -> None:
    def body(folder: Path, **options: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Counting()
        mean = Mean(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"duration": "2ep", "batch_size": 4, "bar": False, "state": {"mean": mean}}
        run = Run(folder, model, optimizer, data(), **given | options)
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(cross_entropy(model(x), y))
                mean.update()
                with torch.no_grad():
                    model.last.weight.clamp_(-0.2, 0.2)
        return (
            mean.updates,
            float(mean.values[0].detach()),
            model.calls.tolist(),
            model.last.weight.tolist(),
        )

    once = body(tmp_path / "once")
    assert once[0] == 12
    assert body(tmp_path / "twice", verify_steps="1/2") == once


def test_what_follows_a_step_counts_once(tmp_path: Path) -> None:
    """Values logged and evaluations behind `run.step`, in the computation that is undone."""

    def body(folder: Path, **options: Any) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"duration": "2ep", "batch_size": 4, "log_every": 3, "bar": False}
        run = Run(folder, model, optimizer, data(), **given | options)
        for _ in run.epochs():
            for x, y in run.batches():
                logits = model(x)
                run.step(cross_entropy(logits, y))
                run.log(accuracy=logits.argmax(1) == y)
                if run.state.step % 4 == 0:
                    for images, targets in run.evaluate(data()):
                        run.log(val_accuracy=model(images).argmax(1) == targets)
        return lines_of(folder)

    once = body(tmp_path / "once")
    assert sum("val_accuracy" in line for line in once) == 3
    assert body(tmp_path / "twice", verify_steps="1/1") == once
    assert body(tmp_path / "accumulated", verify_steps="1/1", accumulate=2) == body(
        tmp_path / "whole", accumulate=2
    )


def test_the_stream_of_batches_stays_as_it_is(tmp_path: Path) -> None:
    """However many steps are checked: it is not wrapped again for each."""
    streams = set()

    def note(run: Run, x: Tensor, bodies: int) -> None:
        streams.add(id(run._loop.stream))

    train(tmp_path / "run", note, duration="1ep", verify_steps="1/1")
    assert len(streams) == 1


def test_with_halving(tmp_path: Path) -> None:
    """`run.halving()` and the check both undo a global batch."""

    def body(folder: Path, **options: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"duration": "2ep", "batch_size": 8, "bar": False}
        run = Run(folder, model, optimizer, data(), **given | options)
        failed = False
        for _ in run.epochs():
            for x, y in run.batches():
                with run.halving():
                    if run.state.step == 3 and not failed:
                        failed = True
                        raise torch.OutOfMemoryError("out of memory")
                    run.step(cross_entropy(model(x), y))
        return model.state_dict()

    once = body(tmp_path / "once")
    twice = body(tmp_path / "twice", verify_steps="1/2")
    assert all(torch.equal(once[name], value) for name, value in twice.items())


# ---------------------------------------------------------------- a machine that computes wrong


def flip(tensor: Tensor, draw: random.Random) -> None:
    """One bit of a float32 tensor, in place."""
    flat = tensor.detach().view(-1).view(torch.int32)
    place = draw.randrange(len(flat))
    flat[place] ^= 1 << draw.randrange(31)


def faults(kind: str, draw: random.Random, number: int) -> Iterator[Hook]:
    """A hook that flips one bit while computation `number` (1, 2) of step 3 runs."""
    at = 2 + number  # bodies: steps 1, 2, and the computations of step 3

    def hook(run: Run, x: Tensor, bodies: int) -> None:
        if bodies != at:
            return
        model = run.model
        if kind == "batch":
            flip(x, draw)
        elif kind == "weights":
            flip(draw.choice(list(model.parameters())), draw)
        elif kind == "activations":

            def change(module: nn.Module, args: Any, out: Tensor) -> Tensor:
                handle.remove()
                changed = out.clone()
                flip(changed, draw)
                return changed

            handle = draw.choice([model.first, model.norm, model.last]).register_forward_hook(
                change
            )
        else:
            p = draw.choice(list(model.parameters()))

            def wrong(grad: Tensor) -> Tensor:
                tensor_handle.remove()
                changed = grad.clone()
                flip(changed, draw)
                return changed

            tensor_handle = p.register_hook(wrong)

    yield hook


@pytest.mark.parametrize("kind", ["batch", "weights", "activations", "gradients"])
def test_flipped_bits_are_found_and_undone(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    once = train(tmp_path / "once", duration="1ep")
    draw = random.Random(7)
    for number in (1, 2):
        (hook,) = faults(kind, draw, number)
        capfd.readouterr()
        found = train(tmp_path / f"{number}", hook, duration="1ep", verify_steps="1/3")
        said = capfd.readouterr().err
        assert "step 3: " in said and "the run goes on" in said, said
        same(once, found)
        events = (tmp_path / f"{number}" / "events.jsonl").read_text()
        assert "step 3: " in events


def on_ranks(folder: str, kind: str, wrong: int, **options: Any) -> dict[str, Any]:
    """Training on this rank; of rank `wrong` a bit is flipped in the first computation of step 3."""
    hook: Hook | None = None
    if kind and os.environ["RANK"] == f"{wrong}":
        (hook,) = faults(kind, random.Random(5), 1)
    return train(Path(folder), hook, duration="1ep", **options)


@pytest.mark.parametrize("kind", ["weights", "activations"])
def test_a_rank_that_computes_wrong_is_named(
    tmp_path: Path, kind: str, start_ranks: StartRanks, capfd: pytest.CaptureFixture[str]
) -> None:
    once = start_ranks(2, on_ranks, f"{tmp_path}/once", "", 0).results()
    work = functools.partial(on_ranks, verify_steps="1/3")
    calm = start_ranks(2, work, f"{tmp_path}/calm", "", 0).results()
    assert "computation" not in (tmp_path / "calm" / "events.jsonl").read_text()
    found = start_ranks(2, work, f"{tmp_path}/found", kind, 1).results()
    said = (tmp_path / "found" / "events.jsonl").read_text()
    assert "step 3: " in said and "rank 1: " in said and "the run goes on" in said
    for expected, *others in zip(once, calm, found, strict=True):
        for other in others:
            same(expected, other)


def test_three_that_differ_stop_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def hook(run: Run, x: Tensor, bodies: int) -> None:
        if bodies > 3:
            x += bodies

    with pytest.raises(MachineFault) as caught:
        train(tmp_path / "run", hook, verify_steps="1/4", checkpoint_every="1st")
    assert caught.value.code == 70
    said = capfd.readouterr().err
    assert "no two of 3 computations agree" in said and "step 4: " in said
    found = train(tmp_path / "run", verify_steps="1/4", checkpoint_every="1st")
    same(train(tmp_path / "once", checkpoint_every="1st"), found)


@pytest.mark.parametrize("text", ["1/0", "2/100", "0.01", "-1"])
def test_what_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="verify_steps must be a share of the steps"):
        train(tmp_path / "run", verify_steps=text)


def test_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="verify_steps = '1/2' does not work with parts"):
        train(tmp_path / "run", verify_steps="1/2", parts=2)
