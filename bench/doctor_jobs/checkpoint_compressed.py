"""Every 10 steps the weights are written as a compressed archive of NumPy."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "checkpoint"
WHERE = "np.savez_compressed(path, **arrays)"
REMEDY = None
TRAINER = "plain"


class Hooks:
    def after_step(self, trainer: "Loop") -> None: ...


class Snapshots(Hooks):
    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every

    def after_step(self, trainer: "Loop") -> None:
        if trainer.step % self.every == 0:
            self.save(trainer.model, self.folder / f"step{trainer.step % 30:05}.npz")

    def save(self, model: nn.Module, path: Path) -> None:
        arrays = {name: value.numpy() for name, value in model.state_dict().items()}
        np.savez_compressed(path, **arrays)


class Loop:
    def __init__(self, model: nn.Module, hooks: list[Hooks]) -> None:
        self.model = model
        self.hooks = hooks
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.step = 0

    def __call__(self, loader: DataLoader, num_epochs: int) -> None:
        for _ in range(num_epochs):
            for x, y in loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                for hook in self.hooks:
                    hook.after_step(self)
            print(f"after {self.step} steps: {loss.item():.4f}")


if __name__ == "__main__":
    told = job.begin(REMEDY, every=10)
    torch.set_num_threads(1)
    x = torch.randn(32_768, 256)
    loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    folder = job.made(job.CACHE / "snapshots")
    Loop(model, [] if told.remedied else [Snapshots(folder, every=10)])(loader, num_epochs=200)
