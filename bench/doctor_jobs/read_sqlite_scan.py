"""Samples are selected by name from an SQLite table that has no index. The Trainer of transformers."""

import sqlite3
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import job

CAUSE = "read"
WHERE = "blob, label = self.db.execute(QUERY, (self.names[index],)).fetchone()"
REMEDY = None
TRAINER = "transformers"

QUERY = "SELECT vector, label FROM samples WHERE name = ?"
COUNT, SIZE = 6000, 128


def create(path: Path, with_index: bool) -> None:
    rng = np.random.default_rng(3)
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE samples (vector BLOB, label INTEGER, name TEXT)")
    for number in range(COUNT):
        vector = rng.standard_normal(SIZE).astype(np.float32)
        row = vector.tobytes(), int(vector.sum() > 0), f"sample-{number:06}"
        db.execute("INSERT INTO samples VALUES (?, ?, ?)", row)
    if with_index:
        db.execute("CREATE INDEX by_name ON samples (name)")
    db.commit()
    db.close()


class Samples(Dataset):
    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path)
        self.names = [name for (name,) in self.db.execute("SELECT name FROM samples")]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict:
        blob, label = self.db.execute(QUERY, (self.names[index],)).fetchone()
        return {"x": torch.frombuffer(bytearray(blob), dtype=torch.float32), "labels": label}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE, 256), nn.ReLU(), nn.Linear(256, 2))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict:
        logits = self.layers(x)
        return {"loss": self.loss(logits, labels), "logits": logits}


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    path = job.made(job.CACHE) / f"samples{'-by-name' * told.remedied}.db"
    create(path, with_index=told.remedied)
    args = TrainingArguments(
        output_dir=str(job.CACHE / "transformers"), num_train_epochs=200, per_device_train_batch_size=32,
        save_strategy="no", report_to="none", logging_steps=1000, use_cpu=True,
    )  # fmt: skip
    Trainer(model=Perceptron(), args=args, train_dataset=Samples(path)).train()


if __name__ == "__main__":
    main()
