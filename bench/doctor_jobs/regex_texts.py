"""Texts are cleaned by regular expressions when a batch is put together. A generator of batches."""

import random
import re
from collections.abc import Iterator

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

import job

CAUSE = "collate"
WHERE = r"""text = re.sub(r"(\w+)\s+(?=\w+ing\b)", r"\1_", text)"""
REMEDY = None
TRAINER = "plain"

WORDS = ["training", "loss", "of", "a", "model", "seeing", "data", "learning", "batch", "and"]


def texts(count: int) -> list[tuple[str, int]]:
    draws = random.Random(1)
    return [(" ".join(draws.choices(WORDS, k=500)), draws.randrange(4)) for _ in range(count)]


def clean(text: str) -> str:
    text = re.sub(r"(\w+)\s+(?=\w+ing\b)", r"\1_", text)
    return text[:512]


def raw(samples: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    codes = [list(text[:512].encode()) for text, _ in samples]
    return torch.tensor([code + [0] * (512 - len(code)) for code in codes]), labels(samples)


def cleaned(samples: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return raw([(clean(text), label) for text, label in samples])


def labels(samples: list[tuple[str, int]]) -> torch.Tensor:
    return torch.tensor([label for _, label in samples])


def batches(loader: DataLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield from loader


def main() -> None:
    told = job.begin(REMEDY)
    collate = raw if told.remedied else cleaned
    loader = DataLoader(texts(3000), batch_size=16, shuffle=True, collate_fn=collate)
    model = nn.Sequential(nn.EmbeddingBag(256, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (ids, target) in enumerate(batches(loader)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), target)
        loss.backward()
        optimizer.step()
        if number % 200 == 0:
            print(f"{number:6d} {loss.item():.3f}")


if __name__ == "__main__":
    main()
