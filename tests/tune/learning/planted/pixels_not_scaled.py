"""Classify made-up images of bytes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Bytes(Dataset):
    def __init__(self, num=640):
        self.y = torch.randint(4, (num,))
        noise = torch.randint(0, 120, (num, 1, 8, 8))
        self.images = noise.to(torch.uint8)
        for i, k in enumerate(self.y.tolist()):
            self.images[i, 0, 2 * k : 2 * k + 2] += 130

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.images[index].float(), self.y[index]


torch.manual_seed(0)
loader = DataLoader(Bytes(), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
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
