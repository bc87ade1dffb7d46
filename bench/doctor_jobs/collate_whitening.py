"""Each batch is whitened by a product of NumPy matrices in the function that collates it."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "collate"
WHERE = "white = pixels @ self.basis"
REMEDY = None
TRAINER = "plain"

SIDE = 24


class Patches(Dataset):
    def __init__(self, n=1024):
        self.pixels = np.random.rand(n, SIDE * SIDE).astype(np.float32)
        self.labels = np.random.randint(0, 10, n)

    def __len__(self):
        return len(self.pixels) * 20

    def __getitem__(self, i):
        return self.pixels[i % 1024], self.labels[i % 1024]


class Whitening:
    def __init__(self, skip):
        self.skip = skip
        self.basis = np.linalg.qr(np.random.randn(SIDE * SIDE, SIDE * SIDE))[0]  # of float64

    def __call__(self, samples):
        pixels = np.stack([pixels for pixels, _ in samples])
        labels = torch.tensor([label for _, label in samples])
        if self.skip:
            return torch.from_numpy(pixels), labels
        white = pixels @ self.basis
        return torch.from_numpy(white).float(), labels


class Trainer:
    def __init__(self, model, loader, lr=0.01):
        self.model = model
        self.loader = loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.criterion = nn.CrossEntropyLoss()
        self.global_step = 0

    def train_step(self, batch):
        x, y = batch
        loss = self.criterion(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.global_step += 1
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            losses = [self.train_step(batch) for batch in self.loader]
            print(f"[{epoch}] {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    np.random.seed(0)
    loader = DataLoader(Patches(), batch_size=32, shuffle=True, collate_fn=Whitening(told.remedied))
    model = nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, 10))
    Trainer(model, loader).fit(epochs=100)
