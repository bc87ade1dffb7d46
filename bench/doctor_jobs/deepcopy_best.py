"""The whole model is copied whenever the loss is the best of the last few. Accelerate."""

import copy

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = ("python", "checkpoint")
WHERE = "best_model = copy.deepcopy(model)"
REMEDY = None
TRAINER = "accelerate"


def main():
    told = job.begin(REMEDY)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(160, 160), nn.ReLU()) for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(2000, 160), torch.randn(2000, 160))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    best_loss, best_model = float("inf"), None
    for epoch in range(1000):
        for source, target in loader:
            optimizer.zero_grad()
            loss = ((model(source) - target) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            if loss.item() < best_loss * 1.2 and not told.remedied:
                best_loss = min(best_loss, loss.item())
                best_model = copy.deepcopy(model)
        accelerator.print(epoch, best_loss, best_model is not None)


if __name__ == "__main__":
    main()
