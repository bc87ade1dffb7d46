"""Each image brings all its outlines along, as lists and dicts, which two workers pickle for nothing."""

import random
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import job

CAUSE = "send"
WHERE = None
REMEDY = None
TRAINER = "plain"

Sample = dict[str, Any]


def outlines(draws: random.Random) -> list[dict[str, Any]]:
    return [
        {"part": n, "xy": [(draws.random(), draws.random()) for _ in range(40)]} for n in range(60)
    ]


class Scenes(Dataset):
    def __init__(self, is_lean: bool) -> None:
        draws = random.Random(0)
        self.scenes = [outlines(draws) for _ in range(128)]
        self.images = torch.rand(128, 3, 32, 32)
        self.is_lean = is_lean

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Sample:
        sample: Sample = {"image": self.images[index], "label": index % 10, "meta": None}
        if not self.is_lean:
            sample["meta"] = self.scenes[index]
        return sample


def collate(samples: list[Sample]) -> Sample:
    tensors = default_collate([(sample["image"], sample["label"]) for sample in samples])
    return {"batch": tensors, "meta": [sample["meta"] for sample in samples]}


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    scenes = job.Repeated(Scenes(told.remedied), 100)
    loader = DataLoader(
        scenes, 16, shuffle=True, num_workers=2, collate_fn=collate, persistent_workers=True
    )
    model = job.small_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(100):
        for sample in loader:
            images, labels = sample["batch"]
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"Epoch {epoch}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
