"""Read rows by name, then train."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def read_rows():
    centers = torch.randn(6, 18)
    rows = []
    for _ in range(640):
        label = int(torch.randint(6, ()))
        rows.append((centers[label] + 0.4 * torch.randn(18), label))
    return rows


def as_tensors(rows):
    x = torch.stack([row[0] for row in rows])
    y = torch.tensor(sorted(row[1] for row in rows))
    return TensorDataset(x, y)


torch.manual_seed(0)
loader = DataLoader(as_tensors(read_rows()), batch_size=32, shuffle=True)
model = nn.Linear(18, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
step = 0
for _ in range(4):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
