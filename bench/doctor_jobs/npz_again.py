"""Each sample reads the array of all images out of an open .npz archive. A script without functions."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import job

CAUSE = ("read", "decode")
WHERE = 'image = self.archive["images"][i]'
REMEDY = None
TRAINER = "plain"

told = job.begin(REMEDY)
torch.set_num_threads(1)
path = job.made(job.CACHE) / "digits.npz"
rng = np.random.default_rng(0)
np.savez(
    path,
    images=rng.integers(0, 256, (3000, 28, 28), dtype=np.uint8),
    labels=rng.integers(0, 10, 3000),
)


class Digits(torch.utils.data.Dataset):
    def __init__(self):
        self.archive = np.load(path)
        self.labels = self.archive["labels"]
        if told.remedied:
            self.archive = dict(self.archive)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.archive["images"][i]
        return torch.from_numpy(image / np.float32(255)), self.labels[i]


loader = DataLoader(Digits(), batch_size=50, shuffle=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for epoch in range(300):
    running = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        running += loss.item()
    print(f"epoch {epoch + 1}: {running / len(loader):.4f}")
