"""The archive of all images is opened anew for each of them, and all of its names are read each time."""

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "read"
WHERE = "with zipfile.ZipFile(self.path) as archive:"
REMEDY = None
TRAINER = "plain"


class ZippedIcons(Dataset):
    def __init__(self, path: Path, keep_open: bool = False) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.names = archive.namelist()
        self.archive = zipfile.ZipFile(path) if keep_open else None

    def __len__(self) -> int:
        return len(self.names)

    def content(self, name: str) -> bytes:
        if self.archive is not None:
            return self.archive.read(name)
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        name = self.names[index]
        icon = np.load(io.BytesIO(self.content(name)))
        return torch.from_numpy(icon).float() / 255, int(name.split("/")[0])


def write_archive(path: Path, count: int = 3000) -> None:
    rng = np.random.default_rng(2)
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            buffer = io.BytesIO()
            np.save(buffer, rng.integers(0, 256, (3, 16, 16), dtype=np.uint8))
            archive.writestr(f"{number % 5}/{number:06}.npy", buffer.getvalue())


def train(model: nn.Module, loader: DataLoader, num_epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs)
    for epoch in range(num_epochs):
        for icons, labels in loader:
            loss = nn.functional.cross_entropy(model(icons), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(f"[{epoch:03}] lr {scheduler.get_last_lr()[0]:.4f} loss {loss.item():.3f}")


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    path = job.made(job.CACHE) / "icons.zip"
    write_archive(path)
    loader = DataLoader(ZippedIcons(path, keep_open=told.remedied), batch_size=16, shuffle=True)
    net = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU())
    net.extend([nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(24, 5)])
    train(net, loader, num_epochs=100)


if __name__ == "__main__":
    main()
