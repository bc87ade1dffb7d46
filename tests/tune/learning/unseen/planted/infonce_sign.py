import torch
import torch.nn.functional as F
from torch import nn


class Projector(nn.Module):
    def __init__(self, inputs=16, d=12):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.project = nn.Linear(48, d)

    def forward(self, x):
        return F.normalize(self.project(self.trunk(x)), dim=1)


class InfoNCE(nn.Module):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.temperature = temperature

    def forward(self, a, b):
        similarity = a @ b.T / self.temperature
        log_prob = similarity - similarity.logsumexp(dim=1, keepdim=True)
        return log_prob.diagonal().mean()


def two_views(n):
    sample = torch.randn(n, 16)
    return sample + 0.2 * torch.randn_like(sample), sample + 0.2 * torch.randn_like(sample)


def main():
    torch.manual_seed(0)
    model = Projector()
    criterion = InfoNCE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(80):
        first, second = two_views(32)
        loss = criterion(model(first), model(second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
