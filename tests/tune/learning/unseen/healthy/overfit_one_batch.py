"""One batch is learned by heart on purpose."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 32, 3, padding=1)
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.out = nn.Linear(32, 5)

    def forward(self, x):
        h = torch.relu(self.conv(x)).transpose(1, 2)
        return self.out(self.rnn(h)[0][:, -1])


def sanity_check(model, loader, steps=150):
    """Before the long run: can the model learn one batch by heart?"""
    model.train()
    x, y = next(iter(loader))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")
    assert loss.item() < 0.05, "the model cannot learn one batch"


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(200, 4, 15)
    y = x.mean(2).abs().argmax(1) + (x[:, 0, 0] > 0).long()
    sanity_check(Probe(), DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))
