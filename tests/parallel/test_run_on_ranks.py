"""A run on several ranks is the run of one process: same batches, gradients, figures and weights."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from flambeau.errors import InputError
from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm
from flambeau.run.run import Run


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """37 noisy rows: the noise is drawn when a row is read, as augmentation is."""

    def __init__(self, length: int = 37) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randn(length, 6, generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index] + 0.1 * torch.randn(6), torch.tensor(int(self.rows[index, 0] > 0))


def make_model(*, dropout: float = 0.0, norm: type[nn.Module] = nn.LayerNorm) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2)
    )


def train(
    folder: Path,
    *,
    batch_size: int = 8,
    accumulate: int = 1,
    model: nn.Module | None = None,
    data: Any = None,
    duration: str = "3ep",
    **settings: Any,
) -> dict[str, Any]:
    """A whole run; its weights, its result, and the lines of metrics.jsonl."""
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    run = Run(
        folder, model, optimizer, Rows() if data is None else data, duration=duration,
        accumulate=accumulate, log_every=2, seed=5,
        **({} if isinstance(data, DataLoader) else {"batch_size": batch_size}), **settings,
    )  # fmt: skip
    for _ in run.epochs():
        for rows, targets in run.batches():
            loss = cross_entropy(model(rows), targets)
            run.log(accuracy=model(rows).argmax(1) == targets)
            run.step(loss)
        for rows, targets in run.evaluate(Rows(11)):
            run.log(val_accuracy=model(rows).argmax(1) == targets, val_count=1.0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("images_per_s", None)
        line.pop("data_wait", None)
    return {
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "lines": lines,
        "result": run.result,
        "order": run.state.order_crc,
    }


StartRanks = Callable[..., Any]


@pytest.mark.parametrize(
    ("world", "settings", "alone"),
    [
        (2, {}, {}),
        (4, {}, {}),
        (2, {"batch_size": 8, "accumulate": 2}, {"batch_size": 8, "accumulate": 2}),
        (4, {"batch_size": 8, "accumulate": 2}, {"batch_size": 16, "accumulate": 1}),
        (
            4,
            {"batch_size": 12, "ema": 0.9, "clip_norm": 0.1},
            {"batch_size": 12, "ema": 0.9, "clip_norm": 0.1},
        ),
        (2, {"workers": 2}, {}),
    ],
)
def test_ranks_do_what_one_process_does(
    start_ranks: StartRanks, tmp_path: Path, world: int, settings: Any, alone: Any
) -> None:
    one = train(tmp_path / "one", **alone)
    ranks = start_ranks(world, lambda: train(tmp_path / "many", **settings)).results()
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=2e-4, atol=2e-6)
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, ranks[0]["weights"][name])  # to the bit, among ranks
        assert rank["order"] == one["order"]
        assert rank["result"].metrics == pytest.approx(one["result"].metrics)
    for line, expected in itertools.zip_longest(ranks[0]["lines"], one["lines"]):
        assert line == pytest.approx(expected, rel=1e-4)


def test_dropout_and_noise_are_those_of_micro_batches(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    """Two ranks that share a batch draw what one process draws that accumulates the two halves."""

    def work(name: str, **settings: Any) -> dict[str, Any]:
        return train(tmp_path / name, model=make_model(dropout=0.4), **settings)

    one = work("one", batch_size=4, accumulate=2, duration="4st")
    ranks = start_ranks(2, lambda: work("many", batch_size=8, duration="4st")).results()
    torch.testing.assert_close(ranks[0]["weights"], one["weights"], rtol=1e-4, atol=1e-6)
    alone = work("other", batch_size=8, duration="4st")
    with pytest.raises(AssertionError):  # dropout matters here
        torch.testing.assert_close(ranks[0]["weights"], alone["weights"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world", [2, 4])
def test_sync_batchnorm_makes_ranks_one_batch(
    start_ranks: StartRanks, tmp_path: Path, world: int
) -> None:
    """With 37 rows in batches of 12 the last one is a single row, and most ranks have a stand-in."""

    def make() -> nn.Module:
        model = make_model(norm=nn.BatchNorm1d)
        model[0] = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 16, 1))
        model[1] = nn.BatchNorm1d(16)
        model[3] = nn.Flatten()
        return model

    def work() -> dict[str, Any]:
        return train(
            tmp_path / "many", model=convert_sync_batchnorm(make()), batch_size=9, data=Rows(38)
        )

    one = train(tmp_path / "one", model=make(), batch_size=9, data=Rows(38))
    for rank in start_ranks(world, work).results():  # 7e-6 off with two threads for a rank
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=2e-4, atol=3e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_batches_of_a_loader_are_shared(
    start_ranks: StartRanks, tmp_path: Path, world: int
) -> None:
    def data() -> DataLoader[Any]:
        return DataLoader(TensorDataset(*zip_rows()), batch_size=8, shuffle=True)

    one = train(tmp_path / "one", data=data(), accumulate=2)
    for rank in start_ranks(
        world, lambda: train(tmp_path / "many", data=data(), accumulate=2)
    ).results():
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=2e-4, atol=2e-6)


def zip_rows() -> tuple[Tensor, Tensor]:
    rows = Rows().rows
    return rows, (rows[:, 0] > 0).long()


def test_batches_of_a_distributed_sampler_are_shares(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    def work() -> tuple[list[float], Any]:
        dataset = TensorDataset(torch.arange(12.0)[:, None], torch.zeros(12, dtype=torch.int64))
        torch.distributed.init_process_group("gloo")
        sampler = DistributedSampler(dataset, shuffle=True)
        loader = DataLoader(dataset, batch_size=3, sampler=sampler)
        model = nn.Linear(1, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        seen = []
        run = Run(tmp_path / "run", model, optimizer, loader, duration="2ep")
        for _ in run.epochs():
            for rows, targets in run.batches():
                seen += rows.flatten().tolist()
                run.step(cross_entropy(model(rows), targets))
        return seen, run.state.step

    (first, steps), (second, _) = start_ranks(2, work).results()
    assert steps == 4
    for epoch in range(2):
        part = slice(6 * epoch, 6 * epoch + 6)
        assert sorted(first[part] + second[part]) == list(range(12))
    assert first[:6] != first[6:]  # set_epoch was called


class Branches(nn.Module):
    """A branch that is never used, one that only rank 0 uses, and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.some = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        logits = self.used(rows)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            logits = logits + self.some(rows)
        if self.training:
            assert isinstance(self.seen, Tensor)
            logits = logits + 0.01 * self.seen
            self.seen.add_(rows.detach().mean())
        return logits


def test_parameters_without_a_gradient_do_not_matter(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    def work() -> dict[str, Any]:
        torch.manual_seed(0)
        model = Branches()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        after = train(tmp_path / "run", model=model)["weights"]
        return {"before": before, "after": after}

    first, second = start_ranks(2, work).results()
    for name in first["after"]:
        if name != "seen":
            assert torch.equal(first["after"][name], second["after"][name]), name
        assert torch.equal(first["before"][name], first["after"][name]) == ("unused" in name)
    assert first["after"]["seen"] != 0


@pytest.mark.parametrize("compression", ["fp16", "bf16", "powersgd"])
def test_compressed_gradients_train_nearly_the_same(
    start_ranks: StartRanks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compression: str,
) -> None:
    monkeypatch.setattr("flambeau.parallel.gradient_sync.ddp._POWER_SGD_START", 2)

    def work(name: str, **settings: Any) -> dict[str, Any]:
        torch.manual_seed(1)
        wide = [nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)]
        return train(tmp_path / name, model=nn.Sequential(*wide), **settings)

    plain = work("plain")
    ranks = start_ranks(2, lambda: work("compressed", compression=compression)).results()
    for name, weight in ranks[0]["weights"].items():
        assert torch.equal(weight, ranks[1]["weights"][name])
    with pytest.raises(AssertionError):  # it does compress
        torch.testing.assert_close(ranks[0]["weights"], plain["weights"], rtol=1e-5, atol=1e-7)
    far = {"rtol": 0.2, "atol": 0.1} if compression == "powersgd" else {"rtol": 0.02, "atol": 0.01}
    torch.testing.assert_close(ranks[0]["weights"], plain["weights"], **far)


@pytest.mark.parametrize("world", [2, 3])
def test_memory_formats_do_not_matter(start_ranks: StartRanks, tmp_path: Path, world: int) -> None:
    """Fused optimizers pair weights and gradients by memory: strides that differ would train nonsense."""

    def work(name: str) -> dict[str, Any]:
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Unflatten(1, (6, 1, 1)), nn.Upsample(scale_factor=5), nn.Conv2d(6, 8, 3), nn.ReLU(),
            nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4, 2),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # fmt: skip
        return train(tmp_path / name, model=model, duration="12st")

    one = work("one")
    for rank in start_ranks(world, lambda: work("many")).results():
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=1e-3, atol=1e-5)


def test_a_sampler_that_would_deal_an_epoch_out_anew_is_refused(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    """12 samples are 2 batches of 3 for each of 2 ranks, and 2 batches of at most 3 for each of 3."""

    def work(stop_at: int) -> str:
        place_rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dataset = TensorDataset(torch.arange(12.0)[:, None], torch.zeros(12, dtype=torch.int64))
        sampler = DistributedSampler(dataset, num_replicas=world, rank=place_rank)
        loader = DataLoader(dataset, batch_size=3, sampler=sampler)
        model = nn.Linear(1, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        try:
            run = Run(
                tmp_path / "run", model, optimizer, loader, duration="2ep", checkpoint_every="1st",
                bar=False,
            )  # fmt: skip
        except InputError as error:
            return str(error)
        for _ in run.epochs():
            for rows, targets in run.batches():
                if run.state.step == stop_at:
                    run.close()
                    return "closed"
                run.step(cross_entropy(model(rows), targets))
        return "finished"

    assert start_ranks(2, work, 1).results() == ["closed"] * 2
    for text in start_ranks(3, work, -1).results():
        assert "stopped within an epoch on 2 processes" in text
    assert start_ranks(2, work, -1).results() == ["finished"] * 2


def test_an_unknown_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="compression must be one of none, fp16, bf16, powersgd; got 'zip'"
    ):
        train(tmp_path / "run", compression="zip")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stop_at", [(1, 2), (1, 5), (0, 9)])
def test_one_rank_may_end_the_run_for_all(
    start_ranks: StartRanks, tmp_path: Path, stop_at: tuple[int, int]
) -> None:
    """37 rows are 5 batches of 8: the others learn of it at the end of the epoch."""

    def work() -> tuple[int, Any]:
        model, rank = make_model(), int(os.environ["RANK"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = Run(
            tmp_path / "run", model, optimizer, Rows(), duration="3ep", batch_size=8, bar=False
        )
        for _ in run.epochs():
            for rows, targets in run.batches():
                run.step(cross_entropy(model(rows), targets))
                if (rank, run.state.step) == stop_at:
                    run.stop()
            for rows, targets in run.evaluate(Rows(11)):
                run.log(val_accuracy=model(rows).argmax(1) == targets)
        return run.state.step, run.result

    first, second = start_ranks(2, work).results()
    assert first == second
    assert first[0] == (5 if stop_at[1] <= 5 else 10)
    assert first[1] is not None
