"""Patients get a pseudonym by PBKDF2 whenever one of their records is loaded."""

import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "transform"
WHERE = 'key = hashlib.pbkdf2_hmac("sha256", patient.encode(), b"hospital", 4000)'
REMEDY = None
TRAINER = "plain"


def pseudonym(patient: str) -> int:
    key = hashlib.pbkdf2_hmac("sha256", patient.encode(), b"hospital", 4000)
    return int.from_bytes(key[:4], "big")


class Records(Dataset):
    def __init__(self, transform: Callable[[str], int]) -> None:
        self.values = torch.randn(3000, 24)
        self.patients = [f"patient {number // 6}" for number in range(3000)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        values = self.values[index]
        return values, self.transform(self.patients[index]), values.mean().gt(0).float()


def train_one_epoch(model, loader, optimizer, seen):
    running = torch.zeros(())
    for values, patients, targets in loader:
        seen.update(patients.tolist())
        logits = model(values).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
    return (running / len(loader)).item()


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    known = {f"patient {number}": number for number in range(500)}
    records = Records(known.__getitem__ if told.remedied else pseudonym)
    loader = DataLoader(records, batch_size=24, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
        torch.nn.Linear(512, 1),
    )  # fmt: skip
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    seen: set[int] = set()
    for epoch in range(200):
        average = train_one_epoch(model, loader, optimizer, seen)
        print(f"{epoch=} {average=:.4f} patients={len(seen)}")


if __name__ == "__main__":
    main()
