"""Run in one process: stopped and gone on with at every point, in every factorisation, and misused."""

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flambeau.errors import InputError
from flambeau.parallel.preemption import EXIT_CODE
from flambeau.recipes.checkpoints.atomic_checkpoint import from_bytes, latest_checkpoint
from flambeau.recipes.data.samplers import BalancedSampler, EpochSampler
from flambeau.recipes.parallel.local_ranks import run_ranks
from flambeau.run.loop.nan_guard import NotFinite
from flambeau.run.run import Run

WALL_CLOCK = {"images_per_s", "data_wait"}


class Stop(Exception):
    """Stands for a kill: nothing of the run is saved or closed on the way out."""


def data(length: int = 46) -> TensorDataset:
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] + 0.3 * x[:, 1] > 0).long())


def network(*, batch_norm: bool = True, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(7)
    norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


def start(folder: Path, model: nn.Module | None = None, train: Any = None, **settings: Any) -> Run:
    model = network() if model is None else model
    settings = {
        "duration": "3ep", "accumulate": 2, "seed": 3, "ema": 0.9, "clip_norm": 1.0,
        "schedule": "cosine", "warmup": "2st", "log_every": 4, "checkpoint_every": "4st", "bar": False,
        **({} if isinstance(train, DataLoader) else {"batch_size": 4}), **settings,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.pop("lr", 0.05), fused=True)
    return Run(folder, model, optimizer, data() if train is None else train, **settings)


def train(run: Run, *, stop_after: int | None = None, in_evaluation: bool = False) -> None:
    """A user's loop, which can be made to die after a number of forward passes."""
    passes = 0
    for _ in run.epochs():
        for x, y in run.batches():
            loss = F.cross_entropy(run.model(x), y)
            run.log(train_accuracy=run.model(x).argmax(1) == y)
            run.step(loss)
            passes += 1
            if passes == stop_after:
                raise Stop
        for batch, (x, y) in enumerate(run.evaluate(data(19))):
            run.log(
                val_loss=F.cross_entropy(run.model(x), y), val_accuracy=run.model(x).argmax(1) == y
            )
            if in_evaluation and batch == 1:
                raise Stop


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves, without what the wall clock says."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    checkpoint, damaged = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    assert not damaged
    state = from_bytes(checkpoint.files["training_state.pt"])
    state.pop("metrics_bytes")  # the length of the figures that the clock makes
    return {
        "step": checkpoint.folder.name,
        "rows": [{k: v for k, v in row.items() if k not in WALL_CLOCK} for row in rows],
        "state": state,
        "files": {k: v for k, v in checkpoint.files.items() if k.endswith("safetensors")},
        "weights": (folder / "model.safetensors").read_bytes(),
        "result": json.loads((folder / "result.json").read_text()),
    }


def assert_equal(got: Any, expected: Any, place: str = "") -> None:
    """Equal to the bit, tensors and NaN included."""
    assert type(got) is type(expected), place
    if isinstance(expected, dict):
        assert list(got) == list(expected), place
        for key in expected:
            assert_equal(got[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), place
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_equal(a, b, f"{place}[{index}]")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=place)
    else:
        assert got == expected, place


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(start(folder))
    return outcome(folder)


def test_the_undisturbed_run_does_what_it_says(undisturbed: dict[str, Any]) -> None:
    rows = undisturbed["rows"]
    assert undisturbed["step"] == "step-00000018"  # 46 samples, 8 a step: 6 steps an epoch
    assert [r["step"] for r in rows if "train_loss" in r] == [4, 6, 8, 12, 16, 18]
    assert [r["step"] for r in rows if "val_loss" in r] == [6, 12, 18]
    assert [r["epoch"] for r in rows if "val_loss" in r] == [0, 1, 2]
    assert undisturbed["result"]["weights"] == "ema"
    assert undisturbed["weights"] == undisturbed["files"]["ema.safetensors"]
    assert undisturbed["files"]["ema.safetensors"] != undisturbed["files"]["model.safetensors"]
    assert rows[-1]["val_accuracy"] > 0.6


@pytest.mark.parametrize("stop_after", [1, 2, 3, 7, 8, 9, 11, 12, 13, 22, 24, 35, 36])
def test_a_stop_after_any_forward_pass_changes_nothing(
    tmp_path: Path, undisturbed: dict[str, Any], stop_after: int
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(start(folder), stop_after=stop_after)
    disturb_generators()
    model = nn.Sequential(*network().children())  # other weights would be overwritten, too
    for p in model.parameters():
        nn.init.normal_(p)
    if stop_after < 8:  # nothing but the first checkpoint exists
        assert latest_checkpoint(folder / "checkpoints")[0].folder.name == "step-00000000"  # type: ignore[union-attr]
    train(start(folder, model))
    assert_equal(outcome(folder), undisturbed)


def test_stops_in_evaluations_and_many_of_them(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(start(folder), in_evaluation=True)
    for stop_after in (5, 3, 9, 1, 4):
        disturb_generators()
        with pytest.raises(Stop):
            train(start(folder), stop_after=stop_after)
    with pytest.raises(Stop):
        train(start(folder), in_evaluation=True)
    train(start(folder))
    assert_equal(outcome(folder), undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU, signal.SIGINT])
@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_a_signal_saves_within_a_step(
    tmp_path: Path, undisturbed: dict[str, Any], number: int, where: str, capfd: Any
) -> None:
    folder = tmp_path / "run"
    run, passes = start(folder), 0
    with pytest.raises(SystemExit) as caught:
        for _ in run.epochs():
            for x, y in run.batches():
                loss = F.cross_entropy(run.model(x), y)
                run.log(train_accuracy=run.model(x).argmax(1) == y)
                passes += 1
                if passes == 9 and where == "training":
                    os.kill(os.getpid(), number)
                run.step(loss)
            for _ in run.evaluate(data(19)):
                assert where == "evaluation"
                os.kill(os.getpid(), number)
    assert caught.value.code == EXIT_CODE == 75
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    text = capfd.readouterr().err
    assert "the same command goes on" in text
    expected = "step-00000005" if where == "training" else "step-00000006"
    assert latest_checkpoint(folder / "checkpoints")[0].folder.name == expected  # type: ignore[union-attr]
    train(start(folder))
    assert_equal(outcome(folder), undisturbed)


@pytest.mark.parametrize("stops", [["first"], ["second"], ["second", "first", "second"]])
def test_a_stop_in_one_of_two_evaluations_writes_each_line_once(
    tmp_path: Path, stops: list[str]
) -> None:
    """Also the line of an evaluation between two steps, which nobody makes again."""

    def go(folder: Path, stop_in: str | None) -> None:
        run = start(folder, duration="2ep")
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(run.model(x), y))
                if run.state.step in (2, 6):
                    for _ in run.evaluate(data(19)):
                        run.log(between=float(run.state.step))
            for name in ("first", "second"):
                for x, y in run.evaluate(data(19)):
                    run.log(**{name: F.cross_entropy(run.model(x), y)})
                    if name == stop_in:
                        os.kill(os.getpid(), signal.SIGTERM)
                        stop_in = None

    go(tmp_path / "whole", None)
    for stop_in in stops:
        with pytest.raises(SystemExit):
            go(tmp_path / "stopped", stop_in)
    go(tmp_path / "stopped", None)
    assert_equal(outcome(tmp_path / "stopped"), outcome(tmp_path / "whole"))


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("stop_at", [3, 4, 7, 8, 9, 13, 16])
def test_what_the_body_does_after_a_step_belongs_to_its_checkpoint(
    tmp_path: Path, stop_at: int
) -> None:
    """An evaluation in mid-epoch and a counter, both where a checkpoint is due (4, 8, ...) and elsewhere."""

    def go(folder: Path, stop_at: int) -> int:
        counter = Counter()
        run = start(
            folder, best="val_loss", state={"seen": counter}, ema=0.0, batch_size=8, accumulate=1
        )
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(run.model(x), y))
                if run.state.step % 2 == 0:
                    for x_, y_ in run.evaluate(data(19)):
                        run.log(val_loss=F.cross_entropy(run.model(x_), y_))
                counter.count += len(x)
                if run.state.step == stop_at + 1:
                    raise Stop
        return counter.count

    assert go(tmp_path / "whole", 99) == 3 * 46
    with pytest.raises(Stop):
        go(tmp_path / "stopped", stop_at)
    assert go(tmp_path / "stopped", 99) == 3 * 46
    assert_equal(outcome(tmp_path / "stopped"), outcome(tmp_path / "whole"))


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(start(folder))
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
    run = start(folder)
    assert list(run.epochs()) == []
    assert run.result is not None
    assert run.result.weights == "ema"
    after = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
    assert {k: v for k, v in after.items() if k.name != ".lock"} == {
        k: v for k, v in before.items() if k.name != ".lock"
    }


@pytest.mark.parametrize(("batch_size", "accumulate"), [(16, 1), (4, 4), (2, 8), (5, 3), (8, 2)])
@pytest.mark.parametrize("length", [46, 49, 33])
def test_every_factorisation_gives_the_same_curve(
    tmp_path: Path, batch_size: int, accumulate: int, length: int
) -> None:
    """Uneven last batches of 14, 1 and 1 samples; (5, 3) is another global batch and must differ."""

    def curve(folder: Path, **settings: Any) -> tuple[list[float], Tensor]:
        model = network(batch_norm=False, dropout=0.0)
        run = start(folder, model, data(length), log_every=1, **settings)
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(model(x), y))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [r["train_loss"] for r in rows], torch.cat(
            [p.detach().flatten() for p in model.parameters()]
        )

    losses, weights = curve(tmp_path / "one", batch_size=16, accumulate=1)
    others, other_weights = curve(tmp_path / "other", batch_size=batch_size, accumulate=accumulate)
    if batch_size * accumulate == 16:
        torch.testing.assert_close(others, losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other_weights, weights, rtol=1e-3, atol=1e-4)
    else:
        assert others[: len(losses)] != pytest.approx(losses, rel=1e-4)


def test_the_run_equals_a_loop_written_by_hand(tmp_path: Path) -> None:
    """Same batches, torch's own clipping, schedule and average."""
    # No BatchNorm: the bias before one has a gradient of rounding errors, which Adam makes large.
    model = network(batch_norm=False, dropout=0.0)
    run = start(tmp_path / "run", model, accumulate=1, batch_size=8)
    seen = []
    for _ in run.epochs():
        for x, y in run.batches():
            seen.append((x.clone(), y.clone()))
            run.step(F.cross_entropy(model(x), y))
    other = network(batch_norm=False, dropout=0.0)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.05)
    total = len(seen)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (s + 1) / 3 if s < 2 else 0.5 * (1 + np.cos(np.pi * (s - 2) / (total - 2))),
    )
    average: dict[str, Tensor] = {k: v.clone() for k, v in other.state_dict().items()}
    for step, (x, y) in enumerate(seen):
        F.cross_entropy(other(x), y).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        decay = min(0.9, (1 + step) / (10 + step))
        for k, v in other.state_dict().items():
            average[k] = (
                decay * average[k] + (1 - decay) * v if v.is_floating_point() else v.clone()
            )
    torch.testing.assert_close(
        dict(model.state_dict()), dict(other.state_dict()), rtol=1e-4, atol=1e-5
    )
    published = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    torch.testing.assert_close(published, average, rtol=1e-4, atol=1e-5)


def test_each_sample_once_in_evaluation_and_nothing_of_the_model_changes(tmp_path: Path) -> None:
    model = network()
    model[1].eval()  # frozen statistics: they must stay frozen after an evaluation
    run = start(tmp_path / "run", model, duration="1ep", ema=0.9)
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(model(x), y))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        random.seed(1), np.random.seed(1)
        state = torch.get_rng_state()
        rows = []
        for x, _y in run.evaluate(data(19)):
            assert not model.training
            assert not torch.is_grad_enabled()
            assert not torch.equal(model[0].weight, before["0.weight"])  # the average is in
            rows.append(x.clone())
            torch.rand(3), random.random()
            run.log(val_first=x[:, 0])
        torch.testing.assert_close(torch.cat(rows), data(19).tensors[0], rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), state)
        drawn = random.random()
        random.seed(1)
        assert drawn == random.random()
        assert_equal(dict(model.state_dict()), before)
        assert [m.training for m in model] == [True, False, True, True, True]
    assert run.result is not None
    assert run.result.metrics["val_first"] == pytest.approx(
        data(19).tensors[0][:, 0].double().mean().item()
    )


def test_the_best_is_published_and_kept(tmp_path: Path) -> None:
    folder, values = tmp_path / "run", iter([0.5, 0.9, 0.7, float("nan"), 0.9, 0.1])
    run = start(folder, duration="6ep", ema=0.0, keep=1)
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(run.model(x), y))
        value = next(values)
        for _ in run.evaluate(data(4)):
            run.log(val_accuracy=value)
    assert run.result is not None
    assert (run.result.weights, run.result.step, run.result.metrics) == (
        "best",
        30,
        {"val_accuracy": 0.9},
    )
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step-00000030",
        "step-00000036",
    ]
    kept = folder / "checkpoints" / "step-00000030" / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == kept.read_bytes()


def test_a_damaged_best_gives_way_to_the_last(tmp_path: Path, capfd: Any) -> None:
    folder, values = tmp_path / "run", iter([0.9, 0.5, 0.7])
    run = start(folder, ema=0.0)
    for epoch in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(run.model(x), y))
        value = next(values)
        for _ in run.evaluate(data(4)):
            run.log(val_accuracy=value)
        if epoch == 2:
            best = folder / "checkpoints" / "step-00000006" / "model.safetensors"
            best.write_bytes(best.read_bytes()[:-1])
    assert run.result is not None
    assert (run.result.weights, run.result.step) == ("last", 18)
    assert "best weights cannot be published" in capfd.readouterr().err


def test_lower_is_better_and_the_last_where_nothing_is_measured(tmp_path: Path) -> None:
    values = iter([0.5, 0.2, 0.7])
    run = start(tmp_path / "min", ema=0.0, best="val_loss", best_mode="min")
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(run.model(x), y))
        value = next(values)
        for _ in run.evaluate(data(4)):
            run.log(val_loss=value)
    assert run.result is not None
    assert run.result.step == 12
    run = start(tmp_path / "last", ema=0.0, duration="7st")
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(run.model(x), y))
    assert run.result is not None
    assert (run.result.weights, run.result.step) == ("last", 7)  # in the middle of the second epoch


def test_objects_of_the_user_come_along(tmp_path: Path) -> None:
    def loop(run: Run, counter: Counter, stop_at: int | None) -> None:
        for _ in run.epochs():
            for x, y in run.batches():
                counter.count += len(x)
                run.step(F.cross_entropy(run.model(x), y))
                if run.state.step == stop_at:
                    raise Stop

    first, second = Counter(), Counter()
    with pytest.raises(Stop):
        loop(start(tmp_path / "run", state={"seen": first}), first, 10)
    loop(start(tmp_path / "run", state={"seen": second}), second, None)
    assert second.count == 3 * 46
    with pytest.raises(InputError, match="seen"):
        start(tmp_path / "run")


def test_ready_batches_and_workers_resume_to_the_same_bits(tmp_path: Path) -> None:
    class Drawing(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x, y = data()[index]
            return x + 0.1 * torch.randn(6) + np.float32(np.random.rand()), y

    def loader(workers: int) -> DataLoader[Any]:
        return DataLoader(data(), batch_size=4, shuffle=True, num_workers=workers)

    def loop(run: Run, stop_at: int | None = None) -> bytes:
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(run.model(x), y))
                if run.state.step == stop_at:
                    raise Stop
        return (run.folder.path / "model.safetensors").read_bytes()

    sources: dict[str, Callable[[int], Any]] = {
        "loader": loader,
        "dataset": lambda workers: Drawing(),
    }
    for name, source in sources.items():
        expected = loop(start(tmp_path / f"{name}-whole", train=source(0)))
        with pytest.raises(Stop):
            loop(start(tmp_path / name, train=source(0)), stop_at=7)
        with pytest.raises(Stop):
            loop(
                start(
                    tmp_path / name,
                    train=source(2),
                    **({"workers": 2} if name == "dataset" else {}),
                ),
                10,
            )
        assert loop(start(tmp_path / name, train=source(0))) == expected


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_resumes_with_its_scale(tmp_path: Path, precision: str) -> None:
    def loop(run: Run, stop_at: int | None = None) -> dict[str, Any]:
        for _ in run.epochs():
            for x, y in run.batches():
                with run.autocast():
                    out = run.model(x)
                assert out.dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
                # An overflow of the scaled gradient now and then, as happens in fp16.
                factor = 1e35 if precision == "fp16" and run.state.step in (1, 9) else 1.0
                run.step(F.cross_entropy(out.float(), y) * factor)
                if run.state.step == stop_at:
                    raise Stop
        return outcome(run.folder.path)

    expected = loop(start(tmp_path / "whole", precision=precision))
    if precision == "fp16":
        assert float(expected["state"]["amp"]["scale"]) == 65536 / 4
        assert expected["rows"][0]["loss_scale"] == 65536 / 2
    with pytest.raises(Stop):
        loop(start(tmp_path / "run", precision=precision), stop_at=10)
    assert_equal(loop(start(tmp_path / "run", precision=precision)), expected)


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("fused", [True, False])
def test_not_finite_leaves_the_weights_of_the_step_before(
    tmp_path: Path, what: str, fused: bool
) -> None:
    model = network(batch_norm=False, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    run = Run(
        tmp_path / "run",
        model,
        optimizer,
        data(),
        duration="3ep",
        batch_size=4,
        log_every=7,
        bar=False,
    )
    good: dict[str, Tensor] = {}
    with pytest.raises(NotFinite, match="step 9 "):
        for _ in run.epochs():
            for x, y in run.batches():
                loss = F.cross_entropy(model(x), y)
                if run.state.step == 8:
                    good = {k: v.clone() for k, v in model.state_dict().items()}
                    # sqrt(0) * 0: the loss is what it was, its gradient is NaN
                    loss = (
                        loss * float("inf")
                        if what == "loss"
                        else loss + (model[0].weight * 0).sum().sqrt()
                    )
                run.step(loss)
    assert run.state.step == 12  # noticed when the epoch's line was due, and frozen until then
    assert_equal(dict(model.state_dict()), good)
    (path,) = (tmp_path / "run").glob("not-finite-*.json")
    record = json.loads(path.read_text())
    assert record["step"] == 9
    assert record["indices"] == run._parts.loader.batch_indices(epoch=0, batch=8)
    assert record["checkpoint"] == "step-00000000"
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000000"]  # nothing was saved after it


def explode(run: Run, *, when: Callable[[Run], bool], stop_at: int | None = None) -> None:
    """A user's loop whose loss is infinite in some steps; it dies when `stop_at` steps have been made."""
    made = 0
    for _ in run.epochs():
        for x, y in run.batches():
            loss = F.cross_entropy(run.model(x), y)
            run.step(loss * float("inf") if when(run) else loss)
            made += 1
            if made == stop_at:
                raise Stop
        for x, y in run.evaluate(data(19)):
            run.log(val_accuracy=run.model(x).argmax(1) == y)


def halves_after(step: int) -> Callable[[int], float]:
    return lambda done: 0.5 if done >= step else 1.0


SURVIVES: dict[str, Any] = {
    "schedule": "constant", "warmup": "0st", "accumulate": 1, "log_every": 5, "keep": 9,
    "on_nan": "rollback",
}  # fmt: skip


@pytest.mark.parametrize("every", ["5st", "2ep"])  # back within the epoch, or into one before
def test_rollback_goes_on_from_before_with_half_the_rate(tmp_path: Path, every: str) -> None:
    # 12 steps an epoch: the 22nd is bad, which the line of step 24 or 25 tells.
    settings = {**SURVIVES, "checkpoint_every": every, "best": "none", "best_mode": "max"}
    run = start(tmp_path / "run", **settings)
    explode(run, when=lambda run: run.state.step == 21 and run.state.rollbacks == 0)
    back_to = 20 if every == "5st" else 0
    # Independent of it: a run that had half the rate from there on.
    expected = start(
        tmp_path / "expected", **{**settings, "schedule": halves_after(back_to), "warmup": "0st"}
    )
    explode(expected, when=lambda run: False)
    assert_equal(dict(run.model.state_dict()), dict(expected.model.state_dict()))
    assert run.state.order_crc == expected.state.order_crc
    rows, good = outcome(tmp_path / "run")["rows"], outcome(tmp_path / "expected")["rows"]
    rollback = {
        "step": back_to,
        "epoch": back_to // 12,
        "rollback": 1,
        "bad_step": 22,
        "lr_scale": 0.5,
    }
    assert [row for row in rows if "rollback" in row] == [rollback]
    assert [row for row in rows if "rollback" not in row] == good
    assert (
        json.loads((tmp_path / "run" / "not-finite-step-00000022.json").read_text())["step"] == 22
    )


def test_rollback_is_the_same_after_kills(tmp_path: Path) -> None:
    def bad(run: Run) -> bool:
        return (run.state.step == 13 and run.state.rollbacks == 0) or (
            run.state.step == 29 and run.state.lr_scale > 0.25
        )

    explode(start(tmp_path / "whole", **SURVIVES), when=bad)
    expected = outcome(tmp_path / "whole")
    assert expected["state"]["lr_scale"] == 0.25
    assert [row["bad_step"] for row in expected["rows"] if "rollback" in row] == [14, 30]
    for stops in ((14, 8, 9), (17, 16)):  # right after a bad step, after a rollback, ...
        folder = tmp_path / str(stops)
        for stop_at in stops:
            with pytest.raises(Stop):
                explode(start(folder, **SURVIVES), when=bad, stop_at=stop_at)
        explode(start(folder, **SURVIVES), when=bad)
        assert_equal(outcome(folder), expected)


@pytest.mark.parametrize("stops", [[9], [11], [12], [11, 13], [9, 10, 13]])
@pytest.mark.parametrize("keep", [1, 9])
def test_rollback_is_the_same_after_signals(tmp_path: Path, stops: list[int], keep: int) -> None:
    settings = {**SURVIVES, "keep": keep}

    def bad(run: Run) -> bool:
        return run.state.step == 14 and run.state.rollbacks == 0

    def stops_at(step: int) -> Callable[[Run], bool]:
        def when(run: Run) -> bool:
            if run.state.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return bad(run)

        return when

    explode(start(tmp_path / "whole", **settings), when=bad)
    for step in stops:
        with pytest.raises(SystemExit):
            explode(start(tmp_path / "stopped", **settings), when=stops_at(step))
    explode(start(tmp_path / "stopped", **settings), when=bad)
    assert_equal(outcome(tmp_path / "stopped"), outcome(tmp_path / "whole"))


def test_rollback_gives_up_after_three_times(tmp_path: Path) -> None:
    run = start(tmp_path / "run", **SURVIVES)
    with pytest.raises(NotFinite, match=r"step 14 .*, after 3 rollbacks; the weights are those"):
        explode(run, when=lambda run: run.state.step == 13)
    assert run.optimizer.param_groups[0]["lr"] == 0.05 / 8
    *_, event = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert event["step"] == 14 and "after 3 rollbacks" in event["text"]
    assert "after 3 rollbacks" in (tmp_path / "run" / "report.html").read_text()
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["lr_scale"] for row in rows if "rollback" in row] == [0.5, 0.25, 0.125]
    # A resume may be given another word, and meets the same step.
    with pytest.raises(NotFinite, match="infinite; the weights"):
        explode(
            start(tmp_path / "run", **{**SURVIVES, "on_nan": "stop"}),
            when=lambda run: run.state.step == 13,
        )


def test_a_bad_step_is_explained_as_it_was(tmp_path: Path) -> None:
    model = network()
    seen: list[tuple[Tensor, list[str], float, int]] = []

    def explain(batch: Any, names: Any, step: int) -> list[str]:
        seen.append((batch[0], list(names), float(model(batch[0]).detach().sum()), step))
        return ["the loss"] if step == 13 else []

    run = start(tmp_path / "run", model, **{**SURVIVES, "on_nan": "stop", "explain": explain})
    sums: list[float] = []
    with pytest.raises(NotFinite, match=r"step 14 .* NaN or infinite: the loss; the weights are"):
        for _ in run.epochs():
            for x, _ in run.batches():
                out = model(x).sum()
                sums.append(float(out.detach()))
                run.step(out * (float("inf") if run.state.step == 13 else 0.01))
    ((batch, names, total, step),) = seen
    bad = json.loads((tmp_path / "run" / "not-finite-step-00000014.json").read_text())
    assert bad["findings"] == ["the loss"]
    assert names == bad["samples"]
    torch.testing.assert_close(batch, data()[bad["indices"]][0])
    assert total == sums[13]  # with the weights, and the dropout, of then
    assert step == 13


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"duration": "3"}, "duration"),
        ({"schedule": "cosinus"}, "schedule"),
        ({"warmup": "100%"}, "warmup"),
        ({"schedule": lambda step: 1.0}, "warmup"),
        ({"checkpoint_every": "soon"}, "checkpoint_every"),
        ({"on_nan": "skip"}, "on_nan must be one of stop, rollback; got 'skip'"),
    ],
)
def test_refused_settings(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        start(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_another_configuration_or_other_data_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(start(folder), stop_after=9)
    with pytest.raises(InputError, match="seed: 3 there, 4 now"):
        start(folder, seed=4)
    with pytest.raises(InputError, match=r"\(lr: 0.05 there, 0.1 now\)"):
        start(folder, lr=0.1)
    with pytest.raises(InputError, match="learning"):
        start(folder, config={"learning": "fast"})
    with pytest.raises(InputError, match="46 samples"):
        start(folder, train=data(45))
    with pytest.raises(InputError, match="another model"):
        start(folder, nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)))
    train(start(folder, keep=5, checkpoint_every="1ep", workers=0))  # these may change


def test_a_sampler_chooses_the_samples(tmp_path: Path) -> None:
    """Of a data set; stopped and gone on with, they are those of a run that was never stopped."""
    sampler = BalancedSampler([0] * 40 + [1] * 6, 37, seed=8)
    run = start(tmp_path / "whole", sampler=sampler)
    assert run.plan.steps_per_epoch == 5  # of 8 samples
    train(run)
    with pytest.raises(Stop):
        train(start(tmp_path / "stopped", sampler=sampler), stop_after=4)
    train(start(tmp_path / "stopped", sampler=sampler, workers=1))
    assert_equal(outcome(tmp_path / "stopped"), outcome(tmp_path / "whole"))
    train(start(tmp_path / "other", sampler=EpochSampler(37, seed=8)))
    with pytest.raises(AssertionError):
        assert_equal(outcome(tmp_path / "other"), outcome(tmp_path / "whole"))

    with pytest.raises(Stop):
        train(start(tmp_path / "changed", sampler=sampler), stop_after=4)
    with pytest.raises(InputError, match="sampler: 'BalancedSampler, 37 samples"):
        start(tmp_path / "changed", sampler=EpochSampler(37, seed=8))
    loader = DataLoader(data(), batch_size=4)
    with pytest.raises(InputError, match="sampler would have no effect: the data are a loader"):
        start(tmp_path / "loader", train=loader, sampler=sampler)


def test_an_optimizer_that_computes_the_loss_itself_is_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(InputError, match="LBFGS computes the loss several times per step"):
        Run(tmp_path / "run", model, optimizer, data(), duration="1ep", batch_size=4, bar=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_clipping_that_was_left_in_the_loop_is_said_once(
    tmp_path: Path, capfd: Any, clip_norm: float
) -> None:
    run = start(tmp_path / "a", clip_norm=clip_norm, duration="2ep")
    for _ in run.epochs():
        for x, y in run.batches():
            loss = F.cross_entropy(run.model(x), y)
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            run.step(loss)
    said = capfd.readouterr().err
    assert (
        said.count("clip_grad_norm_ in test_clipping_that_was_left_in_the_loop_is_said_once") == 1
    )
    assert ("Run clips to clip_norm=1" if clip_norm else "give Run clip_norm=") in said

    def loss_of(batch: Any) -> Tensor:
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        return F.cross_entropy(run.model(batch[0]), batch[1])

    run = start(tmp_path / "b", clip_norm=clip_norm, duration="2ep")
    steps_through(run, loss_of)
    assert capfd.readouterr().err.count("clip_grad_norm_ in loss_of") == 1
    train(start(tmp_path / "c", clip_norm=clip_norm))
    assert "clip_grad" not in capfd.readouterr().err


def steps_through(run: Run, loss_of: Callable[[Any], Tensor]) -> None:
    for _ in run.epochs():
        for _ in run.steps(loss_of):
            pass


def misuse_no_step(run: Run) -> Iterator[None]:
    for _ in run.batches():
        yield


def test_misuse_is_named(tmp_path: Path) -> None:
    run = start(tmp_path / "a")
    with pytest.raises(RuntimeError, match=r"run.step\(loss\) was not called"):
        for _ in run.epochs():
            for _ in run.batches():
                pass
    run = start(tmp_path / "b")
    with pytest.raises(RuntimeError, match="belongs in `for"):
        run.step(torch.zeros(()))
    run = start(tmp_path / "c")
    with pytest.raises(ValueError, match="0-d"):
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(run.model(x), y, reduction="none"))
    run = start(tmp_path / "d")
    with pytest.raises(RuntimeError, match="before its end"):
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(run.model(x), y))
                break
    run = start(tmp_path / "e")
    with pytest.raises(RuntimeError, match="before its end"):
        for _ in run.epochs():
            pass


def test_a_lost_journal_is_said(tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(start(folder), stop_after=25)
    (folder / "metrics.jsonl").write_text("")
    train(start(folder))
    assert "lines are lost" in capfd.readouterr().err


def test_a_compiled_model_is_saved_as_itself(tmp_path: Path) -> None:
    model = network()
    run = start(tmp_path / "run", torch.compile(model, backend="eager"), duration="4st")
    train(run)
    weights = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    assert set(weights) == set(model.state_dict())


def disturb_generators() -> None:
    torch.manual_seed(random.randrange(1000))
    np.random.seed(5)
    random.seed(6)


class Rotary(nn.Module):
    """Keeps tables by length, as rotary embeddings and relative positions do."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.linear, self.is_buffer = nn.Linear(6, 2), buffer
        self.register_buffer("table", torch.ones(0), persistent=False)
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        logits = self.linear(x)
        if self.is_buffer:
            if len(self.table) < len(x):
                self.table = torch.arange(1.0, len(x) + 1)
            return logits * self.table[: len(x), None]
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(1.0, len(x) + 1)[:, None]
        return logits * self.tables[len(x)]


@pytest.mark.parametrize("buffer", [True, False])
def test_a_model_may_keep_what_an_evaluation_made(tmp_path: Path, buffer: bool) -> None:
    run = start(tmp_path / "run", Rotary(buffer=buffer), batch_size=4, accumulate=1)
    for _ in run.epochs():
        for _ in run.evaluate(TensorDataset(torch.ones(4, 6))):
            assert not run.model(torch.ones(4, 6)).requires_grad
        for x, y in run.batches():
            run.step(F.cross_entropy(run.model(x), y))


def train_until(run: Run, *, stop_at: int, die_at: int = -1) -> list[int]:
    """Ends the run at a step; the steps of which an evaluation was seen."""
    evaluated = []
    for _ in run.epochs():
        for x, y in run.batches():
            if run.state.step + 1 == stop_at:
                run.stop()  # with accumulation, perhaps in the middle of a step
            run.step(F.cross_entropy(run.model(x), y))
            if run.state.step == die_at:
                os.kill(os.getpid(), signal.SIGTERM)
        for x, y in run.evaluate(data(19)):
            run.log(val_loss=F.cross_entropy(run.model(x), y))
        evaluated.append(run.state.step)
    return evaluated


@pytest.mark.parametrize("stop_at", [1, 3, 6, 7, 18])
def test_stop_ends_the_run_as_a_finished_one(tmp_path: Path, capfd: Any, stop_at: int) -> None:
    run = start(tmp_path / "run", ema=0.0, best="val_loss")
    evaluated = train_until(run, stop_at=stop_at)
    assert evaluated == [*range(6, stop_at, 6), stop_at]
    assert run.result is not None
    assert run.state.step == stop_at
    assert run.epochs_since_best == (stop_at - (run.state.best.step or 0)) // 6
    if stop_at < 18:
        assert f"the run ends at step {stop_at} of 18" in capfd.readouterr().err
    again = start(tmp_path / "run", ema=0.0, best="val_loss")
    assert list(again.epochs()) == []
    assert again.result == run.result


def test_stop_is_kept_by_a_checkpoint(tmp_path: Path) -> None:
    train_until(start(tmp_path / "whole"), stop_at=8)
    with pytest.raises(SystemExit):
        train_until(start(tmp_path / "run"), stop_at=8, die_at=8)
    run = start(tmp_path / "run")
    assert run.result is None
    assert train_until(run, stop_at=-1) == [8]
    stopped, whole = outcome(tmp_path / "run"), outcome(tmp_path / "whole")
    for found in stopped, whole:  # one checkpoint is of before the evaluation, which was made again
        for name in ("epoch", "position", "metrics", "best", "planned"):
            del found["state"][name]
    assert_equal(stopped, whole)


def test_what_a_break_out_of_the_epochs_means(tmp_path: Path, capfd: Any) -> None:
    run = start(tmp_path / "run")
    for epoch in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(run.model(x), y))
        if epoch == 1:
            break
    err = capfd.readouterr().err
    assert (
        "left run.epochs() at step 12, by an error or by `break`: the run is not finished, and continues "
        "from step-0000000" in err
    )
    assert "to end it early as a finished one, call run.stop()" in err
    assert run.result is None
    train(start(tmp_path / "run"))
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize(
    "error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
def test_an_error_of_the_user_is_not_taken_for_a_break(
    error: BaseException, tmp_path: Path, capfd: Any
) -> None:
    def body(run: Run) -> None:
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(run.model(x), y))
                if run.state.step == 4:
                    raise error

    with pytest.raises(type(error)):
        body(start(tmp_path / "run"))
    err = capfd.readouterr().err
    assert "left run.epochs() at step 4, by an error or by `break`" in err
    assert "continues from step-0000000" in err
    train(start(tmp_path / "run"))


def test_the_rates_of_all_groups_are_written(tmp_path: Path) -> None:
    model = network()
    groups = [{"params": [p]} for p in model.parameters()]
    groups[0]["lr"] = 0.5  # type: ignore[assignment]
    run = Run(
        tmp_path, model, torch.optim.SGD(groups, lr=0.1), data(), duration="2ep", schedule="linear",
        bar=False,
    )  # fmt: skip
    train(run)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (first, _) = [row for row in rows if "learning_rate" in row]
    assert first["learning_rate"] == first["learning_rates"][0] == 0.5
    assert first["learning_rates"][1:] == [0.1] * (len(groups) - 1)


def test_a_group_without_parameters_does_no_harm(tmp_path: Path) -> None:
    model = network()
    groups: list[dict[str, Any]] = [{"params": []}, {"params": list(model.parameters())}]
    run = Run(tmp_path, model, torch.optim.SGD(groups, lr=0.1), data(), duration="1ep", bar=False)
    train(run)
    assert run.result is not None


def test_stop_after_a_step_is_the_last_one(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(run.model(x), y))
            if run.state.step == 4:
                run.stop()
    assert run.state.step == 4
    assert run.result is not None


def test_a_run_that_is_not_finite_has_not_left_its_loop(tmp_path: Path, capfd: Any) -> None:
    run = start(tmp_path / "run")
    with pytest.raises(NotFinite):
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(run.model(x), y) * float("nan"))
    assert "left run.epochs()" not in capfd.readouterr().err


def test_a_closed_run_is_not_looped_over_again(tmp_path: Path) -> None:
    """As in a notebook, where the cell with the loop alone is run again."""
    run = start(tmp_path / "run")
    for _ in run.epochs():
        break
    with pytest.raises(RuntimeError, match=r"make it again, with Run\(\.\.\.\), to continue"):
        next(run.epochs())
    train(start(tmp_path / "run"))


def test_a_learning_rate_that_is_a_tensor_is_written_to(tmp_path: Path) -> None:
    rates: dict[str, list[Any]] = {}
    weights = {}
    for name in ("float", "tensor"):
        for stop_after in (9, None):
            lr = torch.tensor(0.05, dtype=torch.float64) if name == "tensor" else 0.05
            run = start(tmp_path / name, lr=lr)
            with contextlib.suppress(Stop):
                train(run, stop_after=stop_after)
        if name == "tensor":
            assert isinstance(run.state.optimizer.param_groups[0]["lr"], Tensor)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rates[name] = [json.loads(line).get("learning_rate") for line in lines]
        weights[name] = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
    assert rates["tensor"] == rates["float"]
    assert any(rates["float"])
    for name, tensor in weights["float"].items():
        torch.testing.assert_close(weights["tensor"][name], tensor)


def test_a_learning_rate_is_recorded_as_it_was_given(tmp_path: Path) -> None:
    """A resume compares it with what earlier versions have recorded, such as lr=1."""
    start(tmp_path / "run", lr=1).close()
    assert "lr=1, " in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize("duration", ["0ep", "0st"])
def test_a_run_of_no_steps_is_refused(tmp_path: Path, duration: str) -> None:
    with pytest.raises(InputError, match=f"duration must be above 0, got '{duration}'"):
        start(tmp_path / "run", duration=duration)
    assert not (tmp_path / "run").exists()


def refusal_of_a_replica(folder: Path) -> str:
    """What a rank is answered that has wrapped its model."""
    dist.init_process_group("gloo")
    replica = nn.parallel.DistributedDataParallel(network())
    with pytest.raises(InputError) as refused:
        start(folder, replica)
    dist.destroy_process_group()
    return str(refused.value)


def test_a_model_that_is_wrapped_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"wrapped in DataParallel: .*\nGive Run the model itself"):
        start(tmp_path / "run", nn.DataParallel(network()))
    answers = run_ranks(lambda: refusal_of_a_replica(tmp_path / "run"), 2, start_method="fork")
    assert all("wrapped in DistributedDataParallel" in answer for answer in answers)
    assert not (tmp_path / "run").exists()


def test_a_group_that_is_added_within_the_run_is_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    run = Run(tmp_path, model, optimizer, data(), duration="1ep", batch_size=4, bar=False)
    weight = model[0].weight.detach().clone()
    with pytest.raises(InputError, match=r"add_param_group.*before Run, and freeze"):
        for _ in run.epochs():
            for x, y in run.batches():
                if run.state.step == 1:
                    weight = model[0].weight.detach().clone()
                    optimizer.add_param_group({"params": [*model[4].parameters()]})
                run.step(F.cross_entropy(model(x), y))
    assert torch.equal(model[0].weight, weight)


def test_a_group_that_is_frozen_at_first_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def go(folder: Path, stop: int = -1) -> nn.Module:
        model = network()
        model[4].requires_grad_(False)
        groups = [{"params": [*model[0].parameters()]}, {"params": [*model[4].parameters()]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        settings = {"batch_size": 4, "bar": False, "checkpoint_every": "4st"}
        run = Run(folder, model, optimizer, data(), duration="1ep", **settings)
        for _ in run.epochs():
            for x, y in run.batches():
                model[4].requires_grad_(run.state.step >= 5)
                run.step(F.cross_entropy(model(x), y))
                if run.state.step == stop:
                    raise Stop
        return model

    whole = go(tmp_path / "whole")
    for stop in (3, 7, 10):
        with pytest.raises(Stop):
            go(tmp_path / "stopped", stop)
    assert_equal(dict(go(tmp_path / "stopped").state_dict()), dict(whole.state_dict()))
