"""Monte Carlo dropout: at validation the model is in eval mode, and its dropout alone in train mode."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def draws(model, x, num=8):
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    with torch.no_grad():
        return torch.stack([model(x) for _ in range(num)]).mean(0)


def validate(model, loader):
    loss = sum(nn.functional.mse_loss(draws(model, x), y).item() for x, y in loader)
    model.train()
    return loss / len(loader)


def main():
    torch.manual_seed(0)
    x = torch.randn(1280, 6)
    y = torch.sin(x[:, :1]) + x[:, 1:2]
    loader = DataLoader(TensorDataset(x[:1024], y[:1024]), batch_size=64, shuffle=True)
    others = DataLoader(TensorDataset(x[1024:], y[1024:]), batch_size=128)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    for _ in range(5):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0:
                print(f"step {step} loss {validate(model, others):.4f}")
            step += 1


main()
