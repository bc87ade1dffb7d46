"""`verify_steps`: a step that is computed twice has the bits of one, and a flipped bit is found."""

import copy
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
from flambeau.parallel.ranks import FailedElsewhere
from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm
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
    model = options.pop("prepared", lambda model: model)(Net())
    in_steps = options.pop("in_steps", False)
    given: dict[str, Any] = {"duration": "4ep", "log_every": 3, "bar": False}
    source = options.pop("data", None) or data()
    if source == "loader":
        source = DataLoader(data(), batch_size=5, shuffle=True)
    if isinstance(source, TensorDataset):
        given["batch_size"] = 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(folder, model, optimizer, source, **given | options)
    bodies = 0

    def loss_of(batch: Any) -> Tensor:
        nonlocal bodies
        x, y = batch
        bodies += 1
        if hook is not None:
            hook(run, x, bodies)
        with run.autocast():
            logits = model(x)
            loss = cross_entropy(logits, y)
        run.log(accuracy=logits.argmax(1) == y)
        return loss

    for _ in run.epochs():
        for batch in run.batches() if not in_steps else ():
            run.step(loss_of(batch))
        for _ in run.steps(loss_of) if in_steps else ():
            pass
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


def test_what_the_optimizer_lacks_and_what_it_has_beside_the_model(tmp_path: Path) -> None:
    """A layer without the optimizer keeps its gradients; a parameter of the loss is one, too."""

    def body(folder: Path, **options: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Net()
        scale = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*model.last.parameters(), scale], lr=0.1)
        given = {"duration": "2ep", "batch_size": 4, "bar": False}
        run = Run(folder, model, optimizer, data(), **given | options)
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(cross_entropy(model(x) * scale, y))
        left = model.first.weight.grad
        assert left is not None
        return scale.item(), left.tolist(), model.last.weight.tolist()

    random.seed(0)
    np.random.seed(0)
    once = body(tmp_path / "once")
    random.seed(0)
    np.random.seed(0)
    assert once[0] != 1.0
    assert body(tmp_path / "twice", verify_steps="1/2") == once
    assert "differ" not in (tmp_path / "twice" / "events.jsonl").read_text()


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
    assert (
        "step 3: computations 1 (rank 1) and 2 (rank 0) of the share of rank 0 differ in " in said
    )
    assert "the run goes on: a processor or the memory of the machine of rank 1 (" in said
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


def test_a_run_says_how_many_steps_were_computed_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else nothing would tell a setting that checked each tenth step from one that checked none."""
    steps = 4 * SAMPLES // 4
    train(tmp_path / "some", verify_steps="1/5")
    said = f"verify_steps = '1/5': {steps // 5} steps computed twice since this start, each time to the"
    assert said in capfd.readouterr().err
    assert said in (tmp_path / "some" / "events.jsonl").read_text()
    train(tmp_path / "none", verify_steps="1/100")
    said = (
        f"no step was computed twice since this start, which ends at step {steps}: it is for steps"
    )
    assert said in capfd.readouterr().err
    (hook,) = faults("batch", random.Random(7), 1)
    train(tmp_path / "wrong", hook, duration="1ep", verify_steps="1/3")
    said = "2 steps computed twice since this start, in 1 of them the computations differed"
    assert said in capfd.readouterr().err
    train(tmp_path / "off")
    assert "computed twice" not in capfd.readouterr().err


@pytest.mark.parametrize("text", ["1/0", "2/100", "0.01", "-1"])
def test_what_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="verify_steps must be a share of the steps"):
        train(tmp_path / "run", verify_steps=text)


# ---------------------------------------------------------------- several ranks, parts, shards

IN_PARTS: dict[str, Any] = {"parts": 4, "batch_size": 10}  # 10, 10 and 4 samples


def play(start_ranks: StartRanks, world: int, folder: Path, **options: Any) -> list[dict[str, Any]]:
    if world == 1:
        return [train(folder, **options)]
    found: list[dict[str, Any]] = start_ranks(
        world, functools.partial(train, folder, **options)
    ).results()
    return found


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, IN_PARTS),
        (2, IN_PARTS),
        (2, {"batch_size": 5, "accumulate": 2}),
        (2, {"compression": "fp16"}),
        (2, {"data": "loader", "accumulate": 2}),
        (3, IN_PARTS | {"ema": 0.9, "clip_norm": 0.5}),
        (5, IN_PARTS),  # one rank has a stand-in
        (3, IN_PARTS | {"prepared": convert_sync_batchnorm, "in_steps": True}),
        (3, {"batch_size": 7, "precision": "bf16"}),  # the last 3 samples are those of one rank
        (2, {"prepared": convert_sync_batchnorm}),
    ],
    ids=[
        "parts-1",
        "parts-2",
        "accumulated",
        "compressed",
        "loader",
        "parts-3",
        "parts-5",
        "parts-synced",
        "uneven",
        "synced",
    ],
)
def test_on_ranks_the_bits_are_those_of_one_computation(
    tmp_path: Path, start_ranks: StartRanks, world: int, options: dict[str, Any]
) -> None:
    once = play(start_ranks, world, tmp_path / "once", **options)
    share = "1/1" if world == 3 else "1/2"
    twice = play(start_ranks, world, tmp_path / "twice", verify_steps=share, **options)
    for left, right in zip(once, twice, strict=True):
        same(left, right)
        assert right["bodies"] > left["bodies"]
    events = (tmp_path / "twice" / "events.jsonl").read_text()
    assert "differ" not in events
    is_alone = "parts" not in options and options.get("prepared") is convert_sync_batchnorm
    assert ("each process computes its own share" in events) is is_alone


def always_wrong(wrong: int, run: Run, x: Tensor, bodies: int) -> None:
    """From the fourth step on rank `wrong` computes its last layer wrong, in the same way each time."""
    last = run.model.last
    if run.state.step == 3 and os.environ["RANK"] == f"{wrong}" and not last._forward_hooks:
        last.register_forward_hook(lambda module, args, out: out * (1 + 2**-20))


def until_it_stops(folder: Path, wrong: int, **options: Any) -> tuple[int, int]:
    """The exit code, and the steps done."""
    run: list[Run] = []

    def hook(now: Run, x: Tensor, bodies: int) -> None:
        run[:] = [now]
        always_wrong(wrong, now, x, bodies)

    try:
        train(folder, hook, **options)
    except MachineFault as fault:
        assert isinstance(fault.code, int)
        return fault.code, run[0].state.step
    return 0, run[0].state.step


@pytest.mark.parametrize("options", [IN_PARTS, {"batch_size": 8}], ids=["parts", "shares"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_is_wrong_in_each_computation_is_found(
    tmp_path: Path, start_ranks: StartRanks, world: int, options: dict[str, Any]
) -> None:
    options = options | {"checkpoint_every": "1st"}
    work = functools.partial(until_it_stops, verify_steps="1/4", **options)
    assert start_ranks(world, work, tmp_path / "run", 1).results() == [(70, 3)] * world
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert (
        "step 4: computations 1 (rank 1) and 2 (rank 0) of the share of rank 0 differ in the"
        in said
    )
    assert "(sample " in said
    if world == 2:
        assert "the ranks do not agree, and nothing shows which of them is wrong" in said
    else:
        assert (
            "; rank 1 (" in said and ") disagrees with the other ranks again, and the run" in said
        )
    # Nothing of the step is kept: on sound ranks the run goes on as if it had not been.
    goes_on = play(start_ranks, world, tmp_path / "run", verify_steps="1/4", **options)
    same(play(start_ranks, world, tmp_path / "once", **options)[0], goes_on[0])


def test_a_weight_that_went_wrong_between_checked_steps_is_seen_beside_other_ranks(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    def hook(run: Run, x: Tensor, bodies: int) -> None:
        if bodies == 2 and os.environ["RANK"] == "1":
            run.model.last.weight.data.view(torch.int32)[0, 0] ^= 1 << 10

    def work() -> Any:
        with pytest.raises(MachineFault) as caught:
            train(tmp_path / "run", hook, batch_size=8, verify_steps="1/4")
        return caught.value.code

    assert start_ranks(3, work).results() == [70] * 3
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert "; rank 1 (" in said and ") disagrees with the other ranks again, and the run" in said


def test_an_evaluation_before_a_step_has_the_statistics_of_rank_0(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    """And each evaluation one line, though the body is done twice, first for another rank."""

    def hook(run: Run, x: Tensor, bodies: int) -> None:
        if run.state.step % 4 == 3:
            for images, targets in run.evaluate(data()):
                run.log(before_accuracy=run.model(images).argmax(1) == targets)

    def work(name: str, **options: Any) -> dict[str, Any]:
        return train(tmp_path / name, hook, batch_size=8, **options)

    once = start_ranks(2, work, "once").results()
    twice = start_ranks(2, functools.partial(work, verify_steps="1/2"), "twice").results()
    for left, right in zip(once, twice, strict=True):
        same(left, right)
    assert sum("before_accuracy" in line for line in once[0]["lines"]) == 3


class Own:
    """What a collate function may make: each process has its own, and unpacks it as a pair."""

    def __init__(self, rows: Any) -> None:
        self.pair = torch.utils.data.default_collate(rows)
        self.mine = lambda: None  # which cannot be pickled

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.pair)

    def __deepcopy__(self, memo: Any) -> "Own":
        copied = copy.copy(self)
        copied.pair = copy.deepcopy(self.pair, memo)
        return copied


class Remembers(nn.Module):
    """Its output depends on a buffer that earlier micro-batches have written."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.3)
        return self.last(x - self.mean)


@pytest.mark.parametrize("has_scale", [False, True])
def test_buffers_and_parameters_beside_the_model(
    tmp_path: Path, start_ranks: StartRanks, has_scale: bool
) -> None:
    """Buffers of rank 0 count, whoever computes its share; the scale is another one on each rank."""

    def work(name: str, **options: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Remembers()
        scale = nn.Parameter(torch.ones(()), requires_grad=has_scale)
        beside = [scale] if has_scale else []
        optimizer = torch.optim.SGD([*model.parameters(), *beside], lr=0.1)
        given = {"duration": "2ep", "batch_size": 6, "accumulate": 2, "bar": False}
        run = Run(tmp_path / name, model, optimizer, data(), **given | options)
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(cross_entropy(model(x) * scale, y))
        return model.mean.tolist(), model.last.weight.tolist(), scale.item()

    once = start_ranks(3, work, "once").results()
    twice = start_ranks(3, functools.partial(work, verify_steps="1/1"), "twice").results()
    assert twice == once
    events = (tmp_path / "twice" / "events.jsonl").read_text()
    assert "differ" not in events
    assert ("the optimizer has parameters beside the model's" in events) is has_scale


def test_what_cannot_be_sent_stays_where_it_is(tmp_path: Path, start_ranks: StartRanks) -> None:
    options = {"collate": Own, "batch_size": 8, "duration": "1ep"}
    once = play(start_ranks, 2, tmp_path / "once", **options)
    twice = play(start_ranks, 2, tmp_path / "twice", verify_steps="1/2", **options)
    same(once[1], twice[1])
    assert twice[1]["bodies"] == once[1]["bodies"] + 1
    assert (
        "cannot be sent to another process (" in (tmp_path / "twice" / "events.jsonl").read_text()
    )


def test_powersgd_is_refused(tmp_path: Path, start_ranks: StartRanks) -> None:
    def refused() -> str:
        with pytest.raises((InputError, FailedElsewhere)) as caught:
            train(tmp_path / "run", verify_steps="1/2", compression="powersgd")
        return str(caught.value)

    for said in start_ranks(2, refused).results():
        assert "verify_steps = '1/2' does not work with compression = 'powersgd'" in said
