"""A gamma, as a power of NumPy in float64, is applied to whole images of which a small crop is used then."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = ("transform", "few workers")
WHERE = "return image**gamma"
REMEDY = None
TRAINER = "plain"


class Compose:
    def __init__(self, *steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class Gamma:
    def __init__(self, low=0.7, high=1.5):
        self.low, self.high = low, high

    def __call__(self, image):
        gamma = random.uniform(self.low, self.high)
        return image**gamma


class RandomCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        height, width = image.shape[:2]
        top = random.randint(0, height - self.size)
        left = random.randint(0, width - self.size)
        return image[top : top + self.size, left : left + self.size]


class HorizontalFlip:
    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, image):
        return image[:, ::-1] if random.random() < self.p else image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1), dtype=np.float32))


class Slides(Dataset):
    def __init__(self, images, transform):
        self.images, self.transform = images, transform

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        image = self.images[index % len(self.images)] / 255.0
        return self.transform(image), index % len(self.images) % 2


def main():
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, 256, 256, 3), dtype=np.uint8)
    crop, gamma = RandomCrop(48), Gamma()
    first, second = (crop, gamma) if told.remedied else (gamma, crop)
    transform = Compose(first, second, HorizontalFlip(), ToTensor())
    train_loader = DataLoader(Slides(images, transform), batch_size=16, shuffle=True)
    model = job.small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(100):
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            if batch_idx % 50 == 0:
                print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}] {loss.item():.6f}")


if __name__ == "__main__":
    main()
