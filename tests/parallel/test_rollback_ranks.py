"""Going back from a step that was not finite: all ranks, to the same checkpoint, whatever they hold."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from flambeau.parallel.gradient_sync.fsdp import shard_model
from flambeau.parallel.ranks import FailedElsewhere, join_ranks
from flambeau.parallel.watchdog.heartbeat import SAVING
from flambeau.run.folder import checkpointer
from flambeau.run.loop.nan_guard import NotFinite
from flambeau.run.run import Run

StartRanks = Callable[..., Any]
Bad = Callable[[Run], bool]


class Batches:
    """An object of the user's that belongs to the run."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def rows(length: int, seed: int) -> TensorDataset:
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long())


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def never(run: Run) -> bool:
    return False


def once(run: Run) -> bool:
    """The loss of the eighth step is NaN; the run then stands in its second epoch of five steps."""
    return run.state.step == 7 and run.state.rollbacks == 0


def half_from(step: int) -> Callable[[int], float]:
    return lambda done: 0.5 if done >= step else 1.0


def train(
    folder: Path,
    *,
    bad: Bad = never,
    bad_rank: int = 1,
    shard: bool = False,
    own_loader: bool = False,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **settings: Any,
) -> dict[str, Any]:
    """A whole run, 10 steps if nothing else is said, with a checkpoint after every third."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    hidden = [nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 32)]
    model = nn.Sequential(nn.Linear(6, 32), *hidden, nn.Linear(32, 2))
    if shard:
        shard_model(model, join_ranks(), torch.device("cpu"), unit_bytes=1000)
    data: Any = rows(37, 1)
    batches = Batches()
    run = Run(
        folder, model, make_optimizer(model),
        DataLoader(data, batch_size=8, shuffle=True) if own_loader else data,
        **{
            "duration": "2ep", "log_every": 2, "checkpoint_every": "3st",
            **({} if own_loader else {"batch_size": 8}), "bar": False, "on_nan": "rollback",
            "state": {"batches": batches}, **settings,
        },
    )  # fmt: skip
    for _ in run.epochs():
        for x, y in run.batches():
            with run.autocast():
                loss = cross_entropy(model(x), y)
            is_bad = bad(run) and join_ranks().rank in (bad_rank, join_ranks().world - 1)
            batches.count += 1
            run.step(loss * float("nan") if is_bad else loss)
        for x, y in run.evaluate(rows(9, 2)):
            run.log(val_loss=cross_entropy(model(x), y))
    assert run.result is not None
    return {
        "published": load_file(folder / "model.safetensors"),
        "own": {} if shard else {k: v.clone() for k, v in model.state_dict().items()},
        "place": (run.state.step, run.state.order_crc, batches.count),
        "rows": lines(folder),
    }


def lines(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("images_per_s", "data_wait")} for row in found
    ]


CASES: dict[str, tuple[int, dict[str, Any]]] = {  # where it goes back to, settings
    "workers": (0, {  # back over an epoch
        "workers": 1, "accumulate": 2, "ema": 0.9, "clip_norm": 0.5, "checkpoint_every": "4ep",
        "duration": "4ep",
    }),
    "powersgd": (6, {"own_loader": True, "compression": "powersgd"}),
    "sharded": (6, {"shard": True, "ema": 0.9, "make_optimizer": adagrad}),
}  # fmt: skip


def test_all_go_back_to_the_same_checkpoint(
    start_ranks: StartRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is bad on one rank alone. Expected is a run that had half the rate from there on."""
    monkeypatch.setattr("flambeau.parallel.gradient_sync.ddp._POWER_SGD_START", 2)

    def work() -> dict[str, Any]:
        return {
            name: train(tmp_path / name, bad=once, **settings)
            for name, (_, settings) in CASES.items()
        }

    ranks = start_ranks(2, work, group=True).results()
    for name, (back_to, settings) in CASES.items():
        alone = {k: v for k, v in settings.items() if k not in ("shard", "compression")}
        expected = train(tmp_path / f"{name}, expected", **alone, schedule=half_from(back_to))
        tolerance = {"rtol": 2e-4, "atol": 2e-6}
        if name == "powersgd":
            tolerance = {"rtol": 0.2, "atol": 0.1}
        for rank in (ranks[0][name], ranks[1][name]):
            torch.testing.assert_close(rank["published"], expected["published"], **tolerance)
            torch.testing.assert_close(rank["own"], ranks[0][name]["own"], rtol=0, atol=0)
            assert rank["place"] == expected["place"]
        rows = ranks[0][name]["rows"]
        (back,) = (row for row in rows if "rollback" in row)
        assert (back["step"], back["bad_step"], back["lr_scale"]) == (back_to, 8, 0.5)
        assert [(row["step"], len(row)) for row in rows if "rollback" not in row] == [
            (row["step"], len(row)) for row in expected["rows"] if "rollback" not in row
        ]


def test_lines_are_due_again_when_a_checkpoint_met_the_bad_step(tmp_path: Path) -> None:
    """The line of step 7 stood behind checkpoint 6, and the checkpoint due at step 9 finds the bad step 8."""
    settings = {"log_every": 7, "checkpoint_every": "3st"}
    found = train(tmp_path / "run", bad=once, **settings)["rows"]
    expected = train(tmp_path / "expected", schedule=half_from(6), **settings)["rows"]
    assert [row for row in found if "rollback" not in row] == expected


def test_a_killed_rank_changes_no_bit(start_ranks: StartRanks, tmp_path: Path) -> None:
    """Sharded, killed between a rollback and the next checkpoint."""

    def killed(run: Run) -> bool:
        if join_ranks().rank == 1 and run.state.rollbacks == 1 and run.state.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return once(run)

    def work(name: str, bad: Bad) -> Any:
        return train(tmp_path / name, bad=bad, shard=True, ema=0.9)

    def first() -> None:
        work("whole", once)
        work("cut", killed)

    assert start_ranks(2, first, group=True).codes() == [76, -signal.SIGKILL]
    assert len(list((tmp_path / "cut").glob("not-finite-*"))) == 1
    found, _ = start_ranks(2, work, "cut", once, group=True).results()
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    torch.testing.assert_close(found["published"], expected, rtol=0, atol=0)
    assert found["rows"] == lines(tmp_path / "whole")
    assert [row["bad_step"] for row in found["rows"] if "rollback" in row] == [8]


def test_gives_up_after_three_times(
    start_ranks: StartRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """While the checkpoint is read the others have the patience of a save."""
    restore_latest = checkpointer.Checkpointer.restore_latest

    def watched(self: checkpointer.Checkpointer, **settings: Any) -> Any:
        watch = join_ranks().watch
        assert watch is not None
        assert watch._progress._phase == ("starting" if self.last_good is None else SAVING)
        return restore_latest(self, **settings)

    monkeypatch.setattr(checkpointer.Checkpointer, "restore_latest", watched)

    def work() -> str:
        try:
            train(tmp_path / "run", bad=lambda run: run.state.step == 7)
        except NotFinite as error:
            return str(error)
        except FailedElsewhere as error:
            return f"exit code {error.code}"
        return "the end"

    first, second = start_ranks(2, work, group=True).results()
    assert "step 8 (epoch 2): the loss or a gradient is NaN or infinite, after 3 rollbacks" in first
    assert second == "exit code 76"
    err = capfd.readouterr().err
    for count, rate in ((1, "0.5"), (2, "0.25"), (3, "0.125")):
        says = f"rollback {count} of 3: going on from step 6 with {rate} of the learning rate"
        assert err.count(says) == 1


def test_powersgd_forgets_what_was_not_finite(
    start_ranks: StartRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16 a gradient that overflows is skipped, and the next ones are good again."""
    monkeypatch.setattr("flambeau.parallel.gradient_sync.ddp._POWER_SGD_START", 2)

    def work() -> tuple[list[Tensor], float]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 2))
        run = Run(
            tmp_path / "run", model, sgd(model), rows(32, 1), duration="3ep", batch_size=8, bar=False,
            precision="fp16", compression="powersgd",
        )  # fmt: skip
        skipped = []
        for _ in run.epochs():
            for x, y in run.batches():
                loss = cross_entropy(model(x), y)
                if run.state.step == 5 and join_ranks().rank == 1:
                    loss = loss + (model[2].weight * 0).sum().sqrt()  # only the gradient is NaN
                run.step(loss)
                skipped.append(run._parts.amp.skipped.clone())
        return skipped, run._parts.amp.loss_scale()

    for skipped, scale in start_ranks(2, work, group=True).results():
        assert [step for step, was in enumerate(skipped) if was] == [5]
        assert scale == 65536 / 2
