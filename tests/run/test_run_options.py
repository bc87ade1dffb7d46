"""The options of `Run`: their names, their ranges, and what of them identifies a run."""

import gc
import json
import os
import random
import signal
import sys
import tomllib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from flambeau.data.wrap import wrap
from flambeau.errors import InputError
from flambeau.parallel.preemption import FLAG
from flambeau.run import run as run_module
from flambeau.run.loop.lifecycle import Lifecycle
from flambeau.run.loop.nan_guard import NotFinite
from flambeau.run.loop.step_metrics import StepMetrics, add_value
from flambeau.run.run import Run


def start(folder: Path, **options: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 2)
    return Run(folder, model, optimizer, data, **{"duration": "2st", "batch_size": 4, **options})


def train(run: Run) -> None:
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(nn.functional.cross_entropy(run.model(x), y))


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batchsize": 3}, "Run has no argument 'batchsize'; did you mean 'batch_size'"),
        ({"duration": ...}, "missing a required argument: 'duration'"),
    ],
)
def test_names_that_are_wrong_or_missing(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    told = {"duration": "2st", **options}
    told = {name: value for name, value in told.items() if value is not ...}
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=message):
        Run(tmp_path / "run", model, optimizer, TensorDataset(torch.ones(4, 2)), **told)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"ema": 1.0}, "ema must be at least 0 and below 1, got 1.0"),
        ({"seed": -1}, r"seed must be at least 0 and below 2\*\*64, got -1"),
        ({"clip_norm": float("nan")}, "clip_norm must be a finite number"),
        ({"compression": "zip"}, "compression must be one of none, fp16, bf16, powersgd"),
        ({"duration": 3}, "duration must be a duration such as '10ep' .*, got 3"),
        ({"checkpoint_every": 2.0}, r"checkpoint_every must be a duration such as .* got 2\.0"),
        ({"warmup": 0}, "warmup must be a duration such as .* got 0; '0%' is none"),
        (
            {"best": "val_x"},
            "best = 'val_x' does not tell whether more or less .* or is the name misspelt",
        ),
        ({"best": "log_likelihood_error"}, "give best_mode='max' or best_mode='min'"),
        ({"best_mode": "lowest"}, "best_mode must be 'max' or 'min', got 'lowest'"),
        ({"batch_size": "64"}, "batch_size must be a whole number, got '64'"),
        ({"batch_size": 2.5}, r"batch_size must be a whole number, got 2\.5"),
        ({"accumulate": True}, "accumulate must be a whole number, got True"),
        ({"seed": None}, "seed needs a value"),
        ({"ema": "0.9"}, "ema must be a number, got '0.9'"),
        ({"precision": "fp8"}, "precision must be 'fp32', 'bf16' or 'fp16', got 'fp8'"),
        ({"best": ""}, "best is empty"),
        ({"bar": 1}, "bar must be true or false, got 1"),
        ({"collate": "stack"}, "collate must be a function, got 'stack'"),
        ({"sampler": [0, 1]}, "sampler must be one of flambeau.recipes.data.samplers, or anything"),
        (
            {"schedule": 0.1},
            "schedule must be a name, a NamedSchedule, a function of the step, or a ReduceOnPlateau",
        ),
        ({"schedule": lambda step: None}, "schedule must give a factor .* for step 0 it gave None"),
        ({"schedule": lambda step: -1.0}, "a number of at least 0; for step 0 it gave -1"),
        ({"state": [nn.Linear(1, 1)]}, r"state must be a dict, got \[Linear"),
        ({"state": {"seen": 3}}, r"state\['seen'\] must be an object with state_dict .* got 3"),
        (
            {"state": {"plateau": nn.Linear(1, 1)}, "schedule": "plateau"},
            r"state\['plateau'\]: the schedule is saved by this name",
        ),
        ({"config": {1: 2}}, r"config\[1\] cannot stand in config.toml"),
        ({"config": {"a": [torch.ones(1)]}}, r"config\['a'\] cannot .*'Tensor' is not TOML"),
        ({"config": {"a": {"b": float("nan")}}}, r"config\['a'\] holds NaN"),
        ({"attachments": {"../a": b""}}, "must be bytes by the plain name of a file, got '../a'"),
        ({"attachments": {"a": "text"}}, "must be bytes by the plain name of a file, got 'a'"),
        ({"replay_from": 3}, "replay_from must be a text or a Path, got 3"),
    ],
)
def test_ranges_are_those_of_the_settings(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        start(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("best", "mode"),
    [
        ("val_accuracy", "max"), ("val_loss", "min"), ("valLoss", "min"), ("loss/val", "min"),
        ("top5", "max"), ("val_f1", "max"), ("error_rate", "min"), ("perplexity", "min"),
        ("brier", "min"), ("val_miou", "max"), ("test.RMSE", "min"), ("ema_acc", "max"),
    ],
)  # fmt: skip
def test_the_name_says_which_is_better(tmp_path: Path, best: str, mode: str) -> None:
    start(tmp_path / "run", best=best).close()
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))
    assert stored["best_mode"] == mode
    start(tmp_path / "run", best=best, best_mode=mode).close()


def evaluate(run: Run, *names: str) -> None:
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(nn.functional.cross_entropy(run.model(x), y))
        for name in names:
            for _ in run.evaluate(TensorDataset(torch.ones(2, 2))):
                run.log(**{name: float(run.state.epoch)})


def test_a_best_that_is_not_logged_is_said_once(tmp_path: Path, capfd: Any) -> None:
    run = start(tmp_path / "run", duration="3ep")
    evaluate(run, "val_loss", "val_mse")
    said = capfd.readouterr().err
    assert said.count("best = 'val_accuracy' was not logged within run.evaluate()") == 1
    assert "give Run the name of what was logged (val_loss, val_mse)" in said
    assert run.result is not None
    assert run.result.weights == "last"
    start(tmp_path / "run", duration="3ep", best="val_loss").close()  # as it says

    run = start(tmp_path / "after", duration="2ep", best="val_loss")
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(nn.functional.cross_entropy(run.model(x), y))
        for _ in run.evaluate(TensorDataset(torch.ones(2, 2))):
            pass
        run.log(val_loss=0.5)
    said = capfd.readouterr().err
    assert said.count("call run.log inside `for ... in run.evaluate(...)`") == 1

    evaluate(start(tmp_path / "other", duration="3ep", best="val_mse"), "val_loss", "val_mse")
    evaluate(start(tmp_path / "none", duration="3ep"))
    assert "was not logged" not in capfd.readouterr().err
    evaluate(start(tmp_path / "never", duration="3ep", best="val_loss"))
    said = capfd.readouterr().err
    assert said.count("best = 'val_loss' was not logged within run.evaluate()") == 1
    assert said.count("nothing was logged there") == 1


def test_the_least_loss_is_the_best(tmp_path: Path) -> None:
    run = start(tmp_path / "run", duration="3ep", best="val_loss")
    evaluate(run, "val_loss")
    assert run.result is not None
    assert (run.result.weights, run.result.metrics) == ("best", {"val_loss": 0.0})


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_waits_for_the_disk_only_where_workers_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    run = start(tmp_path / "run", workers=workers)
    waits: list[int] = []
    monkeypatch.setattr(run._recorder.saver, "wait", lambda: waits.append(run.state.step))
    for _ in run.evaluate(TensorDataset(torch.ones(4, 2))):
        pass
    assert len(waits) == workers
    monkeypatch.undo()
    run.close()


def test_config_has_a_table_of_its_own(tmp_path: Path) -> None:
    run = start(tmp_path / "run", config={"seed": 7, "note": "a", "none": None}, seed=3)
    run.close()
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))
    assert stored["config"] == {"seed": 7, "note": "a"}
    assert (stored["seed"], stored["batch_size"], stored["best"]) == (3, 4, "val_accuracy")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"config": {"seed": 7}}, {"config": {"seed": 7}, "seed": 1}, "seed: 0 there, 1 now"),
        ({"config": {"seed": 7}}, {"config": {"seed": 8}}, "config seed: 7 there, 8 now"),
        ({"config": {"data": "v1"}}, {"config": {"data": "v2"}}, "config data: 'v1' there, 'v2'"),
        ({"config": {"keep": 1}}, {"config": {"keep": 2}}, "config keep: 1 there, 2 now"),
        ({"config": {"a": 1}}, {}, "config a: 1 there, not given now"),
        ({}, {"config": {"a": 1}}, "config a: not given there, 1 now"),
    ],
)
def test_another_identity_is_refused(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    start(tmp_path / "run", **before).close()
    with pytest.raises(InputError, match=message):
        start(tmp_path / "run", **after)
    start(tmp_path / "run", **before).close()  # and nothing was changed


def test_a_best_may_change_that_has_chosen_nothing(tmp_path: Path) -> None:
    def stopped(run: Run, *names: str) -> None:
        for _ in run.epochs():
            for x, y in run.batches():
                if run.state.epoch == 1:
                    return
                run.step(nn.functional.cross_entropy(run.model(x), y))
            for _ in run.evaluate(TensorDataset(torch.ones(2, 2))):
                run.log(**dict.fromkeys(names, 1.0))

    stopped(start(tmp_path / "run", duration="2ep"), "val_loss", "score")
    start(tmp_path / "run", duration="2ep", best_mode="min").close()
    run = start(tmp_path / "run", duration="2ep", best="val_loss")
    evaluate(run, "val_loss")
    assert run.result is not None
    assert run.result.weights == "best"
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))
    assert (config["best"], config["best_mode"]) == ("val_loss", "min")

    stopped(start(tmp_path / "kept", duration="2ep"), "val_loss", "val_accuracy")
    with pytest.raises(InputError, match="best: 'val_accuracy' there, 'val_loss' now"):
        start(tmp_path / "kept", duration="2ep", best="val_loss")


def test_two_evaluations_of_one_name_are_said_once(tmp_path: Path, capfd: Any) -> None:
    evaluate(start(tmp_path / "run", duration="3ep"), "val_accuracy", "val_accuracy")
    assert capfd.readouterr().err.count("was logged by two evaluations of one epoch") == 1
    evaluate(start(tmp_path / "other", duration="3ep"), "val_accuracy", "test_accuracy")
    assert "two evaluations" not in capfd.readouterr().err


def test_the_best_of_an_evaluation_in_mid_epoch_is_kept(tmp_path: Path) -> None:
    run = start(tmp_path / "run", duration="2ep", batch_size=2, keep=1)
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(nn.functional.cross_entropy(run.model(x), y))
            for _ in run.evaluate(TensorDataset(torch.ones(2, 2))):
                run.log(val_accuracy=float(run.state.step == 3))
    assert run.result is not None
    assert (run.result.weights, run.result.step) == ("best", 3)


def test_an_evaluation_that_is_left_is_said(tmp_path: Path, capfd: Any) -> None:
    run = start(tmp_path / "run")
    for _ in run.evaluate(TensorDataset(torch.ones(8, 2))):
        break
    run.close()
    assert "left `for ... in run.evaluate(...)` before its end" in capfd.readouterr().err


def with_groups(folder: Path, *settings: dict[str, Any]) -> Run:
    model = nn.Linear(2, 2)
    groups = [
        {"params": [p], **(settings[number] if number < len(settings) else {})}
        for number, p in enumerate(model.parameters())
    ]
    if len(settings) == 1:
        groups = [{"params": [*model.parameters()], **settings[0]}]
    data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 2)
    return Run(folder, model, torch.optim.SGD(groups, lr=0.1), data, duration="2st", batch_size=4)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ([{}, {"lr": 0.02}], r"\(lr of parameter group 1: 0.01 there, 0.02 now\)"),
        (
            [{}, {"lr": 0.01, "weight_decay": 0.5}],
            r"\(weight_decay of parameter group 1: 0 there, 0.5 now\)",
        ),
        (
            [{"maximize": True}, {"lr": 0.01}],
            r"\(maximize of parameter group 0: False there, True now\)",
        ),
        ([{}], r"\(parameter groups: 2 there, 1 now\)"),
    ],
)
def test_each_parameter_group_identifies_the_run(
    tmp_path: Path, now: list[dict[str, Any]], message: str
) -> None:
    with_groups(tmp_path / "run", {}, {"lr": 0.01}).close()
    with pytest.raises(InputError, match=message):
        with_groups(tmp_path / "run", *now)
    with_groups(tmp_path / "run", {}, {"lr": 0.01}).close()


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(8, 2), torch.arange(8) % 2)
    old = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(InputError, match="the optimizer has none of the model's parameters"):
        Run(tmp_path / "run", nn.Linear(2, 2), old, data, duration="1ep", batch_size=4)
    assert not (tmp_path / "run").exists()


def test_a_scheduler_of_torchs_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(InputError, match="leave it out and give schedule="):
        Run(tmp_path / "run", model, optimizer, TensorDataset(X, Y), duration="1ep")


def own_backward(run: Run, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


def own_step(run: Run, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def of_another_model(run: Run, loss: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(nn.Linear(2, 2)(X), Y)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (own_backward, r"run.step\(loss\) does backward, .* itself"),
        (own_step, r"run.step\(loss\) does backward, .* itself"),
        (lambda run, loss: loss.detach(), "does not depend on any parameter of the optimizer"),
        (of_another_model, "does not depend on any parameter of the optimizer"),
    ],
)
def test_a_loss_that_cannot_train_is_explained(tmp_path: Path, made: Any, message: str) -> None:
    run = start(tmp_path / "run")
    with pytest.raises(RuntimeError, match=message):
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(made(run, nn.functional.cross_entropy(run.model(x), y)))


def test_gradients_from_before_the_run_do_not_count(tmp_path: Path) -> None:
    weights = []
    for name, tries in (("a", 0), ("b", 1)):
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(tries):
            model(X).square().sum().backward()
        run = Run(tmp_path / name, model, optimizer, TensorDataset(X, Y), duration="2st")
        train(run)
        weights.append(model.weight)
    assert torch.equal(*weights)


class Growing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach()])
        return super().forward(x)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_buffer_that_no_resume_could_load_is_said_at_the_first_checkpoint(
    tmp_path: Path, ema: float
) -> None:
    model = Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(tmp_path / "run", model, optimizer, TensorDataset(X, Y), duration="1ep", ema=ema)
    with pytest.raises(InputError, match=r"'seen' .* was \(0, 2\) .* is \(8, 2\) .*persistent=Fa"):
        train(run)


@pytest.mark.parametrize("loss", [0.5, torch.ones(3)])
def test_a_loss_that_is_no_single_tensor_is_refused(tmp_path: Path, loss: Any) -> None:
    run = start(tmp_path / "run")
    with pytest.raises(ValueError, match="the loss must be 0-d, a tensor"):
        for _ in run.epochs():
            for _ in run.batches():
                run.step(loss)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    start(tmp_path / "run", batch_size=np.int64(4), ema=np.float32(0.5), clip_norm=1).close()
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))
    assert (stored["batch_size"], stored["ema"], stored["clip_norm"]) == (4, 0.5, 1.0)


X, Y = torch.randn(8, 2), torch.arange(8) % 2


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (iter([(X, Y)]), "a list_iterator can be read only once"),
        ((X, Y), r"a tuple of 2 whole tensors is no Dataset: TensorDataset\(X, Y\) makes one"),
        ([X, Y], "a list of 2 whole tensors is no Dataset"),
        ({"x": X, "y": Y}, "a dict has no samples 0, 1, 2"),
        ("photos", r"'photos' is a name; wrap\(NAME, transform, ...\).dataset opens it"),
        (Path("photos"), "'photos'.* is a name"),
        (None, "None has neither .i. nor batches"),
        (TensorDataset, "has neither .i. nor batches to iterate over"),
        (Streamed(), "Streamed has no samples by index"),
        (DataLoader(Streamed()), "object of type 'Streamed' has no len.*write a __len__"),
        (
            wrap(TensorDataset(X, Y), batch_size=4),
            "give the Dataset that was wrapped, its .dataset",
        ),
    ],
)
def test_what_is_no_data_is_said(tmp_path: Path, data: Any, message: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=f"Run cannot read its data: .*{message}"):
        Run(tmp_path / "run", model, optimizer, data, duration="1ep")
    assert not (tmp_path / "run").exists()
    run = start(tmp_path / "run")
    with pytest.raises(InputError, match=f"run.evaluate cannot read its data: .*{message}"):
        next(run.evaluate(data))
    run.close()


class OwnDraws(SequentialSampler):
    def __init__(self, data: Tensor) -> None:
        super().__init__(data)
        self.draws = random.Random(0)


@pytest.mark.parametrize(
    ("of_loader", "options", "message"),
    [
        ({}, {"batch_size": 64}, "batch_size would have no effect: the data are a loader"),
        ({}, {"workers": 0, "on_bad": print}, "workers, on_bad would have no effect"),
        ({"generator": torch.Generator()}, {}, "DataLoader has a generator=, whose state is in no"),
        (
            {"sampler": RandomSampler(X, generator=torch.Generator())},
            {},
            "RandomSampler has a generator=",
        ),
        ({"sampler": OwnDraws(X)}, {}, "loader's OwnDraws has a draws=, whose state is in no"),
        (
            {"num_workers": 1, "persistent_workers": True},
            {},
            "the loader has persistent_workers=True",
        ),
    ],
)
def test_what_a_loader_makes_inexact_or_would_ignore_is_refused(
    tmp_path: Path, of_loader: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, **of_loader)
    with pytest.raises(InputError, match=message):
        Run(tmp_path / "run", model, optimizer, loader, duration="1ep", **options)
    assert not (tmp_path / "run").exists()


def test_model_and_optimizer_are_torchs(tmp_path: Path) -> None:
    model, data = nn.Linear(2, 2), TensorDataset(X, Y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"the model must be a torch.nn.Module, got 'resnet18'"):
        Run(tmp_path / "run", "resnet18", optimizer, data, duration="1ep")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"the optimizer must be a torch.optim.Optimizer, got <cl"):
        Run(tmp_path / "run", model, torch.optim.SGD, data, duration="1ep")  # type: ignore[arg-type]


def test_epochs_is_told_its_name_here(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"no argument 'epochs'; the length is duration='8ep'"):
        start(tmp_path / "run", epochs=8)


def test_ctrl_c_of_a_run_that_an_error_ended_is_no_business_of_the_next(tmp_path: Path) -> None:
    run = start(tmp_path / "first")
    with pytest.raises(ZeroDivisionError):
        for _ in run.epochs():
            for _ in run.batches():
                os.kill(os.getpid(), signal.SIGINT)
                raise ZeroDivisionError
    run.close()
    run = start(tmp_path / "second")
    train(run)
    assert run.result is not None


def test_ctrl_c_at_a_prompt_leaves_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    run = start(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        for _ in run.epochs():
            for x, y in run.batches():
                os.kill(os.getpid(), signal.SIGINT)
                run.step(nn.functional.cross_entropy(run.model(x), y))
    run = start(tmp_path / "run")
    assert run.state.step == 1
    train(run)
    assert run.result is not None


@pytest.mark.parametrize("shape", [(4, 1), (4, 2, 3)])
def test_values_of_each_sample_may_have_more_dimensions(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    run, values = start(tmp_path / "run", best="val_mse"), torch.rand(shape)
    for _ in run.evaluate(TensorDataset(torch.ones(4, 2))):
        run.log(val_mse=values, val_hit=values > 0.5)
    run.close()
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["val_mse"] == pytest.approx(float(values.double().mean()))
    assert row["val_hit"] == pytest.approx(float((values > 0.5).double().mean()))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mse", [1.0, 2.0], r"run\.log\(mse=\.\.\.\) takes a number or a tensor, got \[1"),
        ("a", torch.ones(3), r"the batch has 4 samples, got the shape \(3,\)"),
        ("a", torch.ones(5, 4), r"the batch has 4 samples, got the shape \(5, 4\)"),
        ("a", torch.ones(4, device="meta"), r"on the model's device, cpu; got .*float32 on meta"),
        ("a", torch.ones((), device="meta"), r"on the model's device, cpu; got .*float32 on meta"),
        ("a", torch.ones(4) * 1j, "takes real values .* got torch.complex64"),
        ("step", 1.0, "each line of metrics.jsonl has 'step' already"),
    ],
)
def test_what_cannot_be_logged_is_named(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    run = start(tmp_path / "run")
    with pytest.raises((TypeError, ValueError), match=message):
        for _ in run.evaluate(TensorDataset(torch.ones(4, 2))):
            run.log(**{name: value})
    run.close()


def test_what_is_logged_before_any_batch_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"run.log\(a=...\) is of a batch: call it inside"):
        run.log(a=1.0)
    run.close()


def test_messages_to_a_script_name_no_flag(tmp_path: Path) -> None:
    start(tmp_path / "run").close()
    with pytest.raises(InputError) as caught:
        start(tmp_path / "run", seed=8)
    assert "--" not in str(caught.value)
    run = start(tmp_path / "new")
    with pytest.raises(NotFinite, match=r"on_nan='rollback'.*; its samples are listed in") as bad:
        for _ in run.epochs():
            for _ in run.batches():
                run.step(run.model.weight.sum() * float("nan"))
    assert "--" not in str(bad.value)


def test_workers_have_a_bound(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="workers must be from 0 to 1024, got 1000000"):
        start(tmp_path / "run", workers=1_000_000)
    with pytest.raises(
        InputError, match="workers must be at most 1024, got 1000000: each is a pro"
    ):
        wrap(TensorDataset(torch.ones(4)), batch_size=2, workers=1_000_000)


def test_a_configuration_that_no_file_could_give_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too large for a file: it has more than 262144 bytes"):
        start(tmp_path / "run", config={f"note {number}": "x" * 2**17 for number in range(3)})
    assert not (tmp_path / "run" / "config.toml").exists()


def test_compression_in_one_process_is_said_to_do_nothing(tmp_path: Path, capfd: Any) -> None:
    start(tmp_path / "run", compression="fp16").close()
    assert "compression = 'fp16' has no effect in one process" in capfd.readouterr().err
    start(tmp_path / "other").close()
    assert capfd.readouterr().err == ""


def test_a_window_that_goes_back_forgets_what_it_had_counted() -> None:
    window = StepMetrics(torch.device("cpu"))
    before = window.state_dict()
    add_value(window.logged, "later", 1.0, 2, window.device)
    window.load_state_dict(before)
    assert window.empty


def test_what_a_resume_may_change(tmp_path: Path) -> None:
    start(tmp_path / "run").close()
    start(tmp_path / "run", workers=1, keep=3, stall_timeout=5.0, on_nan="rollback").close()
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))
    assert (stored["workers"], stored["keep"], stored["on_nan"]) == (1, 3, "rollback")


def test_a_run_that_fails_to_start_gives_back_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every point after the lock: the next start on the same folder is not refused."""
    handler = signal.getsignal(signal.SIGTERM)
    for owner, name in ((FLAG, "install"), (Lifecycle, "resume"), (run_module, "share_model")):
        with monkeypatch.context() as patch:

            def fail(*_: Any, **__: Any) -> None:
                raise OSError("no space")

            patch.setattr(owner, name, fail)
            with pytest.raises(OSError, match="no space"):
                start(tmp_path / "run")
        assert signal.getsignal(signal.SIGTERM) is handler
        assert not is_locked(tmp_path / "run")
    start(tmp_path / "run").close()


def test_a_run_that_is_dropped_unused_gives_back_what_it_took(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    run = start(tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is not handler
    assert is_locked(tmp_path / "run")
    gone = weakref.ref(run)
    gc.disable()
    try:
        del run
        assert gone() is None, "a reference circle keeps the run"
    finally:
        gc.enable()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not is_locked(tmp_path / "run")


def test_a_run_is_closed_once(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    train(run)
    run.close()
    assert run.result is not None
    assert not is_locked(tmp_path / "run")


def is_locked(folder: Path) -> bool:
    """Whether this process holds a descriptor of the lock: its own locks never refuse a process."""
    return any(
        str(path.resolve()) == str((folder / ".lock").resolve())
        for path in Path("/proc/self/fd").iterdir()
        if path.exists()
    )
