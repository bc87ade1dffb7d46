"""AdamW with foreach=False, for a model of 240 small layers. An engine of Ignite."""

import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "optimizer"
WHERE = None
REMEDY = "fused optimizer"
TRAINER = "ignite"


class Experts(nn.Module):
    """A small expert per group of inputs, of which each step asks eight."""

    def __init__(self, experts: int = 120, width: int = 24) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
            for _ in range(experts)
        )
        self.start = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start = (self.start + 8) % len(self.experts)
        asked = self.experts[self.start : self.start + 8]
        return torch.stack([expert(x) for expert in asked]).mean(dim=0)[:, 0]


def create_trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    def update(engine: Engine, batch: list[torch.Tensor]) -> float:
        model.train()
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Engine(update)


def run() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Experts()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    speed = {"fused": True} if told.remedied else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **speed)
    x = torch.randn(10_000, 24)
    loader = DataLoader(TensorDataset(x, x.std(dim=1)), batch_size=32, shuffle=True)
    trainer = create_trainer(model, optimizer)

    @trainer.on(Events.EPOCH_COMPLETED)
    def log(engine: Engine) -> None:
        print(f"Epoch {engine.state.epoch}: {engine.state.output:.4f}")

    trainer.run(loader, max_epochs=200)


if __name__ == "__main__":
    run()
