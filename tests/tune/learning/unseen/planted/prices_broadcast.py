import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Houses(Dataset):
    def __init__(self, n=800, seed=7):
        rng = np.random.default_rng(seed)
        self.area = rng.uniform(30, 200, n)
        self.rooms = rng.integers(1, 7, n)
        self.age = rng.uniform(0, 80, n)
        self.price = 3.0 * self.area + 20 * self.rooms - 1.5 * self.age + rng.normal(0, 10, n)

    def __len__(self):
        return len(self.area)

    def __getitem__(self, i):
        row = [(self.area[i] - 115) / 50, (self.rooms[i] - 3.5) / 1.7, (self.age[i] - 40) / 23]
        price = (self.price[i] - 355) / 160
        return torch.tensor(row, dtype=torch.float32), torch.tensor(price, dtype=torch.float32)


class Regressor(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.last = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.last(self.net(x))


class Trainer:
    def __init__(self):
        self.model = Regressor(32)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.n = 0

    def compute_loss(self, batch):
        features, price = batch
        predicted = self.model(features)
        return ((predicted - price) ** 2).mean()

    def run(self, loader, epochs):
        for _ in range(epochs):
            for batch in loader:
                loss = self.compute_loss(batch)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                print(f"step {self.n} loss {float(loss):.4f}")
                self.n += 1


torch.manual_seed(0)
Trainer().run(DataLoader(Houses(), batch_size=32, shuffle=True), 3)
