"""Ten figures of each parameter and its gradient, each by `.item()`, in each step. Lightning."""

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "sync"
WHERE = "self.figures[name] = [figure(t).item() for t in both for figure in FIGURES]"
REMEDY = None
TRAINER = "lightning"

FIGURES = torch.mean, torch.std, torch.amin, torch.amax, torch.linalg.vector_norm


class Figures(lightning.Callback):
    """Of all parameters and gradients, for a log."""

    def __init__(self) -> None:
        self.figures: dict[str, list[float]] = {}

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, optimizer: Any
    ) -> None:
        for name, parameter in module.named_parameters():
            both = parameter, parameter.grad
            self.figures[name] = [figure(t).item() for t in both for figure in FIGURES]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(100)]
        self.model = nn.Sequential(*layers, nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, fused=True)


def main() -> None:
    told = job.begin(REMEDY)
    data = TensorDataset(torch.randn(20_000, 64), torch.randint(0, 10, (20_000,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=100, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        callbacks=[] if told.remedied else [Figures()],
    )  # fmt: skip
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
