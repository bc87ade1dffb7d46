"""Random flips and noise in the workers; each item draws its own random numbers."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Arrows(Dataset):
    """Small images of bars: upright or lying."""

    def __init__(self, num, augment):
        self.num = num
        self.augment = augment

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        label = int(rng.integers(2))
        image = 0.4 * rng.normal(size=(10, 10))
        place = rng.integers(1, 9)
        if label:
            image[place] += 1
        else:
            image[:, place] += 1
        image = torch.from_numpy(image.astype("float32"))[None]
        if self.augment and torch.rand(1) < 0.5:
            image = image.flip(2)
        if self.augment:
            image = image + 0.2 * torch.randn_like(image)
        return image, label


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        Arrows(2560, augment=True), batch_size=32, shuffle=True, num_workers=2, drop_last=True
    )
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
