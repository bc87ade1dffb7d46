"""Which samples were trained on, kept in a list that is searched for each of them. A Trainer class."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import job

CAUSE = "python"
WHERE = "if key in self.seen:"
REMEDY = None
TRAINER = "plain"


class Numbered(Dataset):
    def __init__(self, n: int = 20_000) -> None:
        self.x = torch.randn(n, 32)
        self.y = (self.x.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return i, self.x[i], self.y[i]


class Trainer:
    def __init__(self, model: nn.Module, loader: DataLoader, *, keep: list | set) -> None:
        self.model, self.loader = model, loader
        self.opt = torch.optim.SGD(model.parameters(), lr=0.05)
        self.seen = keep
        self.repeats = 0

    def remember(self, keys: torch.Tensor) -> None:
        for key in keys.tolist():
            if key in self.seen:
                self.repeats += 1

    def train_epoch(self) -> float:
        total = 0.0
        for keys, x, y in self.loader:
            self.opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.opt.step()
            self.remember(keys)
            total += loss.item()
        return total / len(self.loader)


def main() -> None:
    told = job.begin(REMEDY)
    data = Numbered()
    numbers = range(10_000_000, 10_010_000)  # of the run before
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 2))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    trainer = Trainer(model, loader, keep=set(numbers) if told.remedied else list(numbers))
    for epoch in range(1000):
        print(f"epoch {epoch}: {trainer.train_epoch():.4f}")


if __name__ == "__main__":
    main()
