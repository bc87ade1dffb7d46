"""Images are bytes up to the model, whose first layer normalizes them."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Bytes(Dataset):
    def __init__(self, n):
        rng = np.random.default_rng(1)
        self.y = rng.integers(0, 3, n)
        self.x = rng.integers(0, 140, (n, 3, 12, 12)).astype(np.uint8)
        for image, label in zip(self.x, self.y):
            image[label, 3:9, 3:9] += 100

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class ByteNet(nn.Module):
    def __init__(self, mean=(95.0, 95.0, 95.0), std=(60.0, 60.0, 60.0)):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, stride=2)
        self.fc = nn.Linear(24, 3)

    def forward(self, x):
        x = (x.float() - self.mean) / self.std
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        return self.fc(x.mean((2, 3)))


torch.manual_seed(0)
model = ByteNet().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
loader = DataLoader(Bytes(600), batch_size=30, shuffle=True, num_workers=2, persistent_workers=True)
step = 0
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1
