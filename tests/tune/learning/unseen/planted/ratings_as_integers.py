import csv
import io

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def table(n):
    """A CSV of users, items and ratings between 0 and 1."""
    users = torch.randn(30, 4)
    items = torch.randn(40, 4)
    out = io.StringIO()
    writer = csv.writer(out)
    for _ in range(n):
        u = torch.randint(30, ()).item()
        i = torch.randint(40, ()).item()
        writer.writerow([u, i, f"{torch.sigmoid(users[u] @ items[i]).item():.3f}"])
    out.seek(0)
    return out


class Ratings(Dataset):
    def __init__(self, file):
        rows = list(csv.reader(file))
        self.pairs = torch.tensor([[int(r[0]), int(r[1])] for r in rows])
        self.ratings = torch.tensor([float(r[2]) for r in rows]).to(self.pairs.dtype)

    def __len__(self):
        return len(self.ratings)

    def __getitem__(self, i):
        return self.pairs[i], self.ratings[i]


class Factorization(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(30, 8)
        self.item = nn.Embedding(40, 8)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, pairs):
        u = self.user(pairs[:, 0])
        return (u * self.item(pairs[:, 1])).sum(1) + self.bias


torch.manual_seed(0)
model = Factorization()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
step = 0
for epoch in range(2):
    for pairs, rating in DataLoader(Ratings(table(1500)), batch_size=32, shuffle=True):
        loss = nn.functional.mse_loss(model(pairs), rating.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1
