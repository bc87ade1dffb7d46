"""A recurrent cell written by hand, called for one time step after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "small steps"
WHERE = None
REMEDY = None
TRAINER = "plain"


class GatedCell(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.update = nn.Linear(inputs + hidden, hidden)
        self.reset = nn.Linear(inputs + hidden, hidden)
        self.candidate = nn.Linear(inputs + hidden, hidden)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        both = torch.cat([x, h], dim=-1)
        z = torch.sigmoid(self.update(both))
        r = torch.sigmoid(self.reset(both))
        new = torch.tanh(self.candidate(torch.cat([x, r * h], dim=-1)))
        return (1 - z) * h + z * new


class Unrolled(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.cell = GatedCell(inputs, hidden)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


class Fused(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:
        _, h = super().forward(x)
        return h[0]


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    x = torch.randn(3000, 120, 8)
    y = x[:, -20:].mean(dim=(1, 2)).unsqueeze(1)
    loader = DataLoader(job.Repeated(TensorDataset(x, y), 10), batch_size=8, shuffle=True)
    body = Fused(8, 24, batch_first=True) if told.remedied else Unrolled(8, 24)
    model = nn.Sequential(body, nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for epoch in range(100):
        total = torch.zeros(())
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch + 1}: mse {total.item() / len(loader):.5f}")


if __name__ == "__main__":
    main()
