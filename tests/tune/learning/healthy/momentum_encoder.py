"""BYOL: the target network has no gradient and no optimizer, it follows the online network."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def head(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, outputs)
    )


class BYOL(nn.Module):
    def __init__(self, decay=0.97):
        super().__init__()
        self.decay = decay
        self.online = head(40, 16)
        self.predictor = head(16, 16)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, first, second):
        return self.one_way(first, second) + self.one_way(second, first)

    def one_way(self, seen, hidden):
        prediction = F.normalize(self.predictor(self.online(seen)), dim=1)
        with torch.no_grad():
            wanted = F.normalize(self.target(hidden), dim=1)
        return 2 - 2 * (prediction * wanted).sum(1).mean()

    @torch.no_grad()
    def update_target(self):
        pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
        for slow, fast in pairs:
            slow.mul_(self.decay).add_(fast, alpha=1 - self.decay)


def main():
    torch.manual_seed(0)
    data = torch.randn(2048, 5) @ torch.randn(5, 40)
    model = BYOL()
    parameters = [*model.online.parameters(), *model.predictor.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    for step in range(120):
        x = data[torch.randint(2048, (128,))]
        loss = model(x + 0.5 * torch.randn_like(x), x + 0.5 * torch.randn_like(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update_target()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
