"""Batches of 38 MB that go through a pipe from the workers, because they are NumPy arrays."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "send"
WHERE = None
REMEDY = "workers=0"
TRAINER = "plain"


class Volumes(Dataset):
    """Scans of 64 slices of 96 x 96, which lie in memory."""

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self.volumes = draws.random((24, 64, 96, 96), dtype=np.float32)

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.volumes[index % 24].astype(np.float64), index % 24 % 2


def collate(samples: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    volumes, labels = zip(*samples, strict=True)
    return np.stack(volumes), np.array(labels)


def main() -> None:
    told = job.begin(REMEDY)
    workers = told.number if told.remedied else 2
    loader = DataLoader(
        Volumes(), batch_size=8, shuffle=True, num_workers=workers, collate_fn=collate
    )
    model = nn.Sequential(nn.AvgPool3d(8), nn.Flatten(), nn.Linear(8 * 12 * 12, 64), nn.ReLU())
    model.append(nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(100):
        for volumes, labels in loader:
            x = torch.from_numpy(volumes).float().unsqueeze(1)
            loss = F.cross_entropy(model(x), torch.from_numpy(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
