"""Labels are looked up in a database that has no index on what they are looked up by."""

import sqlite3

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = ("read", "transform")
WHERE = 'found = self.db.execute("select label from labels where name = ?", (name,)).fetchone()'
REMEDY = None
TRAINER = "plain"


class Labeled(Dataset):
    def __init__(self, path, images: torch.Tensor) -> None:
        self.path, self.images = path, images
        self.db: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if self.db is None:  # in each worker
            self.db = sqlite3.connect(self.path)
        name = f"{number:08}.png"
        found = self.db.execute("select label from labels where name = ?", (name,)).fetchone()
        return self.images[number], found[0]


def write_labels(path, count: int, index: bool) -> None:
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as db:
        db.execute("create table labels (name text, label integer)")
        rows = ((f"{number:08}.png", number % 10) for number in range(count))
        db.executemany("insert into labels values (?, ?)", rows)
        if index:
            db.execute("create index names on labels (name)")


def run_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    losses = 0.0
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += loss.item()
    return losses / len(loader)


def main() -> None:
    told = job.begin(REMEDY)
    path = job.made(job.CACHE) / "labels.sqlite"
    write_labels(path, 20_000, told.remedied)
    data = Labeled(path, torch.rand(10_000, 3, 16, 16))
    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    for epoch in range(100):
        print(f"{epoch}: {run_epoch(model, loader, optimizer):.3f}")


if __name__ == "__main__":
    main()
