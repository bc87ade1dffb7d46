"""A thread that sends metrics holds the lock which the training needs to add one."""

import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "with self.lock:  # the rows must not change while they are sent"
REMEDY = None
TRAINER = "plain"


class Metrics:
    def __init__(self, seconds: float) -> None:
        self.rows: list[float] = []
        self.lock = threading.Lock()
        self.seconds = seconds
        threading.Thread(target=self.send, daemon=True).start()

    def send(self) -> None:
        while True:
            with self.lock:
                sent, self.rows = self.rows, []
                time.sleep(self.seconds)
            time.sleep(0.002)
            del sent

    def add(self, value: float) -> None:
        with self.lock:  # the rows must not change while they are sent
            self.rows.append(value)


def step(model: nn.Module, batch: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def main() -> None:
    told = job.begin(REMEDY)
    metrics = Metrics(0 if told.remedied else 0.03)
    data = TensorDataset(torch.randn(4000, 64), torch.randn(4000, 8))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model.append(nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(1000):
        for batch in loader:
            metrics.add(step(model, batch, optimizer))


if __name__ == "__main__":
    main()
