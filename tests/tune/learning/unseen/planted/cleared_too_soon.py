import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self, n=32, code=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n, 24), nn.ReLU(), nn.Linear(24, code))
        self.decoder = nn.Sequential(nn.Linear(code, 24), nn.ReLU(), nn.Linear(24, n))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def main():
    torch.manual_seed(0)
    factors = torch.randn(1000, 4)
    x = torch.tanh(factors @ torch.randn(4, 32))
    loader = DataLoader(TensorDataset(x), batch_size=50, shuffle=True)
    model = Autoencoder()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    step = 0
    best = float("inf")
    for epoch in range(4):
        model.train()
        started = time.perf_counter()
        total = 0.0
        for (batch,) in loader:
            # forward
            output = model(batch)
            loss = criterion(output, batch)
            # backward
            loss.backward()
            total += loss.item()
            grad_norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
            # update
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f} grad {grad_norm:.3f}")
            step += 1
        mean = total / len(loader)
        best = min(best, mean)
        print(f"epoch {epoch}: {mean:.4f}, best {best:.4f}, {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
