import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Patches(Dataset):
    def __init__(self, n, seed=0):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 4, n)
        base = rng.integers(0, 120, (n, 8, 8))
        for image, label in zip(base, self.labels):
            image[2 * label : 2 * label + 2] += 100
        self.images = base.astype(np.uint8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = torch.from_numpy(self.images[i]).float()
        return image.flatten(), int(self.labels[i])


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 48), nn.Linear(48, 48)])
        self.head = nn.Linear(48, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def train(model, loader, epochs=4, lr=0.02):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    step = 0
    for _ in range(epochs):
        for image, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(image), label)
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


torch.manual_seed(0)
train(MLP(), DataLoader(Patches(640), batch_size=32, shuffle=True))
