"""Regression of a table: R² beside the mean error, compared with a straight line and with the best possible.

    python examples/regression.py                                 # data that it makes itself
    python examples/regression.py --csv houses.csv                # your own: the last column is predicted
    flambeau launch --procs 2 -- examples/regression.py           # or torchrun --nproc-per-node 2

Kill it and start it again: it continues to the same bits.

The data are those of Friedman ("Multivariate adaptive regression splines", 1991, section 4.3): of ten inputs
five matter, and the noise of variance 1 leaves an R² of about 0.96 to the best of all models.
"""

import argparse
import math
import os

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from flambeau import Run


class R2:
    """1 - (squared errors) / (those of predicting the mean): no mean over samples, so a metric of `Run`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64)  # of errors², targets, targets², ones

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        errors, targets = (predictions - targets).double(), targets.double()
        ones = torch.ones_like(targets)
        rows = torch.stack([errors.square(), targets, targets.square(), ones])
        self.sums = self.sums.to(rows.device) + rows.sum(1)

    def compute(self) -> Tensor:
        errors, total, squares, count = self.sums
        return 1 - errors / (squares - total**2 / count)

    # These two put the counts of several processes together.
    def state_dict(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def merge(self, state: dict[str, Tensor]) -> None:
        self.sums += state["sums"].to(self.sums.device)


class Regressor(nn.Module):
    """From inputs to targets in their own units: the statistics of the data are part of the weights."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        super().__init__()
        for name, values in {"input": inputs, "target": targets}.items():
            self.register_buffer(f"{name}_mean", values.mean(0))
            self.register_buffer(f"{name}_std", values.std(0).clamp(min=1e-6))
        width = 128
        self.layers = nn.Sequential(
            nn.Linear(inputs.shape[1], width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layers((inputs - self.input_mean) / self.input_std).squeeze(1)
        return outputs * self.target_std + self.target_mean


def friedman(num_rows: int) -> Tensor:
    """(N, 11) of ten inputs in [0, 1) and the target."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_rows, 10, generator=generator)
    curve = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    target = curve + 10 * x[:, 3] + 5 * x[:, 4] + torch.randn(num_rows, generator=generator)
    return torch.cat([x, target[:, None]], 1)


def read_csv(path: str) -> Tensor:
    """The numbers of a file with one line of headings, its rows shuffled."""
    import numpy as np

    rows = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32))
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def straight_line(train: TensorDataset, test: TensorDataset) -> float:
    """The R² of linear least squares, to compare with."""
    (x, y) = train.tensors
    (x_test, y_test) = test.tensors
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], 1), y[:, None]).solution
    r2 = R2()
    r2.update((x_test @ solution[:-1] + solution[-1]).squeeze(1), y_test)
    return float(r2.compute())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", help="your own table; the last column is predicted")
    parser.add_argument("--rows", type=int, default=8000, help="of the data that it makes itself")
    parser.add_argument("--duration", default="40ep")
    parser.add_argument("--checkpoint-every", default="1ep")
    parser.add_argument("--out", default="runs/regression")
    told = parser.parse_args()

    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)

    rows = read_csv(told.csv) if told.csv else friedman(told.rows)
    num_test = len(rows) // 5
    train, test = (
        TensorDataset(part[:, :-1], part[:, -1])
        for part in rows.split([len(rows) - num_test, num_test])
    )
    torch.manual_seed(0)  # of the initial weights
    model = Regressor(*train.tensors).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, fused=True)
    run = Run(
        told.out,
        model,
        optimizer,
        train,
        duration=told.duration,
        checkpoint_every=told.checkpoint_every,
        batch_size=64,
        schedule="cosine",
        warmup="5%",
        metrics={"val_r2": R2()},
        best="val_r2",
        best_mode="max",
        config={"rows": len(rows), "sum": float(rows.sum())},  # other data are refused on a resume
    )
    for _ in run.epochs():
        for inputs, targets in run.batches():
            run.step(mse_loss(model(inputs), targets))
        for inputs, targets in run.evaluate(test):
            predictions = model(inputs)
            run.log(val_r2=(predictions, targets), val_mae=(predictions - targets).abs())
    if os.environ.get("RANK", "0") == "0":
        figures = run.result.metrics
        print(f"straight line: R² {straight_line(train, test):.4f}")
        print(f"this network: R² {figures['val_r2']:.4f}, mean error {figures['val_mae']:.4f}")


if __name__ == "__main__":
    main()
