"""A training script of the usual shape: two folders of images, a loop, and an accuracy per epoch.

It stands in for those of other projects, which no test fetches, and knows nothing of flambeau.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)


class Results(NamedTuple):
    """Of a run: the last accuracy, the labels of each epoch in their order, and the loaders."""

    accuracy: float
    labels: list[list[int]]
    loaders: tuple[Any, Any]


def network(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, 2, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 24, 3, 2, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, num_classes),
    )  # fmt: skip


def main(data: Path, *, seed: int, epochs: int, is_distributed: bool = False) -> Results:
    torch.manual_seed(seed)
    numbers = [ToTensor(), Normalize([0.5, 0.45, 0.4], [0.25, 0.2, 0.3])]
    train_dataset = ImageFolder(
        data / "train", Compose([RandomResizedCrop(24), RandomHorizontalFlip(), *numbers])
    )
    val_dataset = ImageFolder(data / "val", Compose([Resize(28), CenterCrop(24), *numbers]))
    train_sampler: Any = DistributedSampler(train_dataset, 2, 0) if is_distributed else None
    train_loader: Any = DataLoader(
        train_dataset, batch_size=9, shuffle=train_sampler is None, sampler=train_sampler, drop_last=True,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    val_loader: Any
    val_loader = DataLoader(val_dataset, batch_size=16)

    model = network(len(train_dataset.classes))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    labels, accuracy = [], 0.0
    for epoch in range(epochs):
        if is_distributed:
            train_loader.sampler.set_epoch(epoch)
        labels.append(train(train_loader, model, optimizer))
        schedule.step()
        accuracy = validate(val_loader, model)
    return Results(accuracy, labels, (train_loader, val_loader))


def train(loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    model.train()
    seen: list[int] = []
    for images, target in loader:
        loss = nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += target.tolist()
    return seen


def validate(loader: Any, model: nn.Module) -> float:
    """Percent that are right."""
    model.eval()
    right = 0
    with torch.no_grad():
        for images, target in loader:
            right += int((model(images).argmax(1) == target).sum())
    return 100 * right / len(loader.dataset)
