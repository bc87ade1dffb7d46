"""What `flambeau train` changes about a model, its rates and its loss, on several processes and sharded."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.data.sources.open_data import open_sources
from flambeau.parallel.gradient_sync import fsdp
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.run.run import Run
from flambeau.trainer.fit import fit, set_up
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import Prepared
from flambeau.trainer.settings.settings import Settings

StartRanks = Callable[..., Any]
NET = """
from torch import nn
def block(norm, before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, bias=False), norm(after), nn.ReLU())
def net(num_classes, channels, norm=lambda width: nn.GroupNorm(1, width)):
    return nn.Sequential(
        block(norm, channels, 4), block(norm, 4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, num_classes),
    )
def batchnorm(num_classes, channels):
    return net(num_classes, channels, nn.BatchNorm2d)
"""
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # what stays as it was, settings
    "patterns": (("0.", "1.1.bias"), {
        "freeze": "0,*.1.bias", "weights": "start", "layer_decay": 0.5, "head_lr": 0.2, "recompute": "0,1",
    }),
    "backbone": (("0.", "1."), {"freeze": "backbone", "optimizer": "adagrad"}),
    "statistics": (("0.",), {
        "model": "batchnorm", "freeze": "0", "sync_bn": True, "recompute": "1", "optimizer": "nadam",
    }),
    "teacher": ((), {
        "teacher": "start", "schedule": "plateau", "patience": 0, "optimizer": "rmsprop", "duration": "3ep",
    }),
}  # fmt: skip
WHOLE = {"muon": ((), {"optimizer": "muon"})}  # refused with sharded weights


def train(
    images: Path, folder: Path, *, model: str = "net", **given: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights before and after, and the rates that metrics.jsonl has."""
    torch.set_num_threads(1)
    train, val = open_sources(images, seed=0)
    paths = {
        name: str(images.parent / given[name]) for name in ("weights", "teacher") if name in given
    }
    settings = Settings(**{
        "data": str(images), "model": f"{images.parent}/net.py:{model}", "precision": "fp32",
        "batch_size": 4, "duration": "1ep", "schedule": "constant", "warmup": "0st", "lr": 0.02,
        **given, **paths,
    })  # fmt: skip
    resolved, facts = resolve(settings, train, val)
    training = set_up(Prepared(resolved, facts, train, val), folder=folder, bar=False)
    before = whole(training.model)
    fit(training)
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    rates = [row["learning_rate"] for row in map(json.loads, rows) if "learning_rate" in row]
    return before, whole(training.model), rates


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for name, tensor in model.state_dict().items()
    }


def test_equals_one_process(
    start_ranks: StartRanks,
    tmp_path: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    monkeypatch.setitem(fsdp.shard_model.__kwdefaults__, "unit_bytes", 100)
    train(images, tmp_path / "start", seed=3)
    capfd.readouterr()

    def work() -> dict[tuple[str, str], Any]:
        return {
            (name, shard): train(images, tmp_path / f"{name}-{shard}", shard=shard, **settings)
            for shard in ("none", "fsdp")
            for name, (_, settings) in {**CASES, **(WHOLE if shard == "none" else {})}.items()
        }

    ranks = start_ranks(2, work, group=True).results()
    said = capfd.readouterr().err
    for name, (frozen, settings) in {**CASES, **WHOLE}.items():
        before, after, rates = train(images, tmp_path / name, **settings)
        same = {tensor for tensor in before if torch.equal(before[tensor], after[tensor])}
        assert same == {tensor for tensor in before if tensor.startswith(frozen)}
        for rank in ranks:
            for shard in ("none", "fsdp")[: 1 + (name in CASES)]:
                theirs_before, theirs, their_rates = rank[name, shard]
                torch.testing.assert_close(theirs_before, before, rtol=0, atol=0)
                torch.testing.assert_close(theirs, after, rtol=2e-4, atol=2e-5)
                assert {t for t in theirs if torch.equal(theirs_before[t], theirs[t])} == same
                assert their_rates == rates
    # What is frozen, and the groups with sizes and names: as one process says it, once a job.
    table = [line for line in said.splitlines() if re.match(r"\d+ of|head|layer", line)]
    told = capfd.readouterr().err.splitlines()
    assert len(table) > 9
    assert sorted(table) == sorted(2 * [line for line in told if line in table])


def test_plateau_goes_on_with_another_number_of_ranks(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    def work(folder: str, stop_at: int = -1) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        data = torch.utils.data.TensorDataset(torch.randn(16, 3))
        plateau = ReduceOnPlateau(mode="max", patience=1, factor=0.5)
        run = Run(
            tmp_path / folder, model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True), data,
            duration="9ep", batch_size=8, schedule=plateau, best="score", bar=False,
        )  # fmt: skip
        rates = []
        for epoch in run.epochs():
            for (x,) in run.batches():
                run.step(model(x).square().mean() * 0.01)
                rates.append(run.optimizer.param_groups[0]["lr"])
                if run.state.step == stop_at:
                    run.close()
                    return rates
            for (x,) in run.evaluate(data):
                run.log(score=torch.full((len(x),), float(min(epoch, 2))))
        return rates

    expected = work("whole")
    # By torch's own: nothing is better than the third epoch, so every second one after it halves the rate.
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=1)
    by_torch = []
    for epoch in range(9):
        by_torch += [optimizer.param_groups[0]["lr"]] * 2
        theirs.step(min(epoch, 2))
    assert expected == by_torch
    assert start_ranks(2, work, "parts", 9, group=True).results() == [expected[:9]] * 2
    assert (
        work("parts") == expected[8:]
    )  # from the checkpoint after the fourth epoch, by one process
