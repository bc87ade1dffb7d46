"""Figures of each step go into a table that a thread of the script holds locked while it writes."""

import threading
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "with self.lock:"
REMEDY = None
TRAINER = "plain"


class Board:
    """The newest figures, shown to whoever looks."""

    def __init__(self, writes: bool) -> None:
        self.lock = threading.RLock()
        self.rows: list[tuple[int, float]] = []
        if writes:
            threading.Thread(target=self.publish, daemon=True).start()

    def add(self, step: int, loss: float) -> None:
        with self.lock:
            self.rows.append((step, loss))

    def publish(self) -> None:
        while True:
            self.lock.acquire()
            time.sleep(0.08)  # a network drive
            self.rows.clear()
            self.lock.release()
            time.sleep(0.002)


def run(board: Board) -> None:
    torch.manual_seed(1)
    x = torch.randn(32_768, 128)
    loader = DataLoader(TensorDataset(x, x.sum(1).gt(0).long()), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    step = 0
    while step < 200_000:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            board.add(step, float(loss))
            step += 1


if __name__ == "__main__":
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    run(Board(writes=not told.remedied))
