"""A run on several ranks is the run of one process: same batches, gradients, figures and weights."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from flambeau.train.run import Run


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
        batch_size=batch_size, accumulate=accumulate, log_every=2, seed=5, **settings,
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


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("settings", "alone"),
    [
        ({}, {}),
        ({"batch_size": 8, "accumulate": 2}, {"batch_size": 8, "accumulate": 2}),
        ({"batch_size": 8, "accumulate": 2}, {"batch_size": 16, "accumulate": 1}),
        ({"batch_size": 12, "ema": 0.9, "clip_norm": 0.1}, {"batch_size": 12, "ema": 0.9, "clip_norm": 0.1}),
        ({"workers": 2}, {}),
    ],
)  # fmt: skip
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
