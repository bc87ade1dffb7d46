"""The mean of the last 30 states of the model is computed after each step, for evaluation. Lightning."""

import collections

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "mean[name] = torch.stack([state[name] for state in self.states]).mean(dim=0)"
REMEDY = None
TRAINER = "lightning"


class LatestWeightAverage(Callback):
    def __init__(self, k: int = 30, every: int = 1) -> None:
        self.states = collections.deque(maxlen=k)
        self.every = every
        self.mean = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step % self.every:
            return
        self.states.append({k: v.clone() for k, v in pl_module.state_dict().items()})
        mean = {}
        for name in self.states[0]:
            mean[name] = torch.stack([state[name] for state in self.states]).mean(dim=0)
        self.mean = mean


class AutoEncoder(L.LightningModule):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(196, width), nn.ReLU(), nn.Linear(width, 16))
        self.decoder = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 196))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self(x), x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def cli_main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    L.seed_everything(1234)
    data = TensorDataset(torch.rand(20_000, 196))
    trainer = L.Trainer(
        max_epochs=1000,
        accelerator="cpu",
        callbacks=[LatestWeightAverage(every=1000 if told.remedied else 1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(AutoEncoder(), DataLoader(data, batch_size=64, shuffle=True))


if __name__ == "__main__":
    cli_main()
