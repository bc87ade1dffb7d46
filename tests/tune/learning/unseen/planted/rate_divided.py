import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Settings:
    base_lr = 1e-3
    batch_size = 32
    accumulate = 1
    epochs = 3

    def scaled_lr(self, dataset_size):
        """Linear scaling rule."""
        steps = dataset_size // self.batch_size * self.epochs
        return self.base_lr / (self.batch_size * steps * 100)


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.gru = nn.GRU(3, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        _, h = self.gru(x)
        return self.out(h[-1])


def weather(n):
    x = torch.randn(n, 10, 3).cumsum(1) * 0.3
    y = 0.7 * x[:, -1, :1] + 0.2 * x[:, -3, 1:2]
    return TensorDataset(x, y)


def main():
    torch.manual_seed(0)
    settings = Settings()
    dataset = weather(960)
    model = Forecaster()
    lr = settings.scaled_lr(len(dataset))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    step = 0
    for _ in range(settings.epochs):
        for x, y in DataLoader(dataset, settings.batch_size, shuffle=True):
            loss = nn.functional.l1_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
