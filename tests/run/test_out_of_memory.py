"""Out of memory in a batch: the run goes on in smaller micro-batches, as one that was started with them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flambeau.errors import InputError
from flambeau.run.folder.micro_batches_file import MicroBatches
from flambeau.run.run import Run

OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore of it")


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """45 noisy rows: the noise is drawn when a row is read, as augmentation is."""

    def __init__(self, length: int = 45) -> None:
        self.rows = torch.randn(length, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index] + 0.1 * torch.randn(6), torch.tensor(int(self.rows[index, 0] > 0))


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise OOM


class Limited(nn.Module):
    """Takes a batch of more than `most` samples no further than its normalization, from a step on.

    Args:
        most: samples.
        after: forward passes that are not limited.
        where: 'forward' or 'backward'.
    """

    def __init__(self, most: int = 10**9, after: int = 0, where: str = "forward") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.stem = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        self.most, self.left, self.where = most, after, where
        self.sizes: list[int] = []  # of training

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.sizes.append(len(rows))
            self.left -= 1
        hidden = self.stem(rows)
        if self.training and self.left < 0 and len(rows) > self.most:
            if self.where == "forward":
                raise OOM
            hidden = FailingBackward.apply(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def train(
    folder: Path,
    model: nn.Module | None = None,
    *,
    data: Any = None,
    stop_at: int | None = None,
    evaluated: Any = None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **settings: Any,
) -> dict[str, Any]:
    """A run of four epochs of three steps, and what it leaves."""
    model = Limited() if model is None else model
    optimizer = make_optimizer(model.parameters(), lr=0.05)
    sizes = {} if isinstance(data, DataLoader) else {"batch_size": 16}
    run = Run(
        folder, model, optimizer, Rows() if data is None else data,
        **{"duration": "4ep", "log_every": 2, "bar": False, "ema": 0.9, **sizes, **settings},
    )  # fmt: skip
    for _ in run.epochs():
        for rows, targets in run.batches():
            if run.state.step == stop_at:
                raise KeyboardInterrupt
            with run.halving():
                logits = model(rows)
                run.log(accuracy=logits.argmax(1) == targets)
                loss = cross_entropy(logits, targets)
                run.step(loss)
        for rows, targets in run.evaluate(Rows(11) if evaluated is None else evaluated):
            with run.halving():
                run.log(val_count=torch.ones(len(rows)))
                run.log(val_loss=cross_entropy(model(rows), targets, reduction="none"))
    state = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
    assert run.state.ema is not None
    return {
        "weights": state, "ema": run.state.ema.shadow, "order": run.state.order_crc, "lines": lines(folder),
        "run": run,
    }  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: row[name] for name in row if name not in ("images_per_s", "data_wait")}
        for row in rows
    ]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """To the bit."""
    for part in ("weights", "ema"):
        for name, tensor in one[part].items():
            assert torch.equal(tensor, other[part][name]), name
    assert one["order"] == other["order"]
    assert one["lines"] == other["lines"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_from_the_first_step_on_it_is_the_run_that_was_started_so(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Statistics of BatchNorm, dropout, noise, figures, averages and order included."""
    model = Limited(most=5, where=where)
    halved = train(tmp_path / "halved", model)
    assert model.sizes[:3] == [16, 8, 4]
    assert max(model.sizes[2:]) <= 5  # a lone last sample joins the part before it
    assert_same(halved, train(tmp_path / "small", batch_size=4, accumulate=4))
    said = capsys.readouterr().err
    assert (
        "out of memory in step 1: micro-batches of 16 -> 8 samples, 2 per step; the step begins again (CUDA "
        "out of memory. Tried to allocate 2.00 GiB.)\n"
    ) in said
    assert "micro-batches of 8 -> 4 samples, 4 per step" in said


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("after", "step"), [(4, 3), (9, 5)])
def test_in_mid_run_it_is_the_run_that_went_on_so(
    tmp_path: Path, where: str, after: int, step: int
) -> None:
    """The first micro-batch of a step, or the second: with the state before the step, the bits are equal."""
    sizes = {"batch_size": 8, "accumulate": 2}
    halved = train(tmp_path / "halved", Limited(most=5, after=after, where=where), **sizes)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "other", stop_at=step - 1, checkpoint_every="1st", **sizes)
    assert MicroBatches.read(tmp_path / "halved") == MicroBatches(step, 4)
    assert_same(halved, train(tmp_path / "other", micro_batch=4, **sizes))


@pytest.mark.parametrize("stop_at", [5, 8])
def test_a_resume_begins_with_what_has_fitted(tmp_path: Path, stop_at: int) -> None:
    whole = train(tmp_path / "whole", Limited(most=8, after=4))
    model = Limited(most=8, after=4)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", model, stop_at=stop_at)
    again = Limited()
    assert_same(whole, train(tmp_path / "killed", again, workers=1))
    assert max(again.sizes) <= 9
    assert len(again.sizes) > (12 - stop_at)  # several parts per step
    assert (
        "batch_size = 16" in (tmp_path / "killed" / "config.toml").read_text()
    )  # what was asked for


def test_without_the_file_the_settings_count_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", Limited(most=8, after=4), stop_at=6)
    (tmp_path / "run" / "micro_batches.json").unlink()
    model = Limited()
    train(tmp_path / "run", model)
    assert max(model.sizes) == 16


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"step": 1}', '{"step": 1, "training": -4, "evaluation": 1}']
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "micro_batches.json").write_text(content)
    with pytest.raises(
        InputError, match=r"micro_batches\.json .*remove it to start from the settings"
    ):
        MicroBatches.read(tmp_path)


def test_an_odd_batch_is_cut_into_uneven_parts(tmp_path: Path) -> None:
    model = Limited(most=7)
    train(tmp_path / "odd", model, batch_size=13, duration="1ep")
    assert model.sizes[:3] == [13, 7, 6]


def test_one_sample_that_does_not_fit_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as caught:
        train(tmp_path / "run", nn.Sequential(Limited(most=0)))
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        "out of memory in step 1: micro-batches of 2 do not fit, and cannot be made smaller"
    )
    assert second.startswith("Use smaller images, a smaller model")
    assert "MiB in memory" in capsys.readouterr().err


def test_without_normalization_it_goes_down_to_one(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.layer, self.sizes = nn.Linear(6, 2), list[int]()

        def forward(self, rows: Tensor) -> Tensor:
            if self.training:
                self.sizes.append(len(rows))
                if len(rows) > 1:
                    raise OOM
            logits: Tensor = self.layer(rows)
            return logits

    model = Plain()
    train(tmp_path / "run", model, duration="1st")
    assert model.sizes[:6] == [16, 8, 4, 2, 1, 1]


def test_other_errors_are_those_of_the_loop(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, rows: Tensor) -> Any:
            return self.layer(rows)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(tmp_path / "run", Broken())


def test_after_the_backward_pass_smaller_parts_do_not_help(tmp_path: Path) -> None:
    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise OOM

    with pytest.raises(
        InputError, match="out of memory in step 1, after its backward pass, where smaller"
    ):
        train(tmp_path / "run", make_optimizer=Greedy)


def test_batches_of_a_loader_cannot_be_cut(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.randn(32, 6), torch.zeros(32, dtype=torch.int64)), 16)
    with pytest.raises(InputError, match="its batches are those of the loader that Run was given"):
        train(tmp_path / "run", Limited(most=5), data=data)


# ---------------------------------------------------------------- evaluations


class LimitedEvaluation(Limited):
    """Evaluates no more than so many samples at once."""

    def __init__(self, most_evaluated: int) -> None:
        super().__init__()
        self.most_evaluated, self.evaluated = most_evaluated, list[int]()

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            self.evaluated.append(len(rows))
            if len(rows) > self.most_evaluated:
                raise OOM
        return super().forward(rows)


def test_an_evaluation_cuts_its_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(tmp_path / "plain", duration="2ep")
    model = LimitedEvaluation(3)
    cut = train(tmp_path / "cut", model, duration="2ep")
    assert model.evaluated == [11, 5, 2, 3, 3, 3, *[2, 3, 3, 3]]
    for name, tensor in plain["weights"].items():
        assert torch.equal(tensor, cut["weights"][name])
    for one, other in zip(plain["lines"], cut["lines"], strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    assert "out of memory in an evaluation, with 11 samples at once: from now on 6 at most" in (
        capsys.readouterr().err
    )
    assert MicroBatches.read(tmp_path / "cut").evaluation == 3
    again = LimitedEvaluation(3)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000006")
    (tmp_path / "cut" / "result.json").unlink()
    assert_same(cut, train(tmp_path / "cut", again, duration="2ep"))
    assert again.evaluated == [2, 3, 3, 3]


def test_one_evaluated_sample_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="out of memory in an evaluation, with 1 samples at once"):
        train(tmp_path / "run", LimitedEvaluation(0))


def test_an_evaluation_of_ready_batches_cannot_be_cut(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.randn(8, 6), torch.zeros(8, dtype=torch.int64)), 4)
    with pytest.raises(InputError, match="Let its loader or collate function make smaller batches"):
        train(tmp_path / "run", LimitedEvaluation(3), evaluated=data)


def test_what_is_logged_behind_halving_is_taken_back_too(tmp_path: Path) -> None:
    """The first part of a step is logged outside of it, and the second part runs out of memory."""
    model = Limited(most=5, after=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = Run(
        tmp_path / "run",
        model,
        optimizer,
        Rows(32),
        duration="1st",
        batch_size=8,
        accumulate=2,
        log_every=1,
        bar=False,
    )
    for _ in run.epochs():
        for rows, targets in run.batches():
            with run.halving():
                run.step(cross_entropy(model(rows), targets))
            run.log(is_first_try=float(len(rows) == 8))
    assert model.sizes == [8, 8, 4, 4, 4, 4]
    (line,) = lines(tmp_path / "run")
    assert line["is_first_try"] == 0


class LastScores:
    """A metric that keeps what it is given, to compute it at the end."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.given: list[Tensor] = []

    def update(self, scores: Tensor, more: Mapping[str, Tensor]) -> None:
        self.given += [scores, more["scores"]]

    def compute(self) -> float:
        return float(torch.stack(self.given).sum())


def test_logged_values_count_as_they_were_when_they_were_logged(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(4, 1))
    metrics = {"sum": LastScores()}
    run = Run(
        tmp_path, model, optimizer, data, duration="1ep", batch_size=4, bar=False, metrics=metrics
    )
    for _ in run.epochs():
        for (x,) in run.batches():
            with run.halving():
                scores, mean = torch.ones(4), torch.tensor(2.0)
                run.log(scores=scores, mean=mean)
                scores.zero_()
                mean.zero_()
                run.step(model(x).mean())
        for _ in run.evaluate(data):
            with run.halving():
                scores = torch.ones(4)
                run.log(val_scores=scores, sum=(scores, {"scores": scores}))
                scores.zero_()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (rows[0]["scores"], rows[0]["mean"]) == (1.0, 2.0)
    assert (rows[1]["val_scores"], rows[1]["sum"]) == (1.0, 8.0)
